"""The driver lets through to the trainer every row that was asked for, once, and nothing else."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from opd.errors import RunError
from opd.payloads.top_k import TopTokens
from opd.records.types import Rollout
from opd.stream.schema import PartRecord, StreamError, TargetRow, write_stream
from opd.stream.targets import ExpectedRow, TargetStream, TeacherRequest, make_part
from tests.rows import make_rollout, make_row

TEACHERS = {
    "a": {"x": ExpectedRow(weight=1.0, head="hx")},
    "b": {"x": ExpectedRow(weight=0.3, head="hx"), "y": ExpectedRow(weight=0.7, head="hy")},
}


def rollout(i: int, domain: str) -> Rollout:
    return make_rollout(
        sample_id=f"{domain}/{i}", step=4, domain=domain, policy_version=3, prompt_ids=(1, 2), response_ids=(5, 6 + i),
        behaviour_logprobs=(-0.1, -0.7), loss_mask=(True, False),
    )  # fmt: skip


ROLLOUTS = [rollout(i, domain) for i in range(2) for domain in "ab"]


def row(sample: Rollout, teacher: str, **changes: Any) -> TargetRow:
    said = TEACHERS[sample.domain][teacher]
    values = {
        "sample_id": sample.sample_id, "step": 4, "domain": sample.domain, "teacher": teacher, "weight": said.weight,
        "policy_version": 3, "prompt_ids": [1, 2], "response_ids": list(sample.response_ids),
        "loss_mask": [True, False], "behaviour_logprobs": [-0.1, -0.7], "head": said.head, "hidden_size": 1,
        "hidden": b"\0" * 4,
    }  # fmt: skip
    return make_row(**values | changes)


A0, B0, A1, B1 = ROLLOUTS
X_ROWS, Y_ROWS = [row(r, "x") for r in ROLLOUTS], [row(r, "y") for r in (B0, B1)]


def part(rows: list[TargetRow], **record: Any) -> np.ndarray:
    return np.frombuffer(write_stream(rows, "float32", part=PartRecord(**record)), np.uint8)


WORKER_0 = [part(X_ROWS[:2]), part(X_ROWS[2:], number=1, teachers={"x": 4})]
WORKER_1 = [part(Y_ROWS, worker=1, teachers={"y": 2})]


def targets(parts: Iterator[Any] | list[Any], *, max_quarantined: float = 0.0, **changes: Any) -> TargetStream:
    return TargetStream(
        (make_part(raw, "teachers at HOST") for raw in parts),
        TeacherRequest(
            rollouts=ROLLOUTS, teachers=TEACHERS, kind=("float32", "hidden_states"), max_quarantined=max_quarantined,
            sender="teachers at HOST",
        ),
        heads={}, **changes,
    )  # fmt: skip


def test_parts_pass_as_they_come(in_process: Any) -> None:
    asked = []

    def source() -> Iterator[np.ndarray]:
        for each in (WORKER_0[0], *WORKER_1, WORKER_0[1]):
            asked.append(each)
            yield each

    stream = targets(source())
    assert not asked, "nothing is waited for before it is wanted"
    assert not stream.has_samples(["a/0"])
    first = stream.take_part()
    assert first is not None and (first.handle is WORKER_0[0], first.nbytes) == (True, WORKER_0[0].nbytes)
    assert first.samples == ("a/0", "b/0") and len(asked) == 1
    assert stream.has_samples(["a/0"]) and not stream.has_samples(["a/0", "b/0"]), "b has a second teacher"
    assert stream.take_part() is not None
    assert stream.has_samples(["a/0", "b/0"]) and not stream.has_samples(["b/1"])
    assert stream.take_part() is not None and stream.has_samples(["a/0", "a/1", "b/0", "b/1"])
    assert not stream.arrived
    assert stream.take_part() is None and stream.take_part() is None
    assert stream.arrived
    assert (stream.num_parts, stream.nbytes, stream.rows) == (3, sum(p.nbytes for p in asked), 6)


def test_answers_of_two_widths_in_two_parts_are_refused(in_process: Any) -> None:
    """The trainer lays the rows of a micro-batch side by side, whatever parts they came in."""

    def part_of(number: int, k: int) -> np.ndarray:
        rows = [
            TargetRow(rollout=r, teacher="x", answer=TopTokens([1, 2, 3][:k], [-1.0, -2.0, -3.0][:k]))
            for r in (A0, A1)[number : number + 1]
        ]
        record = PartRecord(number=number, teachers={"x": 2} if number else None)
        return np.frombuffer(write_stream(rows, "float32", "top_k", record), np.uint8)

    def stream(second: int) -> TargetStream:
        asked = TeacherRequest(
            rollouts=(A0, A1),
            teachers={"a": {"x": ExpectedRow(weight=1.0, head="")}},
            kind=("float32", "top_k"),
            max_quarantined=0,
        )
        return TargetStream(
            (make_part(raw, "teachers") for raw in (part_of(0, 2), part_of(1, second))), asked, heads={}
        )

    stream(2).wait_for_parts()
    with pytest.raises(StreamError, match="teachers: row a/1 of teacher x: an answer of width 3, others have 2"):
        stream(3).wait_for_parts()


def test_what_is_collected_is_taken_afterwards(in_process: Any) -> None:
    stream = targets(WORKER_0 + WORKER_1)
    stream.wait_for_parts()
    assert stream.arrived and not stream.has_samples(["a/0"])
    taken = [stream.take_part() for _ in range(4)]
    assert [p.handle is q for p, q in zip(taken[:3], WORKER_0 + WORKER_1, strict=True) if p] == [True] * 3
    assert taken[3] is None and stream.has_samples(["b/1"])


def test_a_sink_sees_each_part_before_it_is_taken_and_the_end(in_process: Any) -> None:
    seen: list[Any] = []
    stream = targets(WORKER_0 + WORKER_1)
    stream.add_sink(lambda part: seen.append(part and (part.summary.record, part.handle)))
    assert stream.take_part() is not None
    assert seen == [(PartRecord(), WORKER_0[0])]
    stream.wait_for_parts()
    assert [told and told[0] for told in seen] == [
        PartRecord(), PartRecord(number=1, teachers={"x": 4}), PartRecord(worker=1, teachers={"y": 2}), None,
    ]  # fmt: skip


def test_settling_waits_for_what_sinks_began(in_process: Any) -> None:
    waited: list[str] = []
    stream = targets(WORKER_0 + WORKER_1)
    stream.add_sink(lambda part: (lambda: waited.append("end")) if part is None else None)
    stream.wait_for_parts()
    assert waited == []
    stream.wait_for_sinks()
    stream.wait_for_sinks()
    assert waited == ["end"], "once"


def test_the_end_is_not_told_if_a_row_is_missing(in_process: Any) -> None:
    seen: list[Any] = []
    stream = targets(WORKER_0)
    stream.add_sink(lambda part: seen.append(part))
    with pytest.raises(StreamError, match="2 rows are missing, first b/0"):
        stream.wait_for_parts()
    assert None not in seen and not stream.arrived


def test_a_sample_that_a_teacher_could_not_score_is_not_waited_for(in_process: Any) -> None:
    without = [part(Y_ROWS[:1], worker=1, teachers={"y": 1}, broken={"b/1": "teacher y: not finite"})]
    stream = targets(without + WORKER_0)
    assert stream.take_part() is not None
    assert stream.quarantined == {"b/1": "teacher y: not finite"}
    assert stream.has_samples(["b/1"]) and not stream.has_samples(["b/0"])
    stream.wait_for_parts()
    assert stream.rows == 4
    # The row that its other teacher gave may be missing too.
    neither = part(X_ROWS[2:3], number=1, teachers={"x": 3})
    stream = targets([*without, WORKER_0[0], neither])
    stream.wait_for_parts()
    assert stream.arrived


@pytest.mark.parametrize(("limit", "stops"), [(0.0, True), (0.49, True), (0.5, False)])
def test_too_many_that_cannot_be_scored(limit: float, stops: bool, in_process: Any) -> None:
    parts = [part([row(A0, "x"), row(A1, "x")], broken={"b/0": "nan", "b/1": "inf"}, teachers={"x": 2}), *WORKER_1]
    stream = targets(parts, max_quarantined=limit)
    if stops:
        with pytest.raises(RunError, match=rf"2 of 4 .* first b/0: nan; teachers\.max_quarantined is {limit}"):
            stream.wait_for_parts()
    else:
        stream.wait_for_parts()


def test_one_may_always_be_left_out(in_process: Any) -> None:
    stream = targets([part(X_ROWS[1:], broken={"a/0": "nan"}, teachers={"x": 3}), *WORKER_1])
    stream.wait_for_parts()
    assert list(stream.quarantined) == ["a/0"]


OTHER = dataclasses.replace(A0, sample_id="a/9")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([WORKER_0[0], part([X_ROWS[0]], number=1)], "row a/0 of teacher x: not asked for, or twice"),
        ([part([row(OTHER, "x")])], "row a/9 of teacher x: not asked for, or twice"),
        ([part([dataclasses.replace(X_ROWS[0], teacher="y")])], "row a/0 of teacher y: not asked for"),
        ([part([row(B0, "x", weight=0.7)])], "row b/0 of teacher x: another weight or head"),
        ([part([row(A0, "x", head="hy")])], "another weight or head"),
        ([part([row(A0, "x", domain="b")])], "not the rollout that was sent"),
        ([part([row(A0, "x", response_ids=[5, 7])])], "not the rollout that was sent"),
        ([part([row(A0, "x", behaviour_logprobs=[-0.1, -0.8])])], "not the rollout that was sent"),
        ([part([row(A0, "x", loss_mask=[False, True])])], "not the rollout that was sent"),
        ([part([row(A0, "x", policy_version=2)])], "not the rollout that was sent"),
        ([part([row(A0, "x", group="b/0")])], "not the rollout that was sent"),
        ([part([row(A0, "x", reward=1.0)])], "not the rollout that was sent"),
        ([part([], number=1)], "part 1 of worker 0 came after 0 of its parts"),
        ([WORKER_0[0], WORKER_0[0]], "twice"),
        ([WORKER_0[1]], "part 1 of worker 0 came after 0"),
        ([part([], teachers={}), part([], number=1)], "part 1 of worker 0 came after 1 of its parts"),
        ([WORKER_0[0], *WORKER_1], "worker 0 ends after 1 parts without its end record"),
        ([WORKER_0[0], part(X_ROWS[2:], number=1, teachers={"x": 3})], r"worker 0 counts \{'x': 3\} rows, \{'x': 4\}"),
        ([WORKER_0[0], part(X_ROWS[2:], number=1, teachers={"y": 4})], "worker 0 counts"),
        ([part([], broken={"c/0": "nan"})], "c/0 is said to be broken, but was not sent"),
        ([np.frombuffer(write_stream([], "bfloat16"), np.uint8)], "hidden_states in bfloat16 came, wanted hidden_states in fl"),
        ([WORKER_0[0][:-300]], "target stream: .*(cut|whole)"),
        ([], "6 rows are missing, first a/0"),
    ],
)  # fmt: skip
def test_what_is_not_right_is_refused(parts: list[Any], words: str, in_process: Any) -> None:
    with pytest.raises(StreamError, match=f"^teachers at HOST: .*{words}"):
        targets(parts).wait_for_parts()


def test_a_teacher_without_rows_may_be_counted(in_process: Any) -> None:
    stream = targets([WORKER_0[0], part(X_ROWS[2:], number=1, teachers={"x": 4, "z": 0}), *WORKER_1])
    stream.wait_for_parts()
    assert stream.arrived


def test_any_order_of_workers_gives_the_same(in_process: Any) -> None:
    singles = [part([r], number=i) for i, r in enumerate(X_ROWS)] + [part([], number=4, teachers={"x": 4})]
    others = [part([r], worker=1, number=i) for i, r in enumerate(Y_ROWS)] + [
        part([], worker=1, number=2, teachers={"y": 2})
    ]
    for seed in range(20):
        order = [0] * len(singles) + [1] * len(others)
        random.Random(seed).shuffle(order)
        queues = iter(singles), iter(others)
        stream = targets([next(queues[worker]) for worker in order])
        stream.wait_for_parts()
        assert (stream.arrived, stream.num_parts, stream.rows) == (True, 8, 6)
