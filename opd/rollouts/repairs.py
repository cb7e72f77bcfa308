"""Repairs of vLLM's CPU build for mixtures of experts and hybrids; each fault is silent otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def drop_expert_kernels(model: Any) -> None:
    """Let the reload that follows pack the experts of a mixture as the first load did.

    vLLM packs experts only where it makes their kernel, and a reload keeps the kernel: it would put plain weights where
    packed ones are read.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return  # elsewhere captured graphs hold the kernel's addresses, and plain weights are what it reads
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def rotate_every_head(model: Any) -> None:
    """vLLM's CPU kernel takes queries of shape [tokens, heads, width] for one head and leaves the rest unrotated: LFM2's.

    Its PyTorch version does not; queries of shape [tokens, heads * width] stay with the kernel.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    def repaired(module: Any, kernel: Any) -> Any:
        def forward(positions: Any, query: Any, key: Any = None, **more: Any) -> Any:
            return (module.forward_native if query.ndim == 3 else kernel)(positions, query, key, **more)

        return forward

    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            module._forward_method = repaired(module, module._forward_method)


def is_recurrent(model_dir: Path) -> bool:
    """Whether the model carries a state from token to token besides the keys and values of its attention."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(model_dir), skip_tokenizer_init=True, trust_remote_code=False)
    model = args.create_model_config()
    return bool(model.is_hybrid or model.is_attention_free)
