"""Pools of several engines as one: every teacher answers in its own payload, and one stream, log and resume have all rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opd import cluster
from opd.errors import RunError
from opd.records.types import Prompt, Rollout, RolloutBatch, Teacher
from opd.stream.log import ArrowTargetLog
from opd.stream.part_files import part_name
from opd.stream.schema import read_stream
from opd.stream.targets import StreamPart, TargetStream
from teachers.joined_pools import JoinedPool, JoinedPools
from teachers.no_teachers import TeacherlessPool, TeacherlessSpec
from teachers.pool import Pool
from tests.unit.teachers.conftest import VOCABULARY, rollout, start_pool


def join(*pools: Any, timeout_s: float = 60.0) -> JoinedPools:
    joined = [
        JoinedPool(pool=part, domains=frozenset(domains), has_own_numbers=isinstance(part, Pool))
        for part, domains in pools
    ]
    return JoinedPools(joined, numbered_workers=2, max_quarantined=0.1, timeout_s=timeout_s)


@pytest.fixture
def three(teachers: dict[str, Teacher], in_process: Any) -> JoinedPools:
    """Hidden states in one domain, log-probs in another, and one that the trainer scores itself."""
    near = start_pool({"reverse": teachers["reverse"]}, 1, first_worker=0)
    far = start_pool(
        {"upper": teachers["upper"]}, 1, first_worker=1, payload="sampled_logprobs", objective={"kind": "sampled"}
    )
    nobody = TeacherlessPool(TeacherlessSpec(dtype="float32", max_quarantined=0.1))
    made = join((near, {"reverse"}), (far, {"upper"}), (nobody, {"own"}))
    made.wait_ready()
    return made


def rollouts() -> list[Rollout]:
    return [rollout(i, domain) for i in range(4) for domain in ("upper", "reverse", "own")]


def parts_of(targets: TargetStream) -> list[StreamPart]:
    return list(iter(targets.take_part, None))


def test_every_teacher_answers_in_its_own_payload(three: JoinedPools) -> None:
    targets = three.score(rollouts())
    parts = parts_of(targets)
    rows = {
        (row.rollout.domain, row.teacher, stream.payload)
        for stream in (read_stream(memoryview(cluster.fetch_object(part.handle))) for part in parts)
        for row in stream.rows
    }
    assert rows == {
        ("reverse", "rev", "hidden_states"), ("upper", "up", "sampled_logprobs"), ("own", "nobody", "none"),
    }  # fmt: skip
    assert targets.arrived and targets.rows == 12 and set(three.layouts) == {"rev", "up"}
    assert sorted(part.summary.record.worker for part in parts) == [0, 1, 2], "no two have the same file"
    assert len(targets.heads) == 1 and set(targets.heads) < set(three.heads())
    assert targets.request.kinds == {"upper": ("float32", "sampled_logprobs"), "own": ("float32", "none")}


def test_a_step_without_rows_of_an_engine_does_not_ask_it(three: JoinedPools) -> None:
    targets = three.score([rollout(0, "upper")])
    assert [part.summary.payload for part in parts_of(targets)] == ["sampled_logprobs"]
    with pytest.raises(RunError, match="no teacher for domain 'strange'; teachers serve own, reverse, upper"):
        three.score([rollout(0, "strange")])


def test_the_log_gives_back_what_came(three: JoinedPools, tmp_path: Path) -> None:
    log = ArrowTargetLog(tmp_path, three, VOCABULARY, print)
    batch = RolloutBatch(rollouts=tuple(rollouts()), quarantined=())
    prompts = [Prompt(id="p", domain="upper", text="x", answer="", token_ids=(1,))]
    targets = three.score(batch.rollouts, log.begin(1))
    log.record(1, 0, prompts, batch, targets)
    came = {part_name(part.summary.record): part.samples for part in parts_of(targets)}
    targets.wait_for_sinks()
    found = log.replay(1, 0, prompts)
    assert found is not None and found[1] is not None
    assert {part_name(part.summary.record): part.samples for part in found[1].collected} == came
    assert found[1].request.kinds == targets.request.kinds and dict(found[1].heads) == dict(targets.heads)


class Failing:
    """A pool whose stream ends with an error, after the other pools' parts if `waits`."""

    def __init__(self, pool: Any, event: threading.Event | None = None) -> None:
        self.layouts: dict[str, Any] = {}
        self.heads = pool.heads
        self._pool, self._event = pool, event

    def wait_ready(self) -> None: ...

    def score(self, rollouts: Any, directory: Any = None) -> TargetStream:
        def source() -> Iterator[StreamPart]:
            if self._event is not None:
                assert self._event.wait(10)
            raise RunError("teacher up: it broke")
            yield

        return TargetStream(source(), self._pool.score(rollouts).request, heads={})


def test_an_error_of_one_engine_is_the_step_s(teachers: dict[str, Teacher], in_process: Any) -> None:
    near, far = (
        start_pool({"reverse": teachers["reverse"]}, 1, first_worker=0),
        start_pool({"upper": teachers["upper"]}, 1, first_worker=1),
    )
    far.wait_ready()
    targets = join((near, {"reverse"}), (Failing(far), {"upper"}))
    targets.wait_ready()
    with pytest.raises(RunError, match="teacher up: it broke"):
        parts_of(targets.score([rollout(0, "reverse"), rollout(0, "upper")]))


def test_a_pool_that_says_nothing_is_not_waited_for_for_ever(
    teachers: dict[str, Teacher], in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teachers.joined_pools.GRACE_S", 0.1)
    far, event = start_pool({"upper": teachers["upper"]}, 1, first_worker=1), threading.Event()
    far.wait_ready()
    silent = join((Failing(far, event), {"upper"}), timeout_s=0.2)
    with pytest.raises(RunError, match="no part came in 0 s"):
        parts_of(silent.score([rollout(0, "upper")]))
    event.set()
