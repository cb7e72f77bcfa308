"""Feed-forward by kind: one gated block in every layer, or a mixture of them."""

from __future__ import annotations

from dataclasses import replace

from pipelines.plan.shapes.config import ShapeConfig
from pipelines.plan.shapes.shape import ShapePart


def dense_layers(config: ShapeConfig) -> tuple[ShapePart, ...]:
    """Gate, up and down in every layer."""
    return _gated_parts("", config.hidden_size, config.intermediate_size, config.num_hidden_layers)


def fused_layers(config: ShapeConfig) -> tuple[ShapePart, ...]:
    """The same with gate and up in one matrix."""
    gate, _, down = dense_layers(config)
    return replace(gate, name="gate_up_proj", outputs=2 * gate.outputs), down


def mixture_layers(config: ShapeConfig) -> tuple[ShapePart, ...]:
    """Routed experts, shared experts and a router; the first layers may be dense."""
    width, dense_layers = config.hidden_size, config.first_k_dense_replace
    layers, experts = config.num_hidden_layers - dense_layers, config.experts
    inner = config.moe_intermediate_size or config.intermediate_size
    parts = _gated_parts("experts.", width, inner, layers, stored=experts, used=config.num_experts_per_tok)
    parts += (ShapePart(name="router", inputs=width, outputs=experts, layers=layers),)
    if config.n_shared_experts:
        parts += _gated_parts("shared_experts.", width, inner * config.n_shared_experts, layers)
    return parts + (_gated_parts("", width, config.intermediate_size, dense_layers) if dense_layers else ())


def _gated_parts(
    prefix: str, width: int, inner: int, layers: int, stored: int = 1, used: int = 1
) -> tuple[ShapePart, ...]:
    ends = (("gate_proj", width, inner), ("up_proj", width, inner), ("down_proj", inner, width))
    return tuple(
        ShapePart(name=prefix + name, inputs=i, outputs=o, layers=layers, stored=stored, used=used)
        for name, i, o in ends
    )
