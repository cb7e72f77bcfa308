"""Ranks that share rows: students and settings for which they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, MistralConfig

from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.models.weights import Naming
from opd.settings.yaml_files import validate_section
from pipelines.inputs.shared_rows import refuse_shared_rows

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}


def model(path: Path, config: Any) -> Any:
    import torch

    config.save_pretrained(path)
    return Naming(AutoConfig.from_pretrained(path), torch.float32).model


def pipeline(**sections: Any) -> PipelineConfig:
    trainer = {"steps": 3, "samples_per_step": 4, "ranks": 4, "sequence_parallel_size": 4} | sections.pop("trainer", {})
    data = {
        "name": "two",
        "student": {"model": "base"},
        "experts": {"math": {"model": "m", "domain": "math"}},
        "domains": {"math": {"prompts": "math.jsonl"}},
        "trainer": trainer,
    }
    return validate_section(PipelineConfig, data | sections, "p.yaml")


def refusal(path: Path, config: Any, **sections: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        refuse_shared_rows(pipeline(**sections), model(path, config))
    return str(refused.value)


def test_plain_attention_with_a_head_for_each_rank_is_taken(tmp_path: Path) -> None:
    lm = model(tmp_path, LlamaConfig(**SIZES, num_attention_heads=8, num_key_value_heads=4))
    refuse_shared_rows(pipeline(), lm)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**SIZES, num_attention_heads=8, num_key_value_heads=2), "num_key_value_heads 2"),
        (
            LlamaConfig(**SIZES | {"hidden_size": 96}, num_attention_heads=6, num_key_value_heads=6),
            "num_attention_heads 6",
        ),
        (
            MistralConfig(**SIZES, num_attention_heads=8, num_key_value_heads=4, sliding_window=16),
            "family mistral, which has layers other than plain attention",
        ),
    ],
)
def test_students_that_ranks_cannot_share_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    text = refusal(tmp_path, config)
    assert "trainer.sequence_parallel_size" in text and message in text
    refuse_shared_rows(pipeline(trainer={"sequence_parallel_size": 1}), model(tmp_path, config))


def test_settings_with_other_passes_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, num_attention_heads=8, num_key_value_heads=4)
    assert "4 with trainer.compile" in refusal(tmp_path, config, trainer={"compile": True})


def test_the_size_divides_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"a divisor of trainer\.ranks"):
        pipeline(trainer={"sequence_parallel_size": 3})
