"""Tokens of turns that the guard blocked count against the policy, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from opd.records.types import Origin, Rollout, Span
from opd.reward.stream import penalise_turns


def rollout(name: str, *origins: tuple[Origin, int]) -> Rollout:
    length = sum(num for _, num in origins)
    known = Rollout.from_tokens(name, (1,), tuple(range(length)))
    return replace(known, spans=tuple(Span(length=n, origin=o, policy_version=0) for o, n in origins))


def test_only_the_blocked_tokens_change() -> None:
    mixed = rollout(
        "a", ("policy", 2), ("environment", 3), ("blocked", 2), ("masked", 1), ("blocked", 1), ("policy", 1)
    )
    plain, unrewarded = rollout("b", ("policy", 2)), rollout("c", ("blocked", 2))
    given = {"a": np.array([0.5, 0.25, 0.5, 0.25, 1.0, 2.0], np.float32), "b": np.array([3.0, 4.0], np.float32)}
    found = penalise_turns(given, [mixed, plain, unrewarded], 1.5)
    assert set(found) == {"a", "b"}, "an episode without a reward takes no part"
    np.testing.assert_array_equal(found["a"], np.array([0.5, 0.25, -1.5, -1.5, -1.5, 2.0], np.float32))
    assert found["a"].dtype == np.float32 and found["b"] is given["b"], "the very same bits where nothing was blocked"
    np.testing.assert_array_equal(given["a"][2:4], [0.5, 0.25])
