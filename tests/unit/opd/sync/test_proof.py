"""A push is believed only when the engine's log-probs say so, whichever way the weights took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from opd.errors import RunError
from opd.records.types import Prompt
from opd.sync import SYNCS, DirectSync, NetworkSync, ProvenSync, SharedMemorySync, SyncSpec
from opd.sync.proof import choose_probe_sequences

NAN = float("nan")
PROBE = [[1, 2, 3], [4, 5]]


class FakeTrainer:
    asked = 0

    def begin_logprobs(self, token_ids: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        self.asked += 1
        return lambda: [[-1.0] * (len(ids) - 1) for ids in token_ids]


class FakeEngine:
    """Each worker's log-probs are the trainer's plus its own gap on the last token."""

    def __init__(self, *gaps: float) -> None:
        self.gaps = gaps

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        rows = [[[-1.0] * (len(ids) - 1) for ids in token_ids] for _ in self.gaps]
        for row, gap in zip(rows, self.gaps, strict=True):
            row[-1][-1] += gap
        return rows


class Counted(ProvenSync):
    """Brings nothing. The second time an engine has what `later` says."""

    later: tuple[float, ...] | None = None

    def __init__(self, spec: SyncSpec) -> None:
        super().__init__(spec)
        self.brought: list[int] = []

    def send_weights(self, version: int) -> None:
        self.brought.append(version)
        if self.later is not None and len(self.brought) == 2:
            engine: Any = self._spec.engine
            engine.gaps = self.later


def sync(*gaps: float, tolerance: float = 0.02, told: list[str] | None = None, adapts: bool = False) -> Counted:
    trainer: Any = FakeTrainer()
    engine: Any = FakeEngine(*gaps)
    tell = ([] if told is None else told).append
    sides: Any = {"trainer": trainer, "engine": engine, "probe": PROBE}
    return Counted(SyncSpec(**sides, tolerance=tolerance, adapts_tolerance=adapts, nbytes=10, tell=tell))


def test_a_push_reports_the_largest_gap_among_the_engines() -> None:
    pushing = sync(0.0, 0.003)
    report = pushing.push(7)
    assert (report.version, report.gap) == (7, pytest.approx(0.001))  # three probe tokens
    assert pushing.brought == [7]


@pytest.mark.parametrize("gaps", [(0.3,), (-0.3,), (0.3, 0.0), (0.0, 0.3), (0.0, 0.0, -0.3)])
def test_any_engine_that_holds_other_weights_stops_the_run(gaps: tuple[float, ...]) -> None:
    told: list[str] = []
    pushing = sync(*gaps, told=told)
    with pytest.raises(RunError, match=r"weight push 7: .* 0\.1000 nats .* sync.tolerance is 0\.02"):
        pushing.push(7)
    assert pushing.brought == [7, 7], "an engine may have missed one push, not two"
    assert told == ["weight push 7: engine and trainer differ by 0.1000 nats a token; pushed again"]


def test_sides_that_differ_before_the_first_step_end_the_run() -> None:
    """As with files of two output heads, of which one side takes the one and the other the other."""
    with pytest.raises(RunError, match=r"before the first step: .* 0\.1000 nats .* sync.tolerance is 0\.02"):
        sync(0.3, adapts=True).begin()
    with pytest.raises(RunError, match=r"before the first step: .* nan nats"):
        sync(NAN).begin()


def test_a_push_may_differ_by_a_few_times_what_rounding_did_at_the_start() -> None:
    """bfloat16 on two kinds of kernels: 0.08 nats at the start, 0.16 after sixteen steps of a right run."""
    pushing = sync(0.24, tolerance=0.15, adapts=True)
    pushing.begin()
    engine: Any = pushing._spec.engine
    engine.gaps = (0.48,)
    assert pushing.push(1).gap == pytest.approx(0.16)
    engine.gaps = (0.75,)
    with pytest.raises(RunError, match=r"allowed are 0\.24, 3 times what they differed by before the first step"):
        pushing.push(2)  # `sync.tolerance`, which nobody set, is 0.15


def test_a_tolerance_of_the_users_stays() -> None:
    pushing = sync(0.24, tolerance=0.15)
    pushing.begin()
    engine: Any = pushing._spec.engine
    engine.gaps = (0.48,)
    with pytest.raises(RunError, match=r"sync.tolerance is 0\.15"):
        pushing.push(1)


def test_a_push_that_an_engine_missed_is_made_again() -> None:
    told: list[str] = []
    pushing = sync(0.3, told=told)
    pushing.later = (0.0,)
    assert pushing.push(7).gap == 0.0
    assert (len(pushing.brought), len(told)) == (2, 1)


@pytest.mark.parametrize("gaps", [(NAN,), (NAN, 0.0), (0.0, NAN), (0.0, NAN, 0.0)])
def test_nan_from_any_engine_stops_the_run(gaps: tuple[float, ...]) -> None:
    with pytest.raises(RunError, match="weight push 1"):
        sync(*gaps).push(1)


def test_the_tolerance_is_the_pipelines() -> None:
    assert sync(0.3, tolerance=0.11).push(1).gap == pytest.approx(0.1)
    with pytest.raises(RunError):
        sync(0.3, tolerance=0.09).push(1)


def test_ways_are_found_by_name() -> None:
    assert {"shared_memory": SharedMemorySync, "network": NetworkSync, "direct": DirectSync} == SYNCS


# Probe


def prompts(*lengths: int) -> list[Prompt]:
    return [
        Prompt(id=f"d/{i}", domain="d", token_ids=tuple(range(1000 * i, 1000 * i + n))) for i, n in enumerate(lengths)
    ]


def alike(*ends: tuple[int, ...]) -> list[Prompt]:
    """Prompts with one system prompt."""
    return [Prompt(id=f"d/{i}", domain="d", token_ids=(7, 8, 9, *end)) for i, end in enumerate(ends)]


def test_probe_sequences_differ_where_all_prompts_begin_alike() -> None:
    """With a system prompt all of them were once the same tokens."""
    chosen = choose_probe_sequences(alike((1, 2), (3, 4), (5, 6), (1, 3), (3, 5)), tokens=8, room=100)
    assert chosen == [(9, 1, 2), (9, 3, 4), (9, 5, 6), (9, 1, 3)]
    assert choose_probe_sequences(alike((), (3, 4)), tokens=8, room=100) == [(8, 9), (9, 3, 4)], (
        "one ends where all are alike"
    )


def test_a_prompt_that_comes_twice_is_one_probe_sequence() -> None:
    twice = alike((1, 2), (1, 2), (3, 4))
    assert choose_probe_sequences(twice, tokens=16, room=100) == [(9, 1, 2), (9, 3, 4)]
    assert len(choose_probe_sequences(twice[:2], tokens=16, room=100)) == 2, "the second is the first in reverse order"


def test_the_probe_is_the_beginnings_of_the_first_prompts() -> None:
    chosen = choose_probe_sequences(prompts(5, 5, 5, 5, 5), tokens=8, room=100)
    assert [len(ids) for ids in chosen] == [3, 3, 3, 3]
    assert chosen[0] == (0, 1, 2)
    assert [len(ids) for ids in choose_probe_sequences(prompts(3, 3, 3, 3, 3, 3), tokens=12, room=100)] == [3] * 6


@pytest.mark.parametrize("lengths", [(500,), (500, 500, 500), (3,), (1, 1), (1, 0, 4, 1)])
def test_the_probe_holds_several_sequences_whatever_the_prompts(lengths: tuple[int, ...]) -> None:
    """One alone cannot show that neighbours in a row see each other."""
    chosen = choose_probe_sequences(prompts(*lengths), tokens=64, room=100)
    assert len(chosen) > 1
    assert all(1 < len(ids) <= 64 for ids in chosen)


def test_prompts_without_a_scored_token_are_passed_over() -> None:
    assert [len(ids) for ids in choose_probe_sequences(prompts(1, 0, 4, 1, 4), tokens=16, room=100)] == [4, 4]


@pytest.mark.parametrize("room", [9, 15])
def test_a_probe_sequence_fits_the_engines_context(room: int) -> None:
    (ids, *_) = choose_probe_sequences(prompts(500, 500), tokens=64, room=room)
    assert len(ids) == room - 1  # the engine writes one token after it


def test_long_prompts_are_cut_to_what_the_probe_needs() -> None:
    assert [len(ids) for ids in choose_probe_sequences(prompts(*[500] * 9), tokens=64, room=1000)] == [17] * 4
