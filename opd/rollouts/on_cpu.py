"""Settings for vLLM's build for CPUs, beside those of every engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.rollouts.served import CPU_LATENT, HF_FORMAT

SMALL_BLOCK = 32
"""Tokens of a cache block of a CPU engine whose requests begin alike: the least that its kernels take. Only full blocks are
found again, and vLLM's default is 128. With 43 tokens of prompt, 64 of response and four responses a prompt the small ones
were 1.2 times as fast; with 150 and 8, where both find 128 tokens, as fast. Episodes of ten short turns read half as much."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Facts of a model that an engine's settings depend on."""

    recurrent: bool
    """It carries a state from token to token besides the keys and values of its attention."""
    latent: bool
    """Its attention keeps latents in place of keys and values, as DeepSeek's does (MLA)."""


def cpu_settings(model_dir: Path, *, shares_prompts: bool) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for an engine on a CPU."""
    # After a part of a prompt vLLM winds the request's own random stream back, which a CPU's generator cannot do.
    # On a GPU, captured graphs go on with new weights: a reload copies into the tensors that they read.
    settings: dict[str, Any] = {"enable_chunked_prefill": False, "enforce_eager": True}
    kind = kind_of_model(model_dir)
    if kind.recurrent:
        settings["enable_prefix_caching"] = False  # vLLM cuts recurrent states at cached blocks by prompts in parts
    elif shares_prompts:
        settings["block_size"] = SMALL_BLOCK
    if kind.latent:
        settings["attention_backend"] = CPU_LATENT
    return settings


def kind_of_model(model_dir: Path) -> Kind:
    """Return the kind of a model directory, by vLLM's own reading of its config."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(model_dir), **HF_FORMAT, skip_tokenizer_init=True, trust_remote_code=False)
    model = args.create_model_config()
    return Kind(recurrent=bool(model.is_hybrid or model.is_attention_free), latent=bool(model.use_mla))
