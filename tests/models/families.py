"""Tiny models of every family: what is peculiar to each, and how a student and its experts are made of it.

A family is the arguments of its transformers config class. What all share is in `COMMON`; sizes are the smallest that
vLLM's CPU attention runs (heads of 32). Weights are wide (0.1), so that distributions are not nearly uniform.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NOT_ADAPTED = re.compile(r"router|gate$|indexer|mamba\.|mixer\.out_proj|dt_proj|x_proj")
"""Linear layers that nobody adapts, or that PEFT refuses to."""
WINDOW = 8
"""Tokens that a sliding window sees: fewer than a sequence has, so that a window that is left out shows."""

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_LINEAR_AND_FULL = ["linear_attention", "full_attention"]
_GATED_DELTA = {
    "layer_types": _LINEAR_AND_FULL,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_LATENT_ATTENTION = {
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA = {
    "num_key_value_heads": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_LFM2_OF_THE_HUB = {
    "conv_dim": 64,
    "conv_dim_out": 64,
    "conv_bias": False,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
}
"""Keys that vLLM reads and that the models on the hub have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table."""

    settings: Mapping[str, Any]
    """Arguments of the config class beside `COMMON`; `model_type` names it, None takes a common one out."""
    rows: int = 0
    """Rows of the embedding; 0: as many as the tokenizer has tokens."""
    note: str = ""
    """The property that the family is there to show."""
    engine_dtype: str = "float32"
    """Number type of the rollout engine; some of vLLM's CPU kernels know bfloat16 alone."""
    engine: str = "vllm"
    """`rollout.engine`: `transformers` where vLLM does not serve the family on a CPU."""


FAMILIES: dict[str, Family] = {
    "Llama": Family(settings={"model_type": "llama"}),
    "Mistral": Family(settings={"model_type": "mistral", "sliding_window": WINDOW}, note=f"window of {WINDOW} tokens"),
    "Qwen2": Family(settings={"model_type": "qwen2", "tie_word_embeddings": True}, note="tied head"),
    "Qwen3": Family(settings={"model_type": "qwen3"}, rows=151_936, note="untied head of 151,936 rows, 76 in use"),
    "Qwen3-MoE": Family(
        settings={
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
        note="4 experts, 2 a token",
    ),
    "Qwen3-Next": Family(
        settings={
            "model_type": "qwen3_next",
            **_GATED_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        note="gated delta net and full attention; 4 experts",
        engine_dtype="bfloat16",
    ),
    "Qwen3.5": Family(
        settings={"model_type": "qwen3_5_text", **_GATED_DELTA},
        note="gated delta net and full attention",
        engine="transformers",
    ),
    "Gemma 2": Family(
        settings={
            "model_type": "gemma2",
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "layer_types": _TWO_KINDS,
        },
        note="logits bounded at 30, windows",
    ),
    "Gemma 3": Family(
        settings={
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "layer_types": _TWO_KINDS,
        },
        note="windows, two rotary bases",
    ),
    "GLM-4": Family(settings={"model_type": "glm4"}, rows=80, note="head of 80 rows, 76 in use"),
    "GLM-4-MoE": Family(
        settings={
            "model_type": "glm4_moe",
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
        note="router bias in a buffer",
    ),
    "glm_moe_dsa": Family(
        settings={
            "model_type": "glm_moe_dsa",
            **_LATENT_ATTENTION,
            "head_dim": 64,
            "index_topk": 8,
            "index_head_dim": 64,
            "index_n_heads": 16,
            "indexer_types": ["full", "shared"],
        },
        note="sparse attention by an indexer (GLM-5)",
        engine="transformers",
    ),
    "DeepSeek-V3.2": Family(
        settings={
            "model_type": "deepseek_v32",
            **_LATENT_ATTENTION,
            "head_dim": 64,
            "index_topk": 8,
            "index_head_dim": 64,
            "index_n_heads": 16,
        },
        note="sparse attention by an indexer",
        engine="transformers",
    ),
    "DeepSeek-V3": Family(
        settings={"model_type": "deepseek_v3", **_LATENT_ATTENTION, "num_mtp_layers": 0, "head_dim": None},
        note="latent attention, router bias in a buffer",
    ),
    "gpt-oss": Family(
        settings={
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _TWO_KINDS,
            "intermediate_size": 64,
        },
        note="attention sinks, windows, 4 experts",
    ),
    "Mixtral": Family(
        settings={"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        note="4 experts, 2 a token",
    ),
    "Phi-3/4": Family(
        settings={"model_type": "phi3", "original_max_position_embeddings": 512, "head_dim": None},
        note="fused projections",
    ),
    "OLMo2": Family(settings={"model_type": "olmo2", "num_key_value_heads": 2, "head_dim": None}, note="norms after"),
    "Granite": Family(
        settings={
            "model_type": "granite",
            "head_dim": None,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        note="four multipliers",
    ),
    "Granite hybrid": Family(
        settings={
            "model_type": "granitemoehybrid",
            **_MAMBA,
            "head_dim": None,
            "layer_types": _LINEAR_AND_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "shared_intermediate_size": 64,
            "logits_scaling": 2.0,
            "embedding_multiplier": 3.0,
        },
        note="Mamba-2, attention, 4 experts",
    ),
    "Cohere": Family(settings={"model_type": "cohere", "head_dim": None, "logit_scale": 0.5}, note="logits scaled"),
    "SmolLM3": Family(
        settings={"model_type": "smollm3", "head_dim": None, "no_rope_layers": [1, 0]}, note="a layer without positions"
    ),
    "LFM2": Family(
        settings={
            "model_type": "lfm2",
            "head_dim": None,
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            **_LFM2_OF_THE_HUB,
        },
        note="short convolutions and attention",
    ),
    "GPT-NeoX": Family(
        settings={"model_type": "gpt_neox", "head_dim": None, "num_key_value_heads": None}, note="parallel residual"
    ),
    "GPT-2": Family(
        settings={"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 512}
        | dict.fromkeys(set(COMMON) - {"initializer_range"}),
        note="dropout 0.1",
    ),
    "Falcon": Family(
        settings={"model_type": "falcon", "head_dim": None, "num_key_value_heads": None, "intermediate_size": None},
        note="one key head for all",
    ),
    "OPT": Family(
        settings={
            "model_type": "opt",
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
            "init_std": 0.1,
            **dict.fromkeys(("head_dim", "num_key_value_heads", "intermediate_size", "initializer_range")),
        },
        note="learned positions, dropout 0.1",
    ),
    "StableLM": Family(
        settings={"model_type": "stablelm", "head_dim": None, "num_key_value_heads": 2}, note="partial rotary"
    ),
    "Bamba": Family(
        settings={"model_type": "bamba", **_MAMBA, "head_dim": None, "attn_layer_indices": [1]},
        note="Mamba-2 and attention",
        engine="transformers",
    ),
    "Jamba": Family(
        settings={
            "model_type": "jamba",
            "num_key_value_heads": 2,
            "head_dim": None,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        note="Mamba, attention, 4 experts",
        engine="transformers",
    ),
    "Nemotron-H": Family(
        settings={
            "model_type": "nemotron_h",
            "num_hidden_layers": None,
            "layer_types": ["linear_attention", "full_attention", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 16,
            "num_key_value_heads": 2,
        },
        note="Mamba-2, attention, plain layers",
    ),
    "Falcon-H1": Family(
        settings={
            "model_type": "falcon_h1",
            **_MAMBA,
            "mamba_d_ssm": 128,
            "head_dim": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
        note="Mamba-2 beside attention",
    ),
    "MiniMax": Family(
        settings={
            "model_type": "minimax",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _LINEAR_AND_FULL,
            "block_size": 8,
        },
        note="lightning attention, 4 experts",
        engine="transformers",
    ),
    "RecurrentGemma": Family(
        settings={
            "model_type": "recurrent_gemma",
            "head_dim": None,
            "lru_width": 64,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"],
            "max_position_embeddings": None,
            "initializer_range": None,
        },
        note="recurrent units, windows",
        engine="transformers",
    ),
}


def build_config(family: Family) -> Any:
    """The family's transformers config. Raises: whatever its class says of the arguments."""
    from transformers import AutoConfig

    from tests.conftest import build_tokenizer

    tokenizer = build_tokenizer()
    settings = {k: v for k, v in (COMMON | dict(family.settings)).items() if v is not None}
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    return AutoConfig.for_model(**settings, **ids, vocab_size=family.rows or len(tokenizer))


def build_models(family: Family, root: Path, *, seed: int = 0) -> dict[str, Path]:
    """The student in `root`, `whole` (an expert: the student disturbed) and `adapter` (a LoRA expert on the student).

    Raises: whatever transformers or PEFT cannot do with the family.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from tests.conftest import build_tokenizer

    tokenizer, config = build_tokenizer(), build_config(family)
    places = {name: root / name for name in ("student", "whole", "adapter")}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _disturb_buffers(model)
        model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
        for name in ("student", "whole"):
            model.save_pretrained(places[name])
            tokenizer.save_pretrained(places[name])
            if name == "student":
                write_adapter(model, places["adapter"], places["student"])
                model = AutoModelForCausalLM.from_pretrained(places["student"])
                _disturb(model)
    return places


def write_adapter(model: Any, place: Path, base: Path) -> None:
    """A PEFT adapter with random A and B on the linear layers inside the model but routers and experts; changes `model`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    head, linear = model.get_output_embeddings(), torch.nn.Linear | Conv1D
    names = [name for name, module in model.named_modules() if isinstance(module, linear) and module is not head]
    modules = [name for name in names if not _NOT_ADAPTED.search(name)]
    if any("expert" in name for name, _ in model.named_modules()):
        modules = [name for name in modules if "mlp" not in name and "moe" not in name]  # attention alone, as most do
    config = LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(place)


def _disturb(model: Any) -> None:
    """Half of each matrix's own spread, added at random."""
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight += 0.5 * weight.std() * torch.randn_like(weight)


def _disturb_buffers(model: Any) -> None:
    """A trained router's bias is not zero; one that is lost on the way must show."""
    import torch

    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))
