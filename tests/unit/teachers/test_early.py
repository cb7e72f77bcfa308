"""Scoring that begins before a step is written: the same bits in whatever order, at its own pace, and only what is lost again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from opd import cluster
from opd.errors import RunError
from opd.records.types import Prompt, Rollout, Teacher
from opd.stream.schema import read_stream
from opd.stream.targets import TargetStream
from teachers.early import EarlyScores
from teachers.pool import Pool
from teachers.worker import ScoringGroup
from tests.unit.teachers.conftest import rollout
from tests.unit.teachers.test_pool import Mortal, contents, mortal, pool

ROLLOUTS = [rollout(i, domain, response=3 + i) for i in range(7) for domain in ("upper", "reverse")]
PROMPTS = [Prompt(id=r.sample_id[7:], domain=r.domain, token_ids=r.prompt_ids) for r in ROLLOUTS]


def begun(scoring: Pool, size: int) -> EarlyScores:
    return scoring.early(PROMPTS, 1, size)


def tell(early: EarlyScores, rollouts: Sequence[Rollout], seed: int | None = None) -> None:
    order = list(rollouts) if seed is None else random.Random(seed).sample(rollouts, k=len(rollouts))
    for one in order:
        early.written(one.sample_id, [one])


def scored(scoring: Pool, size: int, seed: int | None = None) -> TargetStream:
    early = begun(scoring, size)
    tell(early, ROLLOUTS, seed)
    return early.stream(ROLLOUTS)


def parts(targets: TargetStream) -> list[bytes]:
    found = []
    while (part := targets.take_part()) is not None:
        found.append(bytes(cluster.fetch_object(part.handle)))
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_every_order_gives_the_same_parts_byte_for_byte(
    workers: int, teachers: dict[str, Teacher], in_process: Any
) -> None:
    scoring = pool(teachers, workers)
    wanted = parts(scored(scoring, 2))
    assert len(wanted) == 8, "four groups of each domain"
    for seed in range(6):
        assert parts(scored(scoring, 2, seed)) == wanted
    samples = [[row.rollout.sample_id for row in read_stream(part).rows] for part in wanted]
    assert [len(found) for found in samples] == [2, 2, 2, 1] * 2
    assert sorted(i for found in samples for i in found) == sorted(r.sample_id for r in ROLLOUTS)


def test_a_group_as_large_as_the_domain_is_scored_as_without(teachers: dict[str, Teacher], in_process: Any) -> None:
    scoring = pool(teachers, 2)
    assert contents(scored(scoring, 99, 5)) == contents(scoring.score(ROLLOUTS)), "bit for bit"


def test_the_targets_are_checked_like_any(teachers: dict[str, Teacher], in_process: Any) -> None:
    scoring = pool(teachers, 1)
    early = begun(scoring, 2)
    tell(early, ROLLOUTS[:-1])
    with pytest.raises(RunError, match=f"1 rows are missing, first {ROLLOUTS[-1].sample_id}|2 rows are missing"):
        early.stream(ROLLOUTS).wait_for_parts()
    targets = scored(scoring, 2)
    targets.wait_for_parts()
    assert targets.rows == len(ROLLOUTS) and set(targets.heads) == set(scoring.heads())


class Meeting(Mortal):
    """Says when it begins, and waits for a test."""

    begins: threading.Semaphore
    may: threading.Event
    teachers_asked: list[list[str]]

    def begin_groups(self, groups: Sequence[ScoringGroup], worker: int) -> None:
        self.teachers_asked.append([teacher.name for teacher, _, _ in groups])
        self.begins.release()
        assert self.may.wait(20)
        super().begin_groups(groups, worker)


def meeting(in_process: Any) -> type[Meeting]:
    """Workers that a test can stop; all share these."""
    shared = type(
        "Shared", (Meeting,), {"begins": threading.Semaphore(0), "may": threading.Event(), "teachers_asked": []}
    )
    in_process.replace = shared
    return shared


def test_scoring_begins_before_the_last_response_is_written(teachers: dict[str, Teacher], in_process: Any) -> None:
    shared = meeting(in_process)
    early = begun(pool(teachers, 1), 2)
    upper = [r for r in ROLLOUTS if r.domain == "upper"]
    early.written(upper[0].sample_id, [upper[0]])
    assert not shared.begins.acquire(timeout=0.1), "its group is not whole"
    early.written(upper[1].sample_id, [upper[1]])
    assert shared.begins.acquire(timeout=20), "while all others are still written"
    tell(early, [r for r in ROLLOUTS if r not in upper[:2]])
    shared.may.set()
    early.stream(ROLLOUTS).wait_for_parts()


def test_a_worker_stays_with_the_teacher_that_it_has(teachers: dict[str, Teacher], in_process: Any) -> None:
    shared = meeting(in_process)
    early = begun(pool(teachers, 1), 1)
    tell(early, ROLLOUTS)  # in turns: upper, reverse, upper, ...
    shared.may.set()
    early.stream(ROLLOUTS).wait_for_parts()
    asked = [names[0] for names in shared.teachers_asked]
    assert sum(a != b for a, b in pairwise(asked)) <= 2 and len(asked) == len(ROLLOUTS)


def test_teachers_are_at_work_only_while_they_score(teachers: dict[str, Teacher], in_process: Any) -> None:
    scoring = pool(teachers, 2)
    began = time.monotonic()
    early = begun(scoring, 99)
    tell(early, [r for r in ROLLOUTS if r.domain == "upper"])
    time.sleep(1.0)  # the others are long
    tell(early, [r for r in ROLLOUTS if r.domain == "reverse"])
    targets = early.stream(ROLLOUTS)
    targets.wait_for_parts()
    assert 0 < targets.busy_s < time.monotonic() - began - 0.5, "the pause is none of theirs"


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("method", ["begin", "part 0", "part 1"])
def test_a_worker_that_dies_repeats_the_group_that_it_was_at(
    index: int, method: str, teachers: dict[str, Teacher], in_process: Any
) -> None:
    wanted = parts(scored(pool(teachers, 2), 2))
    in_process.workers.clear()
    workers = mortal(in_process, {})
    scoring = pool(teachers, 2)
    early = begun(scoring, 2)
    tell(early, ROLLOUTS[:8])
    early_groups = 4
    while sum(w.begun for w in workers) < early_groups:
        time.sleep(0.01)
    time.sleep(0.05)
    workers[index].dies_in = method
    tell(early, ROLLOUTS[8:])
    targets = early.stream(ROLLOUTS)
    assert parts(targets) == wanted
    assert targets.restarted == [f"teacher worker {index}"]
    assert sum(w.begun for w in workers) == 8 + 1, "eight groups, and the one that was lost"


def test_a_worker_that_dies_twice_in_a_step_ends_the_run(teachers: dict[str, Teacher], in_process: Any) -> None:
    mortal(in_process, {0: "part 0", 1: "part 0"})
    early = begun(pool(teachers, 1), 99)
    with pytest.raises(RunError, match="died in part 0"):
        tell(early, ROLLOUTS)
        early.stream(ROLLOUTS).wait_for_parts()


def test_what_a_worker_raises_ends_the_run_while_others_still_write(
    teachers: dict[str, Teacher], in_process: Any
) -> None:
    class Raises(Mortal):
        def next_part(self) -> Any:
            raise RunError("teacher up: broken")

    in_process.replace = Raises
    early = begun(pool(teachers, 1), 1)
    with pytest.raises(RunError, match="teacher up: broken"):
        for one in ROLLOUTS:
            early.written(one.sample_id, [one])
            time.sleep(0.05)
    with pytest.raises(RunError, match="teacher up: broken"):
        early.stream(ROLLOUTS).wait_for_parts()


def test_no_more_is_scored_than_may_wait_for_the_trainer(teachers: dict[str, Teacher], in_process: Any) -> None:
    wanted = parts(scored(pool(teachers, 1), 1))
    in_process.workers.clear()
    workers = mortal(in_process, {})
    scoring = pool(teachers, 1)
    scoring.early_bytes = 1
    early = begun(scoring, 1)
    tell(early, ROLLOUTS, 3)
    time.sleep(0.3)
    assert workers[0].begun == 1, "the first reaches the limit"
    assert parts(early.stream(ROLLOUTS)) == wanted, "and what the trainer waits for is scored"


def test_one_response_that_cannot_be_scored_is_left_out(
    teachers: dict[str, Teacher], tmp_path: Path, damaged: Callable[..., Teacher], in_process: Any
) -> None:
    bad = damaged(teachers["reverse"], tmp_path, "model.norm.weight", 0)
    scoring = pool({"upper": teachers["upper"], "reverse": bad}, 2, max_quarantined=0.5)
    targets = scored(scoring, 2, 1)
    targets.wait_for_parts()
    assert set(targets.quarantined) == {r.sample_id for r in ROLLOUTS if r.domain == "reverse"}


def test_a_domain_without_a_teacher_is_an_error(teachers: dict[str, Teacher], in_process: Any) -> None:
    odd = Prompt(id="math/0", domain="math", token_ids=(1, 2))
    early = pool(teachers, 1).early([odd], 1, 1)
    with pytest.raises(RunError, match="no teacher for domain 'math'; teachers serve reverse, upper"):
        early.written("000001/math/0", [rollout(0, "math")])


def test_a_step_without_rollouts(teachers: dict[str, Teacher], in_process: Any) -> None:
    early = pool(teachers, 2).early(PROMPTS[:1], 1, 2)
    early.written(ROLLOUTS[0].sample_id, ())
    targets = early.stream([])
    targets.wait_for_parts()
    assert (targets.rows, dict(targets.heads), targets.busy_s) == (0, {}, 0.0)
