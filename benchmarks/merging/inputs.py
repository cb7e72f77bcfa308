"""Student, experts and prompts of all cases: `python -m benchmarks.merging.inputs ORDER`, the order as JSON."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
"""The shape of SmolLM2-135M."""
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
SPECIALS = ["<pad>", "<unk>"]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Contents to write into a folder."""

    folder: str
    model_dir: str | None
    """A student to copy; without one it is a random model of SmolLM2-135M's shape."""
    tiny: bool
    dtypes: list[str]
    experts: int
    """The most that any case has."""
    prompts: int
    """For each domain."""
    prompt_tokens: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def random_model(folder: Path, dtype: str, *, tiny: bool) -> int:
    """Write a Llama with random weights, of SmolLM2-135M's shape unless it is `tiny`. Returns its rows of ids."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = TINY if tiny else SMOLLM2
    ends = {"bos_token_id": None, "eos_token_id": None}
    lm = LlamaForCausalLM(LlamaConfig(**shape, **ends, tie_word_embeddings=True)).to(getattr(torch, dtype))
    lm.save_pretrained(folder)
    rows: int = shape["vocab_size"]
    return rows


def write(order: Order) -> None:
    """The models in each type, and for each expert a file of prompts of equal length."""
    import torch

    torch.manual_seed(0)
    folder = Path(order.folder)
    lm, tokenizer = _given(order.model_dir) if order.model_dir else _random(TINY if order.tiny else SMOLLM2)
    _without_end(lm, tokenizer)
    weights = {name: weight.detach().clone() for name, weight in lm.named_parameters()}
    for name in ["student", *(f"expert-{i:02}" for i in range(order.experts))]:
        if name != "student":
            _change(lm, weights)
        for dtype in order.dtypes:
            copy.deepcopy(lm).to(getattr(torch, dtype)).save_pretrained(folder / dtype / name)
            tokenizer.save_pretrained(folder / dtype / name)
    (folder / "prompts").mkdir()
    words = single_words(tokenizer)
    for index in range(order.experts):
        draw = random.Random(index)
        lines = [
            json.dumps({"prompt": _prompt(tokenizer, words, order.prompt_tokens, draw)}) for _ in range(order.prompts)
        ]
        (folder / "prompts" / f"domain-{index:02}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _given(model_dir: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32"), AutoTokenizer.from_pretrained(model_dir)


def _random(shape: dict[str, Any]) -> tuple[Any, Any]:
    """Random weights, and a tokenizer that knows a word for every id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = [*SPECIALS, *(f"w{i}" for i in range(shape["vocab_size"] - len(SPECIALS)))]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)), tokenizer


def _without_end(lm: Any, tokenizer: Any) -> None:
    """Take every end token away, so that each response has exactly as many tokens as it may have, on both sides."""
    from transformers import GenerationConfig

    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.eos_token = None
    lm.config.bos_token_id = lm.config.eos_token_id = None
    lm.config.pad_token_id = tokenizer.pad_token_id
    lm.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)


def _change(lm: Any, weights: Mapping[str, Any]) -> None:
    """An expert: every weight of the student a per cent up or down."""
    import torch

    with torch.no_grad():
        for name, weight in lm.named_parameters():
            weight.copy_(weights[name] * torch.empty_like(weight).uniform_(0.99, 1.01))


def single_words(tokenizer: Any) -> list[str]:
    """Words that are one token each behind a blank."""
    found = []
    for index in range(len(tokenizer)):
        word = tokenizer.decode([index]).strip()
        if word.isalnum() and tokenizer(f" {word}", add_special_tokens=False)["input_ids"] == [index]:
            found.append(word)
        if len(found) == 2000:
            break
    return found


def _prompt(tokenizer: Any, words: list[str], num_tokens: int, draw: random.Random) -> str:
    """Words that make exactly so many tokens."""
    added = len(tokenizer("")["input_ids"])
    while True:  # a word without a blank before it may be several tokens
        text = " ".join(draw.choices(words, k=num_tokens - added))
        if len(tokenizer(text)["input_ids"]) == num_tokens:
            return text


def main() -> None:
    write(Order(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
