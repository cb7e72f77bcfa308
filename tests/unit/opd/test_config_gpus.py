"""GPUs that roles share: what is refused before a worker starts."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig
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
