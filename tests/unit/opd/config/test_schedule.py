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
CUT = {"cut_at": 16}
CUTTING: dict[str, Any] = {"schedule": {"mode": "one_step_off", "partial_rollout": CUT}}

EARLY = {"schedule": {"score_early": 4}}
ELSEWHERE = {"engine": "flight", "address": "grpc://localhost:1"}
REWARDED = {
    "prompts": "math.jsonl",
    "eval": {"prompts": "e.jsonl", "verifier": {"kind": "exact_match"}},
    "reward": True,
}


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
        ({"mode": "one_step_off", "partial_rollout": {"cut_at": 16}}, 2),
        ({"mode": "one_step_off", "partial_rollout": {"cut_at": 16, "cuts": 3}}, 4),
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
        ({"schedule": {"partial_rollout": CUT}}, "schedule.partial_rollout", "schedule.mode one_step_off"),
        (CUTTING | {"rollout": {"max_new_tokens": 16}}, "schedule.partial_rollout.cut_at", "fewer than 16"),
        (CUTTING | {"balance": "gap"}, "balance", "samples or tokens"),
        (CUTTING | {"objective": {"kind": "sampled"}}, "schedule.partial_rollout", "an exact divergence"),
        ({"schedule": AHEAD["schedule"] | {"partial_rollout": {"cut_at": 0}}}, "schedule.partial_rollout.cut_at", "1"),
        (
            {"schedule": AHEAD["schedule"] | {"partial_rollout": CUT | {"cuts": 2}, "max_staleness": 2}},
            "schedule.max_staleness",
            "at least 3",
        ),
        (
            CUTTING | {"domains": {"math": {"prompts": "math.jsonl", "environment": {"name": "maze"}}}},
            "schedule.partial_rollout",
            "episodes are not cut",
        ),
        ({"schedule": {"score_early": 0}}, "schedule.score_early", "1"),
        ({"schedule": AHEAD["schedule"] | {"score_early": 4}}, "schedule.score_early", "schedule.mode sync as well"),
        (EARLY | {"teachers": ELSEWHERE}, "schedule.score_early", "is asked once a step"),
        (
            EARLY | {"objective": {"reward": {}}, "rollout": {"n": 2}, "domains": {"math": REWARDED}},
            "schedule.score_early",
            "which is judged later",
        ),
        (
            EARLY | {"rollout": {"sleep": True}, "cluster": {"rollout_gpus": 0.4}},
            "schedule.score_early",
            "rollout.sleep false",
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
        (EARLY, 2),
        (EARLY | {"cluster": {"rollout_gpus": 1}}, 1),
        (EARLY | {"cluster": {"teacher_gpus": 1}}, 1),
    ],
)
def test_engine_and_trainer_share_the_cores_if_they_compute_at_the_same_time(
    sections: dict[str, Any], roles: int
) -> None:
    assert roles_at_once(config(**sections)) == roles


def test_a_trainer_has_the_cores_of_those_who_wait_for_it() -> None:
    assert roles_at_once(config(**EARLY), training=True) == 1
    assert roles_at_once(config(**AHEAD), training=True) == 2


def test_threads_are_the_cores_over_roles_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.cluster.environment.count_cores", lambda: 16)
    found = [worker_env(workers, roles)["OMP_NUM_THREADS"] for workers, roles in ((1, 1), (1, 2), (2, 2), (40, 2))]
    assert found == ["16", "8", "4", "1"]
