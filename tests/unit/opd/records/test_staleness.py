"""The age of tokens by what their rows say, and the bound that is kept before anything is trained."""

from __future__ import annotations

import pytest

from opd.errors import RunError
from opd.records.staleness import count_ages, refuse_stale, find_stale_samples
from opd.records.types import Rollout, Span
from tests.rows import make_rollout


def rollout(name: str, *spans: tuple[int, str, int]) -> Rollout:
    """`spans`: length, origin, policy version."""
    return make_rollout(
        sample_id=name, step=9, domain="math", prompt_ids=(1,), response_ids=(2,) * sum(length for length, *_ in spans),
        spans=tuple(Span(length=n, origin=origin, policy_version=v) for n, origin, v in spans),  # type: ignore[arg-type]
    )  # fmt: skip


FRESH = rollout("fresh", (3, "policy", 8))
OLD = rollout("old", (2, "policy", 7))
CARRIED = rollout("carried", (4, "policy", 6), (1, "policy", 8))
ENVIRONMENT = rollout("environment", (5, "environment", 1), (2, "masked", 1), (1, "policy", 8))
EMPTY = rollout("empty", (0, "policy", 3))


def test_only_trained_tokens_have_an_age() -> None:
    assert count_ages([FRESH, OLD, CARRIED, ENVIRONMENT, EMPTY], 8) == {0: 5, 1: 2, 2: 4}
    assert count_ages([], 8) == {}


def test_a_sample_is_stale_if_one_of_its_trained_tokens_is() -> None:
    assert find_stale_samples([FRESH, OLD, CARRIED, ENVIRONMENT, EMPTY], 8) == {"old", "carried"}


@pytest.mark.parametrize(
    ("rows", "bound", "said"),
    [
        ([FRESH, ENVIRONMENT, EMPTY], 0, None),
        ([FRESH, OLD], 1, None),
        ([FRESH, OLD, CARRIED], 2, None),
        (
            [FRESH, OLD],
            0,
            "sample old of domain math: policy version 7 wrote .* version 8 .* age of 1, .*staleness is 0",
        ),
        ([OLD, CARRIED], 1, "sample carried .* policy version 6 .* age of 2"),
        ([rollout("new", (1, "policy", 9))], 5, "sample new .* an age of -1"),
    ],
)
def test_the_bound_is_kept_and_the_row_named(rows: list[Rollout], bound: int, said: str | None) -> None:
    if said is None:
        refuse_stale(rows, 8, bound)
        return
    with pytest.raises(RunError, match=said):
        refuse_stale(rows, 8, bound)
