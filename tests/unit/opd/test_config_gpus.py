"""GPUs that roles share: what is refused before a worker starts."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.config.devices import rollout_devices, teacher_devices
from opd.errors import ConfigError
from opd.settings import validate

VALID: dict[str, Any] = {
    "name": "two",
    "student": {"model": "base"},
    "experts": {"math": {"model": "m", "domain": "math"}},
    "domains": {"math": {"prompts": "math.jsonl"}},
    "trainer": {"steps": 3, "samples_per_step": 4},
}


def refusal(**sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        validate(PipelineConfig, VALID | sections, "p.yaml")
    return str(error.value)


@pytest.mark.parametrize("gpus", [0.3, 0.5, 1.5])
def test_two_ranks_on_one_gpu_are_refused_with_the_way_out(gpus: float) -> None:
    """NCCL finds "duplicate GPU" after all workers have started."""
    message = refusal(cluster={"trainer_gpus": gpus})
    assert message.startswith("p.yaml: cluster.trainer_gpus\n")
    assert f"{gpus:g} with trainer.ranks 2" in message and "set trainer.ranks to 1" in message


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 2), (1, 4), (2.0, 2), (0.3, 1), (1, 1)])
def test_ranks_with_gpus_of_their_own_and_one_that_shares(gpus: float, ranks: int) -> None:
    trainer = VALID["trainer"] | {"ranks": ranks}
    validate(PipelineConfig, VALID | {"trainer": trainer, "cluster": {"trainer_gpus": gpus}}, "p.yaml")


def test_a_cpu_engine_does_not_sleep() -> None:
    message = refusal(rollout={"sleep": True})
    assert message.startswith("p.yaml: rollout.sleep\n") and "cluster.rollout_gpus" in message
    data = VALID | {"rollout": {"sleep": True}, "cluster": {"rollout_gpus": 0.4}}
    assert validate(PipelineConfig, data, "p.yaml").rollout.sleep


@pytest.mark.parametrize("gpus", [0.5, 2])
def test_processes_of_an_engine_have_a_gpu_each(gpus: float) -> None:
    message = refusal(rollout={"tensor_parallel_size": 2}, cluster={"rollout_gpus": gpus})
    assert message.startswith("p.yaml: cluster.rollout_gpus\n")
    assert f"found:  {gpus:g} with rollout.tensor_parallel_size 2" in message and "wanted: 1 (or 0, the CPU)" in message
    teachers = {"engine": "vllm", "tensor_parallel_size": 4}
    message = refusal(teachers=teachers, cluster={"teacher_gpus": gpus})
    assert message.startswith("p.yaml: cluster.teacher_gpus\n") and "teachers.tensor_parallel_size 4" in message


@pytest.mark.parametrize("gpus", [0, 1])
def test_an_engine_of_two_processes_has_two_gpus_or_none(gpus: float) -> None:
    sections = {
        "rollout": {"tensor_parallel_size": 2},
        "teachers": {"engine": "vllm", "tensor_parallel_size": 2},
        "cluster": {"rollout_gpus": gpus, "teacher_gpus": gpus},
    }
    config = validate(PipelineConfig, VALID | sections, "p.yaml")
    assert rollout_devices(config.cluster, config.rollout) == 2 * gpus
    assert teacher_devices(config.cluster, config.teachers) == 2 * gpus


def test_a_cache_of_fewer_bits_is_for_gpus() -> None:
    message = refusal(rollout={"kv_cache_dtype": "fp8"})
    assert message.startswith("p.yaml: rollout.kv_cache_dtype\n") and "wanted: auto: a CPU engine" in message
    data = VALID | {"rollout": {"kv_cache_dtype": "fp8"}, "cluster": {"rollout_gpus": 1}}
    assert validate(PipelineConfig, data, "p.yaml").rollout.kv_cache_dtype == "fp8"
    assert "rollout.kv_cache_dtype" in refusal(rollout={"kv_cache_dtype": "int3"}, cluster={"rollout_gpus": 1})


@pytest.mark.parametrize("size", [0, -1, 1.5, "two"])
def test_sizes_that_are_none(size: Any) -> None:
    assert refusal(rollout={"tensor_parallel_size": size}).startswith("p.yaml: rollout.tensor_parallel_size\n")
