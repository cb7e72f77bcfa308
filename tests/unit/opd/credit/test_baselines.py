"""Baselines that all tokens of an episode share: whose rewards are in them, and what a kill leaves of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.credit import CREDITS
from opd.credit.ema import EmaCredit
from opd.credit.group import EPSILON, GroupCredit
from opd.credit.leave_one_out import LeaveOneOut
from opd.credit.none import NoBaselineCredit
from opd.records.types import Rollout
from opd.settings.user_objects import import_object
from tests.credit import chain, segment


def tries(rewards: dict[str, float | None], group: str = "g", domain: str = "d") -> list[Rollout]:
    return [segment("aa", episode=name, group=group, domain=domain, reward=r) for name, r in rewards.items()]


def shared(advantages: Any) -> dict[str, float]:
    """The one number of each rollout."""
    for advantage_N in advantages.values():
        assert advantage_N.dtype == np.float32 and len(set(advantage_N.tolist())) <= 1
    return {name: float(advantage_N[0]) for name, advantage_N in advantages.items() if len(advantage_N)}


def test_every_kind_is_there() -> None:
    assert all(isinstance(import_object(place), type) for place in CREDITS.values())


def test_the_others_of_the_prompt_are_the_baseline() -> None:
    found = LeaveOneOut().assign(1, tries({"a": 1.0, "b": 0.0, "c": 0.5}) + tries({"x": 9.0, "y": 7.0}, group="h"))
    assert shared(found.advantages) == pytest.approx({"a": 0.75, "b": -0.75, "c": 0.0, "x": 2.0, "y": -2.0})
    assert found.warm and found.readings == pytest.approx({"mean_return": 3.5, "flat": 0.2})


def test_a_prompt_that_was_tried_once_is_compared_with_its_domain() -> None:
    one, two, three = tries({"a": 1.0}, "ga"), tries({"b": 0.0}, "gb"), tries({"c": 5.0}, "gc", "other")
    assert shared(LeaveOneOut().assign(1, one + two + three).advantages) == {"a": 1.0, "b": -1.0, "c": 5.0}


def test_segments_of_one_episode_are_one_try() -> None:
    long = chain("aa", "aoa", "a", episode="long", group="g", reward=1.0).segments
    short = chain("aa", episode="short", group="g", reward=0.0).segments
    found = LeaveOneOut().assign(1, [*long, *short]).advantages
    assert {name: advantage_N.tolist() for name, advantage_N in found.items()} == {
        "long": [1.0, 1.0], "long+1": [1.0, 1.0], "long+2": [1.0], "short": [-1.0, -1.0],
    }  # fmt: skip
    assert shared(GroupCredit().assign(1, [*long, *short]).advantages)["short"] == -0.5


def test_a_group_is_compared_with_its_own_mean() -> None:
    step = tries({"a": 1.0, "b": 0.0}) + tries({"x": 1.0, "y": 1.0}, "h") + tries({"z": 1.0}, "alone")
    found = GroupCredit().assign(1, step)
    assert shared(found.advantages) == {"a": 0.5, "b": -0.5, "x": 0.0, "y": 0.0, "z": 0.0}
    assert found.readings["flat"] == pytest.approx(3 / 5)
    scaled = shared(GroupCredit(divide_by_std=True).assign(1, step).advantages)
    assert scaled["a"] == pytest.approx(0.5 / (0.5**0.5 + EPSILON)) and scaled["x"] == scaled["z"] == 0.0


def test_what_has_no_reward_has_no_advantage() -> None:
    for credit in (NoBaselineCredit(), LeaveOneOut(), GroupCredit(), EmaCredit()):
        found = credit.assign(1, tries({"a": None, "b": 0.25}))
        assert list(found.advantages) == ["b"]
    assert shared(NoBaselineCredit().assign(1, tries({"a": None, "b": 0.25})).advantages) == {"b": 0.25}
    assert NoBaselineCredit().assign(1, []).readings == {}


def test_a_running_mean_knows_only_steps_before() -> None:
    ema = EmaCredit(decay=0.5)
    first = shared(ema.assign(1, tries({"a": 1.0, "b": 0.0})).advantages)
    assert first == {"a": 1.0, "b": -1.0}, "nothing is known yet: the other episode"
    mean = (0.5 * 0.5 * 1.0 + 0.5 * 0.0) / (0.5 * 0.5 + 0.5)
    assert shared(ema.assign(2, tries({"c": 1.0})).advantages) == pytest.approx({"c": 1 - mean})
    assert shared(ema.assign(3, tries({"d": 1.0}, domain="new")).advantages) == {"d": 1.0}, "a mean for each domain"


def test_a_running_mean_survives_a_kill_to_the_bit(tmp_path: Path) -> None:
    steps = [tries({f"{step}{i}": step / 7 + i / 3 for i in range(3)}) for step in range(4)]
    whole, killed, resumed = EmaCredit(), EmaCredit(), EmaCredit()
    expected = [whole.assign(i, step) for i, step in enumerate(steps)]
    for i, step in enumerate(steps[:2]):
        killed.assign(i, step)
    killed.begin_save(tmp_path / "credit")
    (file,) = killed.saved(0.0)
    assert (file.name, file.size) == ("credit.json", (tmp_path / "credit" / "credit.json").stat().st_size)
    resumed.load(tmp_path / "credit")
    for i in (2, 3):
        found = resumed.assign(i, steps[i]).advantages
        assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in expected[i].advantages.items()}


def test_credit_without_a_state_saves_nothing(tmp_path: Path) -> None:
    credit = LeaveOneOut()
    credit.begin_save(tmp_path / "credit")
    assert credit.saved(0.0) == () and not (tmp_path / "credit").exists()
    credit.load(tmp_path / "credit")


def test_segments_that_disagree_about_the_reward_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match=r"episode e have the rewards"):
        NoBaselineCredit().assign(1, [segment("a"), segment("a", 1, reward=0.0)])
