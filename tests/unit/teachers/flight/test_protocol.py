"""Rollouts leave in batches, records are checked on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from opd.stream.rollouts import decode_rollouts
from teachers.flight import protocol
from teachers.flight.protocol import (
    Hello,
    ProtocolError,
    ScoreReply,
    ScoreRequest,
    encode_batches,
    parse_record,
    split_slices,
)
from tests.rows import make_rollout


@pytest.mark.parametrize("batch_tokens", [1, 20, 1 << 16])
def test_rollouts_travel_in_batches_of_few_tokens(batch_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "BATCH_TOKENS", batch_tokens)
    given = [
        make_rollout(sample_id=f"{i}", step=1, domain="d", prompt_ids=(1, 2, 3), response_ids=(5, 6, 7, 75))
        for i in range(9)
    ]
    given.append(make_rollout(sample_id="9", step=1, domain="d", prompt_ids=(1, 2, 3), response_ids=()))
    batches = list(encode_batches(given))
    assert len(batches) == {1: 10, 20: 5, 1 << 16: 1}[batch_tokens]
    assert decode_rollouts(batches, 76) == given
    assert list(encode_batches([])) == [] and decode_rollouts([], 76) == []


def test_the_page_about_the_protocol_is_about_this_version() -> None:
    page = Path(__file__).parents[4] / "docs" / "flight.md"
    assert f"Version {protocol.PROTOCOL}. JSON and Arrow only" in page.read_text(encoding="utf-8")


def test_records() -> None:
    reply = ScoreReply(sizes=(1, 2))
    assert parse_record(ScoreReply, reply.model_dump_json().encode()) == reply
    other = json.dumps({"protocol": "4", "something": "new"}).encode()
    for model in (Hello, ScoreRequest, ScoreReply):
        with pytest.raises(ProtocolError, match="speaks protocol '4', this side '3'"):
            parse_record(model, other)
    for raw in (
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{",
        b"{}",
        b'{"sizes": ["x"]}',
    ):
        with pytest.raises(ProtocolError, match="no ScoreReply of protocol 3"):
            parse_record(ScoreReply, raw)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 20])
def test_slices_are_the_bytes_in_order(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SLICE_BYTES", 8)
    raw = np.arange(length, dtype=np.uint8)
    pieces = list(split_slices(raw.data))
    assert len(pieces) == -(-length // 8)
    assert b"".join(p.column("bytes")[0].as_py() for p in pieces) == raw.tobytes()
