"""The target log's size on disk: W of docs/plan.md, and the bounds that hold it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opd.config import PipelineConfig
from pipelines.sizing import target_log as sizes
from pipelines.sizing.target_log import (
    describe_log,
    estimate_log_bytes,
    estimate_step_bytes,
    find_full_disk,
)

STEP = 512 * 2048 * (2 * 3584 + 16 + 16)
"""512 responses of 2,048 tokens, hidden states of 3,584 numbers in bfloat16: 7.5 GB."""


def config(**target_log: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "trainer": {"steps": 300, "samples_per_step": 512},
            "rollout": {"max_new_tokens": 2048, "max_model_len": 4096},
            "teachers": {"dtype": "bfloat16"},
            "checkpoint": {"every": 25},
            "target_log": target_log,
        }
    )


def models(teachers: int = 1, trained: int = 10**7) -> Any:
    scorers = {"e": SimpleNamespace(info=SimpleNamespace(hidden_size=3584))}
    return SimpleNamespace(scorers=scorers, scoring={"d": ("e",) * teachers}, trained=trained)


def test_a_step_takes_its_hidden_states_and_a_few_bytes_a_token() -> None:
    assert estimate_step_bytes(config(), models()) == STEP
    assert 7.5e9 < STEP < 7.6e9
    assert estimate_step_bytes(config(), models(2)) == STEP + 512 * 2048 * (2 * 3584 + 16)
    assert estimate_step_bytes(config(keep="rollouts"), models(2)) == 512 * 2048 * 16


@pytest.mark.parametrize(
    ("target_log", "wanted"),
    [
        ({"max_size": "1TiB"}, 26 * STEP),
        ({}, 64 << 30),
        ({"max_size": "1GiB"}, STEP),
        ({"keep": "rollouts"}, 26 * 512 * 2048 * 16),
    ],
)
def test_the_log_is_held_by_its_bound(target_log: dict[str, Any], wanted: int) -> None:
    assert estimate_log_bytes(config(**target_log), models()) == wanted


def test_without_a_bound_the_log_may_take_what_a_checkpoint_takes() -> None:
    assert estimate_log_bytes(config(), models(trained=7 * 10**9)) == 12 * 7 * 10**9


def test_a_disk_without_room_is_named_with_the_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole, directory = config(max_size="1TiB"), tmp_path / "runs" / "not here yet"
    asked = []

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return SimpleNamespace(free=26 * STEP - room)

    monkeypatch.setattr(sizes.shutil, "disk_usage", disk_usage)
    room = 0
    assert find_full_disk(estimate_log_bytes(whole, models()), directory) is None
    room = 1
    said = find_full_disk(estimate_log_bytes(whole, models()), directory)
    assert said is not None and "up to 182.81 GiB" in said and str(directory) in said
    assert set(asked) == {tmp_path}
    assert (
        describe_log(whole, models()) == "target log: at most 7.03 GiB a step, 182.81 GiB until a checkpoint frees it"
    )
