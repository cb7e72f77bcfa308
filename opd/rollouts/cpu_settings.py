"""Arguments for vLLM's CPU build, beside those that every engine gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.rollouts.served_families import CPU_LATENT, HF_FORMAT

SMALL_BLOCK = 32
"""Tokens of a cache block in a CPU engine whose requests begin alike; the kernels take no smaller ones. vLLM's default is 128, but only
full blocks are found again. With prompts of 43 tokens, responses of 64 and four responses a prompt, small blocks were 1.2 times as fast;
with prompts of 150 and responses of 8, where both sizes find 128 tokens again, as fast. Episodes of ten short turns read half as much."""


@dataclass(frozen=True, slots=True)
class ModelKind:
    """Facts about a model on which an engine's arguments depend."""

    recurrent: bool
    """True if the model carries a state from token to token besides the keys and values of its attention."""
    latent: bool
    """True if its attention keeps latents in place of keys and values, as DeepSeek's does (MLA)."""


def cpu_settings(model_dir: Path, *, shares_prompts: bool) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for an engine on a CPU. `shares_prompts`: many requests begin alike."""
    # Chunked prefill: after a part of a prompt vLLM winds the request's own random stream back, which a CPU's generator cannot do.
    # Eager: only on a GPU do captured graphs go on with new weights, because there a reload copies into the tensors that they read.
    settings: dict[str, Any] = {"enable_chunked_prefill": False, "enforce_eager": True}
    kind = inspect_model_kind(model_dir)
    if kind.recurrent:
        # vLLM cuts recurrent states at the ends of cached blocks by reading prompts in parts, which is off.
        settings["enable_prefix_caching"] = False
    elif shares_prompts:
        settings["block_size"] = SMALL_BLOCK
    if kind.latent:
        settings["attention_backend"] = CPU_LATENT
    return settings


def inspect_model_kind(model_dir: Path) -> ModelKind:
    """Return the kind of the model in a directory, as vLLM itself reads its config."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(model_dir), **HF_FORMAT, skip_tokenizer_init=True, trust_remote_code=False)
    model = args.create_model_config()
    return ModelKind(recurrent=bool(model.is_hybrid or model.is_attention_free), latent=bool(model.use_mla))
