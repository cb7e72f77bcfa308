"""Attention by kind: grouped queries (and plain heads), or latent keys and values with or without an indexer."""

from __future__ import annotations

from dataclasses import replace

from pipelines.plan.shapes.config import ShapeConfig
from pipelines.plan.shapes.shape import Attention, ShapePart

ALWAYS_WINDOWED = ("mistral", "mixtral", "phi3")
"""Kinds whose window holds wherever the config has one; others ask `use_sliding_window` first."""


def grouped_attention(config: ShapeConfig) -> Attention:
    """Query heads that share keys and values in groups."""
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
    """The same with queries, keys and values in one matrix."""
    attention = grouped_attention(config)
    queries, keys, values, out = attention.parts
    outputs = queries.outputs + keys.outputs + values.outputs
    return replace(attention, parts=(replace(queries, name="qkv_proj", outputs=outputs), out))


def latent_attention(config: ShapeConfig) -> Attention:
    """Multi-head latent attention: one small vector of keys and values for all heads, and a rotary key beside it."""
    layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    nope, rope, value, kv_rank = (
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank or 0,
    )
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
    chosen, index = config.index_n_heads, config.index_head_dim
    if chosen:
        ends += [("wq_b", q_rank or width, chosen * index), ("wk", width, index), ("weights_proj", width, chosen)]
    return Attention(
        parts=tuple(ShapePart(name=name, inputs=i, outputs=o, layers=layers) for name, i, o in ends),
        vectors=layers * ((q_rank or 0) + kv_rank + (2 * index if chosen else 0)),
        pair=layers * heads * (nope + rope + value),
        kv_values=layers * (kv_rank + rope + (index if chosen else 0)),
        kv_split=1,
        window=config.index_topk if chosen else None,
        index_pair=layers * chosen * index,
    )
