"""Repairs of faults in vLLM's CPU build, each of which would give wrong results without an error."""

from __future__ import annotations

from typing import Any

RESTARTED = {"gpt_oss"}
"""Families for which a push starts a new engine: vLLM's reload does not reach the experts in their mixture layers, because they bypass the
loading that it watches."""


def repack_output_head(model: Any) -> None:
    """Pack the output head again after a reload on the CPU; do nothing on a GPU.

    vLLM's CPU build multiplies with a copy of the head that was packed when the weights were loaded. `reload_weights` packs these copies
    again for linear layers, but not for the embedding that a tied model uses as its head.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def drop_expert_kernels(model: Any) -> None:
    """Drop the kernels of a mixture's experts, so that the reload that follows packs the experts as the first load did.

    These experts are those in a mixture-of-experts layer. vLLM packs them only when it makes their kernel. A reload keeps the kernel, so
    it would put plain weights where the kernel reads packed ones.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return  # a GPU kernel reads plain weights, and captured CUDA graphs hold its addresses: it must stay
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def rotate_every_head(model: Any) -> None:
    """Have rotary embeddings rotate all heads of queries of shape [tokens, heads, width], which LFM2 has.

    vLLM's CPU kernel takes such queries for one head, and leaves the others unrotated. The PyTorch version rotates all of them. Queries of
    shape [tokens, heads * width] stay with the kernel, which is right for them, and faster.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    def repair_forward(module: Any, kernel: Any) -> Any:
        def forward(positions: Any, query: Any, key: Any = None, **options: Any) -> Any:
            return (module.forward_native if query.ndim == 3 else kernel)(positions, query, key, **options)

        return forward

    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            module._forward_method = repair_forward(module, module._forward_method)
