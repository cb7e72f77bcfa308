"""A few log-probs that an expert gave when it was registered: by them a scoring worker knows it again.

Hashes prove that the files are the same; the probe proves that what was loaded from them computes the same. Needs no
tokenizer and no prompts: the tokens are ids all over the vocabulary. The first ids would not do: they are often special
tokens that were hardly trained, on which SmolLM2-135M differs by 1.4 nats between float32 and bfloat16, elsewhere by 0.06.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from experts.adapter import MERGE_FIRST, AdapterInfo
from experts.model_dir import ModelInfo
from opd.config.strict import DType, Strict
from opd.errors import ModelError
from opd.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig, attach, not_linear, updates
from opd.types import Probe

TOKENS = 32


class ProbeRecord(Strict):
    """A probe as it stands in the manifest."""

    dtype: DType
    """What the expert computed in: the type of its weights, float32 where that is neither."""
    mean: float
    """Mean of `logprobs`."""
    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each id after the first, in nats, to a thousandth."""

    @property
    def probe(self) -> Probe:
        """As the teacher pool takes it."""
        return Probe(token_ids=tuple(self.token_ids), logprobs=tuple(self.logprobs), dtype=self.dtype)


def take_probe(info: ModelInfo, adapter: AdapterInfo | None = None) -> ProbeRecord | None:
    """Load the model once and note its probe; None where torch is not installed (the registry alone needs none).

    With an adapter, `info` is its base, and the probe is that of both. Takes the memory of the weights.
    Raises: ModelError if transformers has no such architecture, if weights are missing, if the adapter changes what is
    no linear module, or if the log-probs are not finite.
    """
    if find_spec("torch") is None or find_spec("transformers") is None or info.vocab_size < 2:
        return None
    dtype: DType = "bfloat16" if info.dtype == "bfloat16" else "float32"
    model = _load(Path(info.path), dtype)
    if adapter is not None:
        _attach(model, Path(adapter.path))
    token_ids = probe_ids(info.vocab_size)
    logprobs = [round(value, 3) for value in _logprobs(model, token_ids, info.vocab_size)]
    if not all(abs(value) < float("inf") for value in logprobs):  # NaN is not
        raise ModelError.at(
            adapter.path if adapter else info.path,
            found="log-probs that are not finite",
            wanted="a model that computes",
            fix="take an earlier checkpoint of the training that made it",
        )
    return ProbeRecord(dtype=dtype, mean=round(fmean(logprobs), 3), token_ids=token_ids, logprobs=logprobs)


def probe_ids(vocab_size: int) -> list[int]:
    """The middles of (at most) `TOKENS` equal parts of the vocabulary."""
    num = min(TOKENS, vocab_size)
    return [(2 * i + 1) * vocab_size // (2 * num) for i in range(num)]


def _load(path: Path, dtype: DType) -> Any:
    """A full model as it lies on disk; tensors that are missing are not made up."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from opd.model_weights import attention_of

    logging.disable_progress_bar()
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            attn_implementation=attention_of(path),
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (KeyError, ValueError) as error:
        raise ModelError.at(
            path,
            found=f"a model that transformers cannot load: {error}",
            wanted="a causal language model that the installed transformers knows",
            fix="correct `architectures` and `model_type` in config.json, or install a transformers that has them",
        ) from None
    if loaded["missing_keys"]:
        raise ModelError.at(
            path,
            found=f"no weights for {', '.join(sorted(loaded['missing_keys'])[:3])}",
            wanted="every tensor that config.json calls for",
            fix="config.json and weights are of two models, or a shard is missing; copy both again",
        )
    return model.eval()


def _attach(model: Any, adapter: Path) -> None:
    """Let the base compute with the adapter, as a scoring worker does: no merged copy is written."""
    from safetensors.torch import load_file

    config = LoraConfig.model_validate_json((adapter / ADAPTER_CONFIG).read_bytes())
    tensors = {name: tensor.to(model.dtype) for name, tensor in load_file(adapter / ADAPTER_WEIGHTS).items()}
    changes = updates(config, tensors)
    odd = not_linear(model, changes)
    if odd:
        raise ModelError.at(
            f"{adapter / ADAPTER_WEIGHTS}: module `{odd[0]}`",
            found=f"an adapter of what is no linear module of {type(model).__name__} in transformers",
            wanted="linear modules only: nothing else can be scored with an adapter",
            fix=MERGE_FIRST,
        )
    attach(model, changes)


def _logprobs(model: Any, token_ids: list[int], vocab_size: int) -> list[float]:
    """Of each id after those before it, by a plain forward; rows beyond the vocabulary are padding."""
    import torch

    ids_T = torch.tensor(token_ids)
    with torch.no_grad():
        logits_T_V = model(input_ids=ids_T[None], use_cache=False).logits[0, :, :vocab_size]
    logprobs: list[float] = logits_T_V[:-1].float().log_softmax(-1).gather(1, ids_T[1:, None])[:, 0].tolist()
    return logprobs
