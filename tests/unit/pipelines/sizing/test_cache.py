"""The key-value cache, from a model's files."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from opd.config import PipelineConfig, load_pipeline
from opd.errors import ConfigError
from pipelines.plan.models import read_models
from pipelines.sizing.auto import choose_cache, choose_numbers
from pipelines.sizing.cache import refuse_small_cache, sequence_bytes
from pipelines.sizing.gpu_memory import memory_rooms
from pipelines.sizing.machine import MachineFacts


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt_neox"])
def test_the_cache_has_room_for_keys_and_values_also_where_their_projections_are_fused(
    kind: str, tmp_path: Path
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **shape, num_key_value_heads=4, vocab_size=80, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config = PipelineConfig.model_validate(
        {
            "name": "cache",
            "student": {"model": "base"},
            "experts": {"e": {"model": "base", "domain": "d"}},
            "domains": {"d": {"prompts": "prompts.jsonl"}},
            "rollout": {"max_model_len": 1 << 20, "max_num_seqs": 16},
            "trainer": {"steps": 1, "samples_per_step": 20},
            "cluster": {"address": "auto"},  # machines whose memory is not known
        }
    )
    # 16 sequences of 2^20 tokens, each with keys and values of 64 numbers in 2 layers
    assert choose_cache(config, tmp_path).rollout.kv_cache_gib == 16


def test_a_cache_on_a_cpu_holds_the_longest_sequence(world: Any) -> None:
    """vLLM would not start; a check refuses it, and a plan says that it does not fit."""
    config, a_token = load_pipeline(world.write()), 2 * 2 * 64 * 4
    models = read_models(config).merge
    machine = MachineFacts(cores=2, memory=64 << 30)
    assert sequence_bytes(config, models) == 32 * a_token
    rollout = config.rollout.model_copy(update={"max_model_len": (1 << 30) // a_token})
    config = config.model_copy(update={"rollout": rollout})
    refuse_small_cache(config, models)
    open_cache = config.rollout.model_copy(update={"max_model_len": rollout.max_model_len + 1})
    open_config = config.model_copy(update={"rollout": open_cache})
    refuse_small_cache(open_config, models)
    assert choose_numbers(open_config, models, machine).rollout.kv_cache_gib > 1
    longer = config.rollout.model_copy(update={"max_model_len": rollout.max_model_len + 1})
    for update, fits in (({"kv_cache_gib": 1}, False), ({"kv_cache_gib": 2}, True), ({"dtype": "bfloat16"}, True)):
        changed = config.model_copy(update={"rollout": longer.model_copy(update=update)})
        room = next(room for room in memory_rooms(changed, models, machine) if "cache" in room.what)
        assert room.fits == fits
        with nullcontext() if fits else pytest.raises(ConfigError, match=r"set rollout\.kv_cache_gib to 2, or lower"):
            refuse_small_cache(changed, models)
