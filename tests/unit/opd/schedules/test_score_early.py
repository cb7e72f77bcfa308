"""A whole merge that scores early: loop, log, pool, checkpoints and records are the real ones.

The engine is done with prompts in an order of chance, and a prompt of domain `b` is an episode of two segments. What a teacher says of a
row depends on all rows that it is asked about together, more than any real one's does.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from opd import cluster
from opd.loop import Parts
from opd.payloads.sampled_logprobs import SampledLogprobs
from opd.prompts import MixedPrompts
from opd.records.types import Prompt, Rollout, RolloutBatch, Teacher, WeightedTeacher
from opd.rollouts.groups import Early
from opd.rollouts.responses import sample_ids
from opd.run.metrics import MetricsFile
from opd.stream.schema import TargetRow, write_parts
from teachers.pool import Pool, PoolSpec
from teachers.scorers import ScorerOptions
from teachers.worker import ScoringGroup
from tests.unit.opd.schedules.test_one_step_off import PROMPTS, STEPS, Engine, Killed, Merge, Student

SCORING_S = 0.01
OPTIONS = ScorerOptions(dtype="float32", payload="sampled_logprobs", top_k=0, vocab_size=76)


class Scorer:
    """A scoring worker."""

    def __init__(self, merge: EarlyMerge) -> None:
        self._merge = merge
        self._parts: Iterator[np.ndarray] = iter(())
        self._dies, self._dead = merge.teacher_dies_at, False

    def begin_groups(self, groups: Sequence[ScoringGroup], worker: int) -> None:
        self._merge.asked.append(len(groups))
        self._merge.scoring.set()
        self._dead = len(self._merge.asked) == self._dies
        time.sleep(SCORING_S)
        rows = [[row for teacher, weight, of in groups for row in together(teacher, weight, of)]]
        names = [teacher.name for teacher, _, _ in groups]
        written = write_parts(rows, "float32", "sampled_logprobs", worker=worker, broken={}, teachers=names)
        self._parts = iter([np.frombuffer(part, dtype=np.uint8) for part in written])

    def next_part(self) -> np.ndarray | None:
        if self._dead:
            raise cluster.WorkerDied("died", self)  # type: ignore[arg-type]
        return next(self._parts, None)


def together(teacher: Teacher, weight: float, rollouts: Sequence[Rollout]) -> list[TargetRow]:
    batch = blake3(repr([(r.sample_id, r.response_ids) for r in rollouts]).encode()).digest()[0] / 256
    return [
        TargetRow(
            rollout=r, teacher=teacher.name, weight=weight,
            answer=SampledLogprobs(teacher_logprobs=tuple(-0.1 * t - batch for t in r.response_ids)),
        )
        for r in rollouts
    ]  # fmt: skip


@dataclass
class EarlyMerge(Merge):
    """A merge in the `sync` schedule; see `Merge`."""

    mode: str = "sync"
    in_process: Any = None
    size: int | None = 2
    """`schedule.score_early`."""
    seed: int | None = 0
    """The order in which responses are done; None: as asked, and all at the end."""
    workers: int = 2
    """Scoring workers."""
    wait_s: float = 0.0
    """How long the last response of each step takes longer than the others."""
    teacher_dies_at: int = -1
    """A worker dies when it is asked for this group, counted over the sitting."""
    asked: list[int] = field(default_factory=list)
    scoring: threading.Event = field(default_factory=threading.Event)
    """Set when a teacher has begun with the step."""
    began_early: list[bool] = field(default_factory=list)
    """By step: whether a teacher had begun before the last response was done."""
    logged: dict[str, bytes] = field(default_factory=dict)
    """Every file that the target log had."""

    def prompts(self, metrics: MetricsFile) -> MixedPrompts:
        return MixedPrompts(PROMPTS, {"a": 7, "b": 4}, 3)

    def moment(self, name: str, step: int) -> None:
        if name == "push" and step == self.pushed + 1:
            self.pushed = step
            for file in sorted((self.root / "targets").glob(f"step-{step:06d}/*")):
                self.logged[f"{step}/{file.name}"] = file.read_bytes()
        super().moment(name, step)

    pushed: int = 0

    def parts(self, student: Student, engine: Engine, metrics: MetricsFile) -> Parts:
        self.in_process.replace = lambda *_: Scorer(self)
        spec = PoolSpec(
            engine="none", scorer=OPTIONS, workers=self.workers, max_quarantined=0, start_timeout_s=30, timeout_s=30
        )  # fmt: skip
        routes = {d: [WeightedTeacher(teacher=Teacher(name=f"t{d}", model_dir=Path(d)), weight=1.0)] for d in PROMPTS}
        pool = Pool(spec, routes)
        plain = engine.generate

        def generate(
            prompts: Sequence[Prompt], *, step: int, policy_version: int, early: Early | None = None
        ) -> RolloutBatch:
            self.scoring.clear()
            batch = plain(prompts, step=step, policy_version=policy_version)
            batch = replace(batch, rollouts=tuple(s for r in batch.rollouts for s in segments(r)))
            if early is not None:
                self.tell(early, sample_ids(prompts, step), batch)
            return batch

        engine.generate = generate  # type: ignore[method-assign, assignment]
        begin = partial(pool.early, size=self.size) if self.size is not None else None
        return replace(super().parts(student, engine, metrics), teachers=pool, early=begin)

    def tell(self, early: Early, ids: Sequence[str], batch: RolloutBatch) -> None:
        order = list(ids) if self.seed is None else random.Random(self.seed).sample(list(ids), k=len(ids))
        for sample_id in order:
            if sample_id == order[-1]:
                time.sleep(self.wait_s)
                self.began_early.append(self.seed is not None and self.scoring.wait(10))
            early.written(sample_id, [r for r in batch.rollouts if r.episode == sample_id])


def segments(response: Rollout) -> list[Rollout]:
    """One of a response, two of an episode."""
    if response.domain == "a":
        return [response]
    return [response, replace(response, sample_id=f"{response.sample_id}/1", prompt_ids=(*response.prompt_ids, 9))]


@pytest.fixture
def merge(tmp_path: Path, in_process: Any) -> Any:
    """merge(name, **options): one in a directory of its own."""
    return lambda name, **options: EarlyMerge(tmp_path / name, in_process=in_process, **options)


def test_in_whatever_order_responses_end_weights_and_log_are_those_of_the_slow_way(merge: Any) -> None:
    slow = merge("slow", seed=None)
    weights = slow.take_to()
    assert len(slow.logged) == STEPS * (2 + 4 + 2), "rollouts and manifest, and a part for each group"
    for seed in range(5):
        early = merge(f"early-{seed}", seed=seed)
        assert early.take_to() == weights
        assert early.logged == slow.logged, "byte for byte"
        assert early.began_early == [True] * STEPS, "before the last response was done"


def test_groups_as_large_as_a_domain_give_the_weights_of_a_merge_that_scores_at_the_end(merge: Any) -> None:
    # With one worker, because this student's weights also depend on the order of the rows.
    plain = merge("plain", size=None, workers=1).take_to()
    assert merge("domains", size=99, seed=1, workers=1).take_to() == plain
    assert merge("twos", size=2, seed=1, workers=1).take_to() != plain, "these teachers tell who was asked with whom"


@pytest.mark.parametrize("kill", [("written", 4), ("train", 5), ("trained", 5), ("push", 5), ("record", 4)])
def test_a_kill_and_a_resume_in_another_order_change_nothing(kill: tuple[str, int], merge: Any) -> None:
    weights = merge("whole").take_to()
    with pytest.raises(Killed):
        merge("broken", kill=kill, seed=1).take_to()
    assert merge("broken", seed=2).take_to() == weights


@pytest.mark.parametrize("group", [1, 4, 9])
def test_a_teacher_that_dies_repeats_one_group(group: int, merge: Any) -> None:
    weights = merge("whole").take_to()
    hit = merge("hit", teacher_dies_at=group)
    assert hit.take_to() == weights
    assert len(hit.asked) == STEPS * 6 + 1
    assert [len(r.restarted) for r in hit.records].count(1) == 1


def test_each_role_is_at_work_for_its_own_time(merge: Any) -> None:
    early = merge("early", wait_s=2.0)
    early.take_to(2)
    for record in early.records:
        busy = record.busy_s
        assert busy["rollout"] >= 2
        assert SCORING_S <= busy["teachers"] < 1.5, "not while they waited for the last response"
        assert record.phase_s["score"] < busy["rollout"]
