"""Formulas that make the shape of a model from its `config.json`, by kind of model.

Attention has grouped queries (plain heads are groups of one) or latent keys and values, with or without an indexer. The feed-forward part
is one gated block in every layer, or a mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pydantic import AliasChoices, Field, PositiveInt

from experts.json_files import Lenient
from opd.errors import ModelError
from pipelines.sizing.shape import Attention, Shape, ShapePart

ALWAYS_WINDOWED = ("mistral", "mixtral", "phi3")
"""Kinds that use the window whenever their config has one. Other kinds use it only if `use_sliding_window` is true."""


class ShapeConfig(Lenient):
    """The keys of transformers' configs that the formulas read. The default of a key stands for kinds of model that lack it."""

    model_type: str
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    tie_word_embeddings: bool = False
    max_position_embeddings: PositiveInt | None = None
    attention_bias: bool = False
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool = False
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: PositiveInt | None = None
    experts: int = Field(1, ge=1, validation_alias=AliasChoices("n_routed_experts", "num_local_experts", "num_experts"))
    num_experts_per_tok: PositiveInt = 1
    n_shared_experts: int = 0
    moe_intermediate_size: PositiveInt | None = None
    first_k_dense_replace: int = 0


def grouped_attention(config: ShapeConfig) -> Attention:
    """Return the attention of query heads that share keys and values in groups."""
    layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    head = config.head_dim or width // heads
    queries, keys = heads * head, (config.num_key_value_heads or heads) * head
    ends = (("q_proj", width, queries), ("k_proj", width, keys), ("v_proj", width, keys), ("o_proj", queries, width))
    biases = queries + 2 * keys if config.attention_bias or config.model_type in ("qwen2", "qwen2_moe") else 0
    norms = 2 * head if config.model_type in ("qwen3", "qwen3_moe") else 0
    return Attention(
        parts=tuple(ShapePart(name=name, inputs=i, outputs=o, layers=layers) for name, i, o in ends),
        vectors=layers * (biases + norms),
        pair=layers * 2 * queries,
        kv_values=layers * 2 * keys,
        kv_split=config.num_key_value_heads or heads,
        window=config.sliding_window if config.use_sliding_window or config.model_type in ALWAYS_WINDOWED else None,
    )


def fused_attention(config: ShapeConfig) -> Attention:
    """Return grouped attention with queries, keys and values in one matrix."""
    attention = grouped_attention(config)
    queries, keys, values, out = attention.parts
    outputs = queries.outputs + keys.outputs + values.outputs
    return replace(attention, parts=(replace(queries, name="qkv_proj", outputs=outputs), out))


def latent_attention(config: ShapeConfig) -> Attention:
    """Return multi-head latent attention, which keeps one small vector of keys and values for all heads, and one rotary key. With an
    indexer, a token looks at the `index_topk` tokens that the indexer chooses for it."""
    layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    kv_rank = config.kv_lora_rank or 0
    queries = heads * (nope + rope)
    q_rank = config.q_lora_rank
    ends = [("q_proj", width, queries)]
    if q_rank:
        ends = [("q_a_proj", width, q_rank), ("q_b_proj", q_rank, queries)]
    ends += [
        ("kv_a_proj_with_mqa", width, kv_rank + rope),
        ("kv_b_proj", kv_rank, heads * (nope + value)),
        ("o_proj", heads * value, width),
    ]
    index_heads, index = config.index_n_heads, config.index_head_dim
    if index_heads:
        ends += [
            ("wq_b", q_rank or width, index_heads * index),
            ("wk", width, index),
            ("weights_proj", width, index_heads),
        ]
    return Attention(
        parts=tuple(ShapePart(name=name, inputs=i, outputs=o, layers=layers) for name, i, o in ends),
        vectors=layers * ((q_rank or 0) + kv_rank + (2 * index if index_heads else 0)),
        pair=layers * heads * (nope + rope + value),
        kv_values=layers * (kv_rank + rope + (index if index_heads else 0)),
        kv_split=1,
        window=config.index_topk if index_heads else None,
        index_pair=layers * index_heads * index,
    )


def dense_layers(config: ShapeConfig) -> tuple[ShapePart, ...]:
    """Return the matrices gate, up and down in every layer."""
    return _gated_parts("", config.hidden_size, config.intermediate_size, config.num_hidden_layers)


def fused_layers(config: ShapeConfig) -> tuple[ShapePart, ...]:
    """Return gate and up in one matrix, and down, in every layer."""
    gate, _, down = dense_layers(config)
    return replace(gate, name="gate_up_proj", outputs=2 * gate.outputs), down


def mixture_layers(config: ShapeConfig) -> tuple[ShapePart, ...]:
    """Return routed experts, shared experts and a router; the first layers may be dense."""
    width, num_dense = config.hidden_size, config.first_k_dense_replace
    layers, experts = config.num_hidden_layers - num_dense, config.experts
    inner = config.moe_intermediate_size or config.intermediate_size
    parts = _gated_parts("experts.", width, inner, layers, stored=experts, used=config.num_experts_per_tok)
    parts += (ShapePart(name="router", inputs=width, outputs=experts, layers=layers),)
    if config.n_shared_experts:
        parts += _gated_parts("shared_experts.", width, inner * config.n_shared_experts, layers)
    return parts + (_gated_parts("", width, config.intermediate_size, num_dense) if num_dense else ())


def _gated_parts(
    prefix: str, width: int, inner: int, layers: int, stored: int = 1, used: int = 1
) -> tuple[ShapePart, ...]:
    """Return gated blocks in `layers` layers, `stored` of them in each, of which a token passes `used`."""
    ends = (("gate_proj", width, inner), ("up_proj", width, inner), ("down_proj", inner, width))
    return tuple(
        ShapePart(name=prefix + name, inputs=i, outputs=o, layers=layers, stored=stored, used=used)
        for name, i, o in ends
    )


KINDS: dict[str, tuple[Callable[[ShapeConfig], Attention], Callable[[ShapeConfig], tuple[ShapePart, ...]]]] = {
    "llama": (grouped_attention, dense_layers),
    "mistral": (grouped_attention, dense_layers),
    "qwen2": (grouped_attention, dense_layers),
    "qwen3": (grouped_attention, dense_layers),
    "smollm3": (grouped_attention, dense_layers),
    "phi3": (fused_attention, fused_layers),
    "mixtral": (grouped_attention, mixture_layers),
    "qwen3_moe": (grouped_attention, mixture_layers),
    "deepseek_v3": (latent_attention, mixture_layers),
    "deepseek_v32": (latent_attention, mixture_layers),
    "glm_moe_dsa": (latent_attention, mixture_layers),
}
"""`model_type` -> the formulas of its attention and of its feed-forward part."""


def shape_of(config: ShapeConfig, source: object) -> Shape:
    """Return the shape that a config describes. Raises: ModelError for a kind without formulas."""
    if config.model_type not in KINDS:
        raise ModelError.at(
            f"{source}: model_type",
            found=config.model_type,
            wanted=f"one of: {', '.join(KINDS)}",
            fix="a plan needs formulas for the architecture: pipelines/sizing/formulas.py has them, and a new kind is a few lines there",
        )
    make_attention, make_feed_forward = KINDS[config.model_type]
    return Shape(
        kind=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        context=config.max_position_embeddings,
        attention=make_attention(config),
        feed_forward=make_feed_forward(config),
    )
