"""The pool: who scores what, what is left out, and what happens when a worker dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from opd import cluster
from opd.errors import RunError
from opd.models.heads import head_tensor
from opd.models.logit_rule import IDENTITY
from opd.records.types import Teacher
from opd.stream import schema
from opd.stream.part_files import PartsDirectory, part_name
from opd.stream.part_summaries import make_summary
from opd.stream.schema import PartRecord, Stream, read_stream
from opd.stream.targets import TargetStream
from teachers.pool import PARTS_AHEAD, Pool
from teachers.scorers import transformers as transformers_scorer
from teachers.shares import TeacherRows
from teachers.worker import TeacherWorker
from tests.conftest import read_rows
from tests.unit.teachers.conftest import rollout, start_pool


def pool(teachers: dict[str, Teacher], workers: int, **changes: Any) -> Pool:
    made = start_pool(teachers, workers, **changes)
    made.wait_ready()
    return made


def streams_of(targets: TargetStream) -> list[Stream]:
    """Every part."""
    found = []
    while (part := targets.take_part()) is not None:
        found.append(read_stream(memoryview(cluster.fetch_object(part.handle))))
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_rollout_goes_to_the_teacher_of_its_domain(
    workers: int,
    teachers: dict[str, Teacher],
    expert_dirs: dict[str, Path],
    check_rows: Callable[..., None],
    in_process: Any,
) -> None:
    rollouts = [rollout(i, domain) for i in range(4) for domain in ("upper", "reverse")]
    targets = pool(teachers, workers).score(rollouts)
    rows = read_rows(targets)
    assert {r.rollout.sample_id: r.teacher for r in rows} == {
        r.sample_id: {"upper": "up", "reverse": "rev"}[r.domain] for r in rollouts
    }
    assert targets.rows == len(rows) == 8
    assert targets.quarantined == {}
    assert {head.rule for head in targets.heads.values()} == {IDENTITY}
    assert targets.num_parts == workers
    heads = {key: head_tensor(head.handle.fetch()) for key, head in targets.heads.items()}  # type: ignore[union-attr]
    check_rows(rows, heads, expert_dirs)


def test_only_heads_that_rows_need_are_sent(teachers: dict[str, Teacher], in_process: Any) -> None:
    scored = pool(teachers, 1)
    assert len(scored.score([rollout(0, "upper")]).heads) == 1
    both = scored.score([rollout(0, "upper"), rollout(1)])
    assert len(both.heads) == 2
    assert scored.heads() == both.heads, "what a replay can ask for"
    assert all(head.key == key and head.file is not None for key, head in both.heads.items())


@pytest.mark.parametrize(
    ("payload", "objective"),
    [("sampled_logprobs", {"kind": "sampled"}), ("top_k", {"kind": "top_k", "k": 3})],
)
def test_other_payloads_need_no_head(
    payload: str, objective: dict[str, Any], teachers: dict[str, Teacher], in_process: Any
) -> None:
    targets = pool(teachers, 2, payload=payload, objective=objective).score([rollout(0, "upper"), rollout(1)])
    streams = streams_of(targets)
    assert {s.payload for s in streams} == {payload}
    assert (dict(targets.heads), targets.rows) == ({}, 2)
    for row in (row for s in streams for row in s.rows):
        if payload == "sampled_logprobs":
            assert len(row.answer.teacher_logprobs) == 5
        else:
            assert len(row.answer.topk_ids) == len(row.answer.topk_logprobs) == 15


def test_one_response_that_cannot_be_scored_is_left_out(
    teachers: dict[str, Teacher], tmp_path: Path, damaged: Callable[..., Teacher], in_process: Any
) -> None:
    bad = damaged(teachers["reverse"], tmp_path, "model.norm.weight", 0)
    scoring = pool({"upper": teachers["upper"], "reverse": bad}, 2, max_quarantined=0)
    rollouts = [rollout(0, "reverse"), *(rollout(i, "upper") for i in range(3))]
    targets = scoring.score(rollouts)
    rows = read_rows(targets)
    assert targets.quarantined == {rollouts[0].sample_id: "teacher bad: hidden states are not finite"}
    assert {r.rollout.sample_id for r in rows} == {r.sample_id for r in rollouts[1:]}
    assert targets.rows == 3
    again = scoring.score(rollouts[1:])
    again.wait_for_parts()
    assert again.quarantined == {}, "the last step's are forgotten"


def test_too_many_responses_that_cannot_be_scored_stop_the_run(
    teachers: dict[str, Teacher], tmp_path: Path, damaged: Callable[..., Teacher], in_process: Any
) -> None:
    bad = damaged(teachers["reverse"], tmp_path, "model.norm.weight", 0)
    rollouts = [rollout(i, domain) for i in range(3) for domain in ("reverse", "upper")]
    by_domain = {"upper": teachers["upper"], "reverse": bad}
    message = (
        r"3 of 6 responses could not be scored, first 000001/reverse/\d: teacher bad: hidden states are not finite; "
        r"teachers\.max_quarantined is 0\.49"
    )
    with pytest.raises(RunError, match=message):
        pool(by_domain, 2, max_quarantined=0.49).score(rollouts).wait_for_parts()
    targets = pool(by_domain, 2, max_quarantined=0.5).score(rollouts)
    targets.wait_for_parts()
    assert len(targets.quarantined) == 3


def test_a_domain_without_a_teacher_is_an_error(teachers: dict[str, Teacher], in_process: Any) -> None:
    with pytest.raises(RunError, match="no teacher for domain 'math'; teachers serve reverse, upper"):
        pool(teachers, 1).score([rollout(0), rollout(1, "math")])


def test_a_step_without_rollouts(teachers: dict[str, Teacher], in_process: Any) -> None:
    targets = pool(teachers, 2).score([])
    assert (targets.rows, dict(targets.heads)) == (0, {})
    assert [s.rows for s in streams_of(targets)] == [(), ()]


def test_no_bit_depends_on_the_number_of_workers(
    teachers: dict[str, Teacher], monkeypatch: pytest.MonkeyPatch, in_process: Any
) -> None:
    """A teacher's rows are divided between two batches, never within one."""
    monkeypatch.setattr("teachers.scorers.SCORE_TOKENS", 40)
    monkeypatch.setattr(transformers_scorer, "SCORE_TOKENS", 40)
    rollouts = [rollout(i, domain) for i in range(12) for domain in ("upper", "reverse")]
    wanted = contents(pool(teachers, 1).score(rollouts))
    assert len(wanted) == 24
    for workers in (2, 3, 5):
        in_process.workers.clear()
        targets = pool(teachers, workers).score(rollouts)
        assert contents(targets) == wanted
        assert targets.num_parts == workers, "every worker has some"


# The target log


ROLLOUTS = [rollout(i, domain) for i in range(4) for domain in ("upper", "reverse")]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row leaves alone."""
    monkeypatch.setattr(schema, "PART_ROWS", 1)
    monkeypatch.setattr(transformers_scorer, "SCORE_TOKENS", 1)


@pytest.fixture
def directory(tmp_path: Path) -> PartsDirectory:
    return PartsDirectory.create(tmp_path / ".tmp-step-000001")


def files_of(directory: PartsDirectory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.path.glob("worker-*")}


def test_workers_write_their_parts_into_the_log_and_the_driver_touches_no_answer(
    teachers: dict[str, Teacher], small_parts: None, directory: PartsDirectory, in_process: Any
) -> None:
    targets = pool(teachers, 2).score(ROLLOUTS, directory)
    parts = []
    while (part := targets.take_part()) is not None:
        parts.append(part)
        assert (directory.path / part_name(part.summary.record)).read_bytes() == bytes(part.handle)
        assert part.summary.file == blake3(part.handle).hexdigest()
        assert part.summary.nbytes == len(part.handle)
        stream = read_stream(memoryview(part.handle))
        kind = (stream.dtype, stream.payload)
        assert part.summary == make_summary(stream.rows, stream.part, kind, len(part.handle), part.summary.file)
    assert len(files_of(directory)) == len(parts) == targets.num_parts
    assert targets.driver_bytes == sum(len(part.summary.to_json()) for part in parts)


@pytest.mark.parametrize("why", ["another machine's directory", "no such directory", "none"])
def test_a_worker_that_does_not_reach_the_log_leaves_the_writing_to_the_driver(
    why: str, teachers: dict[str, Teacher], directory: PartsDirectory, in_process: Any
) -> None:
    elsewhere = {
        "another machine's directory": replace(directory, token="theirs"),
        "no such directory": replace(directory, path=directory.path / "x"),
        "none": None,
    }[why]
    targets = pool(teachers, 2).score(ROLLOUTS, elsewhere)
    part = targets.take_part()
    assert part is not None and part.summary.file == "" and files_of(directory) == {}


def test_a_part_that_a_worker_cannot_write_leaves_nothing(directory: PartsDirectory) -> None:
    (directory.path / "worker-0-part-0000.arrow").mkdir()
    assert directory.write_part(PartRecord(), memoryview(b"x")) == ""
    assert sorted(path.name for path in directory.path.iterdir()) == [".token", "worker-0-part-0000.arrow"]


@pytest.mark.parametrize("method", ["begin", "part 1", "part 3"])
def test_the_files_are_the_same_after_a_worker_died(
    method: str, teachers: dict[str, Teacher], small_parts: None, directory: PartsDirectory, in_process: Any
) -> None:
    """Check that what had come is not written again: its hash is with the driver."""
    targets = pool(teachers, 2).score(ROLLOUTS, directory)
    targets.wait_for_parts()
    wanted = files_of(directory)
    for path in directory.path.glob("worker-*"):
        path.unlink()
    in_process.workers.clear()
    workers = mortal(in_process, {0: method})
    targets = pool(teachers, 2).score(ROLLOUTS, directory)
    (directory.path / "worker-0-part-0000.arrow").write_bytes(b"half a pa")
    parts = []
    while (part := targets.take_part()) is not None:
        parts.append(part)
    assert len(workers) == 3 and targets.restarted == ["teacher worker 0"]
    if method == "begin":
        assert files_of(directory) == wanted
    else:
        left = {name: raw for name, raw in wanted.items() if name != "worker-0-part-0000.arrow"}
        assert files_of(directory) == {**left, "worker-0-part-0000.arrow": b"half a pa"}, "part 0 had come"
    assert {part_name(part.summary.record): part.summary.file for part in parts} == {
        name: blake3(raw).hexdigest() for name, raw in wanted.items()
    }


# Workers that die


class Mortal(TeacherWorker):
    """Scores as the real one, until it dies in a method that a test names; then it answers nothing more."""

    dies_in = ""
    """A method, or `part N`: when it is asked for that part."""
    dead = False
    begun = 0
    """Shares that it was given."""
    asked = 0

    def begin_rows(self, groups: Sequence[TeacherRows], worker: int, *where: Any) -> None:
        self.begun += 1
        self.asked = 0
        self._may_die("begin")
        super().begin_rows(groups, worker, *where)

    def next_part(self) -> Any:
        self.asked += 1
        self._may_die(f"part {self.asked - 1}")
        return super().next_part()

    def read_head(self, teacher: Teacher) -> Any:
        self._may_die("head")
        return super().read_head(teacher)

    def _may_die(self, method: str) -> None:
        self.dead |= method == self.dies_in
        if self.dead:
            raise cluster.WorkerDied(f"died in {method}", self)


def mortal(in_process: Any, dies_in: dict[int, str]) -> list[Mortal]:
    """The workers as they are started, those that are started again last; `dies_in`: which one dies in what."""

    def make(engine: str, options: Any) -> Mortal:
        worker = Mortal(engine, options)
        worker.dies_in = dies_in.get(len(in_process.workers), "")
        return worker

    in_process.replace = make
    return in_process.workers


def contents(targets: TargetStream) -> list[tuple[str, str, bytes]]:
    return sorted((row.rollout.sample_id, row.teacher, bytes(row.answer.hidden)) for row in read_rows(targets))


@pytest.mark.parametrize("method", ["begin", "part 0", "part 1", "part 3", "part 4", "part 5"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_dies_is_started_again_with_its_share_alone(
    index: int, method: str, teachers: dict[str, Teacher], small_parts: None, in_process: Any
) -> None:
    wanted = contents(pool(teachers, 2).score(ROLLOUTS))
    in_process.workers.clear()
    workers = mortal(in_process, {index: method})
    scoring = pool(teachers, 2)
    targets = scoring.score(ROLLOUTS)
    assert contents(targets) == wanted and len(wanted) == targets.rows == 8
    assert targets.num_parts == 10, "four of a row each and the end, from either worker"
    assert targets.restarted == [f"teacher worker {index}"]
    assert [w.begun for w in workers] == [1, 1, 1]
    again = scoring.score(ROLLOUTS)
    assert contents(again) == wanted
    assert again.restarted == [], "of this step, not of the run"
    assert [w.begun for w in workers] == [2 - (index == 0), 2 - (index == 1), 2]


def test_two_workers_may_die_in_one_step(teachers: dict[str, Teacher], small_parts: None, in_process: Any) -> None:
    workers = mortal(in_process, {0: "part 0", 1: "part 2"})
    targets = pool(teachers, 2).score(ROLLOUTS)
    assert [sample_id for sample_id, *_ in contents(targets)] == sorted(r.sample_id for r in ROLLOUTS)
    assert targets.restarted == ["teacher worker 0", "teacher worker 1"]
    assert len(workers) == 4


@pytest.mark.parametrize("methods", [("part 0", "part 0"), ("part 0", "part 3"), ("part 3", "begin")])
def test_a_worker_that_dies_twice_in_a_step_ends_the_run(
    methods: tuple[str, str], teachers: dict[str, Teacher], small_parts: None, in_process: Any
) -> None:
    workers = mortal(in_process, {0: methods[0], 2: methods[1]})
    with pytest.raises(RunError, match="died in"):
        pool(teachers, 2).score(ROLLOUTS).wait_for_parts()
    assert len(workers) == 3


def test_a_worker_may_die_again_in_another_step(teachers: dict[str, Teacher], in_process: Any) -> None:
    workers = mortal(in_process, {0: "part 0"})
    scoring = pool(teachers, 2)
    first = contents(scoring.score(ROLLOUTS))
    workers[2].dies_in = "part 0"
    targets = scoring.score(ROLLOUTS)
    assert contents(targets) == first
    assert targets.restarted == ["teacher worker 0"] and len(workers) == 4


def test_the_death_of_another_kind_of_worker_or_of_ray_is_passed_on(
    teachers: dict[str, Teacher], in_process: Any
) -> None:
    for actor in (None, object()):
        scoring = pool(teachers, 2)
        targets = scoring.score(ROLLOUTS)
        death = cluster.WorkerDied("Ray itself is gone", actor)

        def first(*_: Any, death: Exception = death, **__: Any) -> int:
            raise death

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(cluster, "wait_first", first)
            with pytest.raises(cluster.WorkerDied) as raised:
                targets.wait_for_parts()
        assert raised.value is death and targets.restarted == []


def test_what_could_not_be_scored_does_not_die_with_the_worker(
    teachers: dict[str, Teacher], tmp_path: Path, damaged: Callable[..., Teacher], in_process: Any
) -> None:
    bad = damaged(teachers["reverse"], tmp_path, "model.norm.weight", 0)
    workers = mortal(in_process, {})
    scoring = pool({"upper": teachers["upper"], "reverse": bad}, 2)
    for worker in list(workers):
        worker.dies_in = "part 1"
    rollouts = [rollout(0, "reverse"), *(rollout(i, "upper") for i in range(3))]
    targets = scoring.score(rollouts)
    targets.wait_for_parts()
    assert len(targets.restarted) == 2
    assert list(targets.quarantined) == [rollouts[0].sample_id] and targets.rows == 3


def test_a_worker_is_asked_for_few_parts_before_one_is_taken(
    teachers: dict[str, Teacher], small_parts: None, in_process: Any
) -> None:
    workers = mortal(in_process, {})
    targets = pool(teachers, 1).score(ROLLOUTS)
    assert workers[0].asked == PARTS_AHEAD
    for taken in range(1, 6):
        assert targets.take_part() is not None
        assert workers[0].asked == PARTS_AHEAD + taken


def test_heads_are_read_from_a_worker_that_lives(teachers: dict[str, Teacher], in_process: Any) -> None:
    workers = mortal(in_process, {0: "part 0"})
    scoring = pool(teachers, 2)
    before = scoring.heads()
    assert set(before) == {scoring.head_of(t).key for t in teachers.values()}
    heads = {key: head_tensor(head.handle.fetch()) for key, head in before.items()}
    scoring.score(ROLLOUTS).wait_for_parts()
    targets = scoring.score(ROLLOUTS)
    assert workers[0].dead and set(targets.heads) == set(before)
    for key, head in targets.heads.items():
        assert torch.equal(head_tensor(head.handle.fetch()), heads[key])
        with pytest.raises(RunError):
            before[key].handle.fetch()


def test_a_pool_that_was_stopped_starts_nothing_again(teachers: dict[str, Teacher], in_process: Any) -> None:
    workers = mortal(in_process, {0: "part 0"})
    scoring = pool(teachers, 2)
    scoring.stop()
    assert in_process.killed == workers
    with pytest.raises(RunError, match="died in part 0"):
        scoring.score(ROLLOUTS).wait_for_parts()
    assert len(workers) == 2


def test_a_pool_that_is_stopped_while_it_restarts_a_worker_ends_that_one_too(
    teachers: dict[str, Teacher], in_process: Any
) -> None:
    workers = mortal(in_process, {0: "part 0"})
    scoring = pool(teachers, 2)
    start = in_process.replace

    def start_and_stop(engine: str, options: Any) -> Mortal:
        scoring.stop()
        return start(engine, options)

    in_process.replace = start_and_stop
    with pytest.raises(RunError, match="died in part 0"):
        scoring.score(ROLLOUTS).wait_for_parts()
    assert workers[2] in in_process.killed and workers[2].begun == 0
