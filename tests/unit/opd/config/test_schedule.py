"""The section `schedule`: its bound, what it does not go with, and how the cores are shared out."""

from __future__ import annotations

from typing import Any

import pytest

from opd.cluster import worker_env
from opd.config import PipelineConfig, max_staleness
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section
from pipelines.cores import roles_at_once

VALID: dict[str, Any] = {
    "name": "two",
    "student": {"model": "base"},
    "experts": {"math": {"model": "m", "domain": "math"}},
    "domains": {"math": {"prompts": "math.jsonl"}},
    "trainer": {"steps": 3, "samples_per_step": 4},
}
AHEAD = {"schedule": {"mode": "one_step_off"}}


def config(**sections: Any) -> PipelineConfig:
    return validate_section(PipelineConfig, VALID | sections, "p.yaml")


@pytest.mark.parametrize(
    ("schedule", "bound"),
    [
        ({}, 0),
        ({"mode": "sync"}, 0),
        ({"mode": "sync", "max_staleness": 2}, 2),
        ({"mode": "one_step_off"}, 1),
        ({"mode": "one_step_off", "max_staleness": 3}, 3),
    ],
)
def test_the_bound_follows_from_the_mode_unless_it_is_given(schedule: dict[str, Any], bound: int) -> None:
    assert max_staleness(config(schedule=schedule)) == bound


@pytest.mark.parametrize(
    ("sections", "where", "said"),
    [
        (
            {"schedule": {"mode": "one_step_off", "max_staleness": 0}},
            "schedule.max_staleness",
            "set schedule.mode to sync",
        ),
        ({"schedule": {"max_staleness": -1}}, "schedule.max_staleness", "0"),
        ({"schedule": {"mode": "asynch"}}, "schedule.mode", "one_step_off"),
        (AHEAD | {"rollout": {"sleep": True}, "cluster": {"rollout_gpus": 0.4}}, "rollout.sleep", "cannot take turns"),
    ],
)
def test_what_cannot_be_kept_is_refused(sections: dict[str, Any], where: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**sections)
    assert str(error.value).startswith(f"p.yaml: {where}\n") and said in str(error.value)


@pytest.mark.parametrize(
    ("sections", "roles"),
    [
        ({}, 1),
        (AHEAD, 2),
        (AHEAD | {"cluster": {"rollout_gpus": 1}}, 1),
        (AHEAD | {"cluster": {"trainer_gpus": 1}}, 2),
        (AHEAD | {"cluster": {"trainer_gpus": 1, "teacher_gpus": 1}}, 1),
        (
            AHEAD | {"cluster": {"trainer_gpus": 1}, "teachers": {"engine": "flight", "address": "grpc://localhost:1"}},
            1,
        ),
    ],
)
def test_engine_and_trainer_share_the_cores_if_they_compute_at_the_same_time(
    sections: dict[str, Any], roles: int
) -> None:
    assert roles_at_once(config(**sections)) == roles


@pytest.mark.parametrize(("key", "value"), [("score_early", 4), ("partial_rollout", {"cut_at": 16})])
def test_a_key_of_an_earlier_release_is_refused_unless_it_was_off(key: str, value: Any) -> None:
    assert config(schedule={key: None}) == config()
    with pytest.raises(ConfigError, match="remove the key") as error:
        config(schedule={key: value})
    assert str(error.value).startswith(f"p.yaml: schedule.{key}\n")


def test_threads_are_the_cores_over_roles_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.cluster.environment.count_cores", lambda: 16)
    found = [worker_env(workers, roles)["OMP_NUM_THREADS"] for workers, roles in ((1, 1), (1, 2), (2, 2), (40, 2))]
    assert found == ["16", "8", "4", "1"]
