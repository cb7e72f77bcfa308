"""Formulas that make the shape of a model from its `config.json`, by kind of model.

Attention has grouped queries (plain heads are groups of one) or latent keys and values, with or without an indexer. The feed-forward part
is one gated block in every layer, or a mixture. Names of matrices are those of transformers. A number that no config has, such as the biases of
Qwen 2, is read from transformers' code of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    # transformers has three names for the number of routed experts.
    experts: int = Field(1, ge=1, validation_alias=AliasChoices("n_routed_experts", "num_local_experts", "num_experts"))
    num_experts_per_tok: PositiveInt = 1
    n_shared_experts: int = 0
    moe_intermediate_size: PositiveInt | None = None
    first_k_dense_replace: int = 0


def grouped_attention(config: ShapeConfig) -> Attention:
    """Return the attention of query heads that share keys and values in groups."""
    layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or width // heads
    query_width, key_width = heads * head_dim, kv_heads * head_dim
    sizes = (
        ("q_proj", width, query_width),
        ("k_proj", width, key_width),
        ("v_proj", width, key_width),
        ("o_proj", query_width, width),
    )
    # Qwen 2 has biases of queries, keys and values without a key for them; Qwen 3 has a norm of the queries' heads and one of the keys'.
    biases = query_width + 2 * key_width if config.attention_bias or config.model_type in ("qwen2", "qwen2_moe") else 0
    norms = 2 * head_dim if config.model_type in ("qwen3", "qwen3_moe") else 0
    return Attention(
        parts=_make_parts(sizes, layers),
        vectors=layers * (biases + norms),
        pair=layers * 2 * query_width,  # each query head with one key, and one weight with one value
        kv_values=layers * 2 * key_width,
        kv_split=kv_heads,
        window=config.sliding_window if config.use_sliding_window or config.model_type in ALWAYS_WINDOWED else None,
    )


def fused_attention(config: ShapeConfig) -> Attention:
    """Return grouped attention with queries, keys and values in one matrix."""
    attention = grouped_attention(config)
    q_proj, k_proj, v_proj, o_proj = attention.parts
    outputs = q_proj.outputs + k_proj.outputs + v_proj.outputs
    return replace(attention, parts=(replace(q_proj, name="qkv_proj", outputs=outputs), o_proj))


def latent_attention(config: ShapeConfig) -> Attention:
    """Return multi-head latent attention, which keeps one small vector of keys and values for all heads, and one rotary key. With an
    indexer, a token looks at the `index_topk` tokens that the indexer chooses for it."""
    layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    nope_dim, rope_dim, value_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank or 0
    query_width = heads * (nope_dim + rope_dim)
    sizes = [("q_proj", width, query_width)]
    if q_rank:
        sizes = [("q_a_proj", width, q_rank), ("q_b_proj", q_rank, query_width)]
    sizes += [
        ("kv_a_proj_with_mqa", width, kv_rank + rope_dim),
        ("kv_b_proj", kv_rank, heads * (nope_dim + value_dim)),
        ("o_proj", heads * value_dim, width),
    ]
    index_heads = config.index_n_heads
    index_dim = config.index_head_dim if index_heads else 0
    if index_heads:
        sizes += [
            ("wq_b", q_rank or width, index_heads * index_dim),
            ("wk", width, index_dim),
            ("weights_proj", width, index_heads),
        ]
    return Attention(
        parts=_make_parts(sizes, layers),
        # Norms of the small vectors of queries and of keys and values; the norm of the indexer's keys has a bias as well.
        vectors=layers * ((q_rank or 0) + kv_rank + 2 * index_dim),
        pair=layers * heads * (nope_dim + rope_dim + value_dim),
        kv_values=layers * (kv_rank + rope_dim + index_dim),
        kv_split=1,  # all heads read the same small vector
        window=config.index_topk if index_heads else None,  # the indexer chooses this many tokens, wherever they are
        index_pair=layers * index_heads * index_dim,
    )


def dense_layers(config: ShapeConfig) -> tuple[ShapePart, ...]:
    """Return the matrices gate, up and down in every layer."""
    return _make_gated_parts("", config.hidden_size, config.intermediate_size, config.num_hidden_layers)


def fused_layers(config: ShapeConfig) -> tuple[ShapePart, ...]:
    """Return gate and up in one matrix, and down, in every layer."""
    gate, _, down = dense_layers(config)
    return replace(gate, name="gate_up_proj", outputs=2 * gate.outputs), down


def mixture_layers(config: ShapeConfig) -> tuple[ShapePart, ...]:
    """Return routed experts, shared experts and a router; the first layers may be dense."""
    width, num_dense = config.hidden_size, config.first_k_dense_replace
    layers, experts = config.num_hidden_layers - num_dense, config.experts
    inner = config.moe_intermediate_size or config.intermediate_size
    parts = _make_gated_parts("experts.", width, inner, layers, stored=experts, used=config.num_experts_per_tok)
    parts += _make_parts([("router", width, experts)], layers)
    if config.n_shared_experts:  # transformers makes one wide block of them
        parts += _make_gated_parts("shared_experts.", width, inner * config.n_shared_experts, layers)
    return parts + (_make_gated_parts("", width, config.intermediate_size, num_dense) if num_dense else ())


def _make_gated_parts(
    prefix: str, width: int, inner: int, layers: int, stored: int = 1, used: int = 1
) -> tuple[ShapePart, ...]:
    """Return gated blocks in `layers` layers, `stored` of them in each, of which a token passes `used`."""
    sizes = (("gate_proj", width, inner), ("up_proj", width, inner), ("down_proj", inner, width))
    return _make_parts(((prefix + name, inputs, outputs) for name, inputs, outputs in sizes), layers, stored, used)


def _make_parts(
    sizes: Iterable[tuple[str, int, int]], layers: int, stored: int = 1, used: int = 1
) -> tuple[ShapePart, ...]:
    """Return a part for each (name, inputs, outputs) of `sizes`."""
    return tuple(
        ShapePart(name=name, inputs=inputs, outputs=outputs, layers=layers, stored=stored, used=used)
        for name, inputs, outputs in sizes
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


def make_shape(config: ShapeConfig, source: object) -> Shape:
    """Return the shape that a config describes; `source` is the config's file, for the error. Raises: ModelError for a kind without formulas."""
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
