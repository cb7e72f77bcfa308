"""The learning rate of every step."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config.sections import TrainerConfig
from pipelines.specs import learning_rate


def rates(**changes: Any) -> list[float]:
    values: dict[str, Any] = {"steps": 10, "samples_per_step": 1, "lr": 2.0}
    config = TrainerConfig(**values | changes)
    return [learning_rate(config).rate_at_step(step) for step in range(1, config.steps + 1)]


def test_constant() -> None:
    assert rates() == [2.0] * 10


def test_warm_up_is_linear_and_never_zero() -> None:
    assert rates(warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2, 2, 2, 2, 2, 2])


def test_linear_comes_to_zero_after_the_last_step() -> None:
    assert rates(lr_scheduler_type="linear", steps=9) == pytest.approx([2 * (1 - s / 10) for s in range(1, 10)])


def test_cosine_passes_the_middle_at_half() -> None:
    found = rates(lr_scheduler_type="cosine", steps=9)
    assert found[4] == pytest.approx(1.0)
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.9


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 9])
def test_the_last_step_of_a_decay_trains(kind: str, warmup: int) -> None:
    found = rates(lr_scheduler_type=kind, warmup_steps=warmup)
    assert found[-1] > 0 and found[warmup:] == sorted(found[warmup:], reverse=True)
    assert rates(lr_scheduler_type=kind, steps=1)[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_floor_is_where_the_decay_ends(kind: str) -> None:
    found = rates(lr_scheduler_type=kind, min_lr_ratio=0.1, warmup_steps=2)
    assert found[:2] == pytest.approx([1.0, 2.0])
    assert found[-1] == pytest.approx(0.2)
    assert min(found[2:]) == found[-1]
    assert found[5] == pytest.approx(0.2 + 1.8 / 2)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_warm_up_as_long_as_the_run(kind: str) -> None:
    assert rates(lr_scheduler_type=kind, warmup_steps=10)[-1] == pytest.approx(2.0)
    assert rates(lr_scheduler_type=kind, warmup_steps=20)[-1] == pytest.approx(1.0)
    assert rates(steps=1, lr_scheduler_type=kind, min_lr_ratio=0.5)[0] >= 1.0


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_rate_zero_stays_zero(kind: str) -> None:
    assert rates(lr=0.0, lr_scheduler_type=kind, warmup_steps=3) == [0.0] * 10
