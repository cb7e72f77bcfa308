"""Probes: a few log-probs that an expert gives when it is registered, by which a scoring worker recognises it.

Hashes prove that the files are the same; a probe proves that the loaded model computes the same. It needs no tokenizer and no
prompts, because its tokens are ids spread over the vocabulary. The first ids would be a bad choice: many are special tokens that
were hardly trained. On these SmolLM2-135M differs by 1.4 nats between float32 and bfloat16, on others by 0.06.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from experts.adapter import AdapterInfo
from experts.merge_first import explain_merging
from experts.model_dir import ModelInfo
from experts.weight_check import check_weights
from opd.errors import ModelError
from opd.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LoraConfig,
    attach_updates,
    find_nonlinear_modules,
    read_updates,
)
from opd.records.types import Probe
from opd.settings.strict import DType, Strict

TOKENS = 32


class ProbeRecord(Strict):
    """A probe as the manifest stores it."""

    dtype: DType
    """The type that the expert computed in: that of its weights if it is float32 or bfloat16, else float32."""
    mean: float
    """Mean of `logprobs`."""
    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each id after the first, in nats, to a thousandth."""

    @property
    def probe(self) -> Probe:
        """The record in the form that the teacher pool takes."""
        return Probe(token_ids=tuple(self.token_ids), logprobs=tuple(self.logprobs), dtype=self.dtype)


def measure_probe(info: ModelInfo, adapter: AdapterInfo | None = None) -> ProbeRecord | None:
    """Load the model once and take its probe; None if torch is not installed, which the registry alone does not need.

    With an adapter, `info` is its base, and the probe is taken with the adapter attached. This needs memory for the weights.
    Raises: ModelError if transformers has no such architecture, if weights are missing or are none of the model's, if the adapter changes a
    module that is not linear, or if the log-probs are not finite.
    """
    if find_spec("torch") is None or find_spec("transformers") is None or info.vocab_size < 2:
        return None
    dtype: DType = "bfloat16" if info.dtype == "bfloat16" else "float32"
    model = _load_model(Path(info.path), dtype)
    check_weights(Path(info.path))  # loading says nothing of tensors that no module takes
    if adapter is not None:
        _attach_adapter(model, Path(adapter.path))
    # Without a begin token a Gemma gets sequences unlike any in its training, and its rounding errors are three times as large.
    begin = [info.bos_token_id] if info.bos_token_id is not None and info.bos_token_id < info.vocab_size else []
    token_ids = [*begin, *probe_ids(info.vocab_size)]
    logprobs = [round(value, 3) for value in _compute_logprobs(model, token_ids, info.vocab_size)]
    if not all(abs(value) < float("inf") for value in logprobs):  # NaN is refused too
        raise ModelError.at(
            adapter.path if adapter else info.path,
            found="log-probs that are not finite",
            wanted="finite log-probs",
            fix="take an earlier checkpoint of the training that made it",
        )
    return ProbeRecord(dtype=dtype, mean=round(fmean(logprobs), 3), token_ids=token_ids, logprobs=logprobs)


def probe_ids(vocab_size: int) -> list[int]:
    """Return the middles of (at most) `TOKENS` equal parts of the vocabulary."""
    num = min(TOKENS, vocab_size)
    return [(2 * i + 1) * vocab_size // (2 * num) for i in range(num)]


def _load_model(path: Path, dtype: DType) -> Any:
    """Load a full model. Raises: what `opd.models.weights.load_causal_lm` raises."""
    import torch
    from transformers.utils import logging

    from opd.models.weights import load_causal_lm

    logging.disable_progress_bar()
    return load_causal_lm(path, getattr(torch, dtype)).eval()


def _attach_adapter(model: Any, adapter: Path) -> None:
    """Attach the adapter to the base, as a scoring worker does: no merged copy is written."""
    from safetensors.torch import load_file

    config = LoraConfig.model_validate_json((adapter / ADAPTER_CONFIG).read_bytes())
    tensors = {name: tensor.to(model.dtype) for name, tensor in load_file(adapter / ADAPTER_WEIGHTS).items()}
    changes = read_updates(config, tensors)
    nonlinear = find_nonlinear_modules(model, changes)
    if nonlinear:
        raise ModelError.at(
            f"{adapter / ADAPTER_WEIGHTS}: module `{nonlinear[0]}`",
            found=f"an adapter of a module that is not linear in {type(model).__name__} of transformers",
            wanted="linear modules only: nothing else can be scored with an adapter",
            fix=explain_merging(adapter),
        )
    attach_updates(model, changes)


def _compute_logprobs(model: Any, token_ids: list[int], vocab_size: int) -> list[float]:
    """Return the log-prob of each id after the ids before it, by a plain forward pass; rows beyond the vocabulary are cut off."""
    import torch

    ids_T = torch.tensor(token_ids)
    with torch.no_grad():
        logits_T_V = model(input_ids=ids_T[None], use_cache=False).logits[0, :, :vocab_size]
    logprobs: list[float] = logits_T_V[:-1].float().log_softmax(-1).gather(1, ids_T[1:, None])[:, 0].tolist()
    return logprobs
