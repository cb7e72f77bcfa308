"""DeepSpeed's own settings in a pipeline: which are taken, and which are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from opd.config.deepspeed import DeepSpeedConfig
from opd.config.sections import TrainerConfig


def read_trainer(section: dict[str, Any], ranks: int = 4) -> TrainerConfig:
    return TrainerConfig.model_validate({"steps": 1, "samples_per_step": 1, "ranks": ranks, "deepspeed": section})


def test_settings_reach_deepspeed_under_its_names() -> None:
    zero = {"overlap_comm": False, "zero_hpz_partition_size": 2, "offload_optimizer": {"device": "cpu"}}
    section = {"zero_optimization": zero, "communication_data_type": "bf16"}
    assert read_trainer(section).deepspeed.settings == section
    assert TrainerConfig(steps=1, samples_per_step=1).deepspeed.settings == {}


def test_what_a_file_for_hugging_faces_trainer_leaves_open_is_left_to_our_keys() -> None:
    section = {
        "bf16": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}},
    }
    assert read_trainer(section).deepspeed.settings == {"zero_optimization": {"offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("section", "where", "message"),
    [
        ({"gradient_clipping": 0.5}, "trainer.deepspeed.gradient_clipping", "trainer.max_grad_norm"),
        ({"zero_optimization": {"stage": 2}}, "trainer.deepspeed.zero_optimization.stage", "stage 3"),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "trainer.deepspeed.zero_optimization.zero_quantized_weights",
            "rounded",
        ),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 3}},
            "trainer.deepspeed.zero_optimization.zero_hpz_partition_size",
            "divisor",
        ),
    ],
)
def test_settings_that_break_a_promise_are_refused(section: dict[str, Any], where: str, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        read_trainer(section)
    (error,) = refused.value.errors()
    assert error["ctx"]["where"] == where
    assert message in error["msg"]


def test_memory_on_disk_and_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError, match="'none' or 'cpu'"):
        DeepSpeedConfig.model_validate({"zero_optimization": {"offload_param": {"device": "nvme"}}})
    with pytest.raises(ValidationError, match="overlap_comm"):
        DeepSpeedConfig.model_validate({"zero_optimization": {"overlap_com": True}})
