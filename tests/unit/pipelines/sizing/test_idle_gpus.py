"""GPUs that nobody would use are not reserved."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section
from pipelines.inputs.read import refuse_what_is_not_here
from pipelines.sizing.gpu_memory import refuse_idle_gpus

SERVED = {"engine": "flight", "address": "grpc://localhost:1"}


def pipeline(data: dict[str, Any], **sections: Any) -> PipelineConfig:
    return validate_section(PipelineConfig, data | sections, "p.yaml")


@pytest.mark.parametrize(
    ("role", "gpus", "sections", "instead"),
    [
        ("rollout", 4, {}, "and rollout.tensor_parallel_size to the number"),
        ("rollout", 1.5, {}, "and rollout.tensor_parallel_size to the number"),
        ("teacher", 2, {"teachers": {"engine": "vllm"}}, "and teachers.tensor_parallel_size to the number"),
        ("teacher", 2, {}, "and teachers.workers for more of them; or teachers.device_map to auto"),
        ("trainer", 2, {}, "and trainer.ranks to the number"),
    ],
)
def test_more_gpus_than_a_process_uses(role: str, gpus: float, sections: Any, instead: str, world: Any) -> None:
    """Ray would give all of them to the worker, which computes on the first."""
    config = pipeline(world.data, cluster={f"{role}_gpus": gpus}, **sections)
    with pytest.raises(ConfigError) as refused:
        refuse_what_is_not_here(config)
    message = str(refused.value)
    assert message.startswith(f"cluster.{role}_gpus\n  found:  {gpus:g}\n  wanted: at most 1: "), message
    assert f"set it to 1, {instead}" in message


@pytest.mark.parametrize(
    "sections",
    [
        {"cluster": {"rollout_gpus": 1, "teacher_gpus": 0.5, "trainer_gpus": 1}},
        {"cluster": {"rollout_gpus": 1}, "rollout": {"tensor_parallel_size": 4}},
        {"cluster": {"rollout_gpus": 4}, "rollout": {"engine": "mine:Engine"}},
        {"cluster": {"teacher_gpus": 4}, "teachers": SERVED},
        {"cluster": {"teacher_gpus": 4}, "teachers": {"device_map": "auto"}},
    ],
)
def test_those_that_somebody_uses(sections: Any, world: Any) -> None:
    refuse_idle_gpus(pipeline(world.data, **sections))
