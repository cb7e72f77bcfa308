"""The key-value cache, from a model's files."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from pipelines.sizing.cache import cache_gib


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt_neox"])
def test_the_cache_has_room_for_keys_and_values_also_where_their_projections_are_fused(
    kind: str, tmp_path: Path
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **shape, num_key_value_heads=4, vocab_size=80, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    # 16 sequences of 2^20 tokens, each with keys and values of 64 numbers in 2 layers
    assert cache_gib(tmp_path, {"dtype": "float32", "max_model_len": 1 << 20}) == 16
