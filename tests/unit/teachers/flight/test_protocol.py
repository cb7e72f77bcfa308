"""Rollouts survive the way; what does not make sense is refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from opd.types import Rollout, Segment
from teachers.flight import protocol
from teachers.flight.protocol import (
    ROLLOUTS,
    Hello,
    ProtocolError,
    Reply,
    ScoreRequest,
    check_rollouts_schema,
    parse,
    read_rollouts,
    rollout_batches,
    slices,
)


def rollout(i: int = 0, **changes: Any) -> Rollout:
    rng = random.Random(i)
    made = Rollout(
        sample_id=f"000001/d/{i}", step=1, domain="d", policy_version=3,
        prompt_ids=tuple(rng.choices(range(76), k=3)), response_ids=(5, 6, 7, 75),
        behaviour_logprobs=(-0.5, -1.25, -3.0, -0.0), truncated=i % 2 == 1,
        segments=(Segment(length=1, trained=True), Segment(length=2, trained=False), Segment(length=1, trained=True)),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize("batch_tokens", [1, 20, 1 << 16])
def test_rollouts_come_back_as_they_were(batch_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "BATCH_TOKENS", batch_tokens)
    given = [rollout(i) for i in range(9)]
    given += [rollout(9, response_ids=(), behaviour_logprobs=(), segments=())]
    batches = list(rollout_batches(given))
    assert len(batches) == {1: 10, 20: 5, 1 << 16: 1}[batch_tokens]
    assert read_rollouts(batches, 76) == given
    assert list(rollout_batches([])) == [] and read_rollouts([], 76) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"response_ids": (5, 6, 7, 76)}, r"outside 0\.\.75"),
        ({"prompt_ids": (-1,)}, "outside"),
        ({"prompt_ids": ()}, "empty prompt"),
        ({"response_ids": (1, 2, 3)}, "disagree"),
        ({"behaviour_logprobs": (-1.0,)}, "disagree"),
        ({"segments": (Segment(length=3, trained=True),)}, "disagree"),
    ],
)
def test_rollouts_that_a_teacher_must_not_read(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=f"rollout 000001/d/1: .*{words}"):
        read_rollouts(rollout_batches([rollout(0), rollout(1, **changes)]), 76)


def test_a_sample_twice_and_a_missing_value() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        read_rollouts(rollout_batches([rollout(0), rollout(0)]), 76)
    (batch,) = rollout_batches([rollout(0)])
    columns = [pa.array([None], f.type) if f.name == "domain" else batch.column(f.name) for f in ROLLOUTS]
    with pytest.raises(ProtocolError, match="missing"):
        read_rollouts([pa.RecordBatch.from_arrays(columns, names=ROLLOUTS.names)], 76)


def test_other_columns_and_another_version_of_them() -> None:
    check_rollouts_schema(ROLLOUTS)
    with pytest.raises(ProtocolError, match="rollouts of version 2, wanted 1"):
        check_rollouts_schema(ROLLOUTS.with_metadata({"opd.rollouts": "2"}))
    with pytest.raises(ProtocolError, match="rollouts of version none"):
        check_rollouts_schema(ROLLOUTS.remove_metadata())
    with pytest.raises(ProtocolError, match="columns"):
        check_rollouts_schema(ROLLOUTS.remove(3))


def test_records() -> None:
    reply = Reply(sizes=(1, 2))
    assert parse(Reply, reply.model_dump_json().encode()) == reply
    other = json.dumps({"protocol": "3", "something": "new"}).encode()
    for model in (Hello, ScoreRequest, Reply):
        with pytest.raises(ProtocolError, match="speaks protocol '3', this side '2'"):
            parse(model, other)
    for raw in (
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{",
        b"{}",
        b'{"sizes": ["x"]}',
    ):
        with pytest.raises(ProtocolError, match="no Reply of protocol 2"):
            parse(Reply, raw)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 20])
def test_slices_are_the_bytes_in_order(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SLICE_BYTES", 8)
    raw = np.arange(length, dtype=np.uint8)
    pieces = list(slices(raw.data))
    assert len(pieces) == -(-length // 8)
    assert b"".join(p.column("bytes")[0].as_py() for p in pieces) == raw.tobytes()
