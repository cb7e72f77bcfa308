"""Tiny models with sparse attention, for tests of indexers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import build_tokenizer

TOPK = 6


def make_sparse_config(layers: int = 6, topk: int = TOPK, family: str = "glm_moe_dsa", **settings: Any) -> Any:
    """Return the config of a tiny model of a family with indexers; by default every layer has one."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = {
        "vocab_size": len(build_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "index_topk": topk,
        "index_head_dim": 16,
        # With few heads many scores would be exactly 0, and which of equal ones is chosen depends on the width of the batch.
        "index_n_heads": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return AutoConfig.for_model(family, **sizes | settings)


def make_sparse_model(layers: int = 6, topk: int = TOPK, seed: int = 0, **settings: Any) -> Any:
    """Return a tiny model with random float32 weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(make_sparse_config(layers, topk, **settings)).eval()
        # The padding token's embedding is zero, and so are all scores of its row: which tokens are chosen there is chance.
        lm.model.embed_tokens.weight.data[0].normal_(std=0.1)
    return lm


def build_sparse_model_dir(path: Path, layers: int = 6, topk: int = TOPK, seed: int = 0, **settings: Any) -> Path:
    """Save a tiny model with its tokenizer; returns `path`."""
    make_sparse_model(layers, topk, seed, **settings).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path
