"""The keys of a `config.json` that a model's shape follows from."""

from __future__ import annotations

from pydantic import AliasChoices, Field, PositiveInt

from experts.json_files import Lenient


class ShapeConfig(Lenient):
    """Keys of transformers' configs; those that a kind lacks keep a value that means `none`."""

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
