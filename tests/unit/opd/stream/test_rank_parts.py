"""A part cut by ranks: nothing lost, nothing twice, each rank its own bytes only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from opd.stream.rank_parts import split_part, split_stream
from opd.stream.schema import PartRecord, TargetRow, read_stream, write_stream
from opd.stream.targets import StreamPart
from tests.rows import make_row

RECORD = PartRecord(worker=1, number=2, broken={"x": "not finite"}, teachers={"t": 5, "s": 1})


def row(number: int, teacher: str = "t", tokens: int = 3, width: int = 4) -> TargetRow:
    rng = np.random.default_rng(number)
    return make_row(
        sample_id=f"{number}", step=3, domain=f"d{number % 2}", teacher=teacher, weight=0.5, policy_version=2,
        prompt_ids=[number] * (number + 1), response_ids=list(range(tokens)), loss_mask=[True] * tokens,
        behaviour_logprobs=[-float(number)] * tokens, head=f"h{teacher}", hidden_size=width,
        hidden=rng.standard_normal((tokens, width), np.float32).tobytes(),
    )  # fmt: skip


def encoded(rows: list[TargetRow]) -> np.ndarray:
    return np.frombuffer(write_stream(rows, "float32", part=RECORD), np.uint8)


def plain(rows: Any) -> list[Any]:
    return [replace(r, answer=replace(r.answer, hidden=bytes(r.answer.hidden))) for r in rows]


def test_every_row_goes_to_its_rank_as_it_was() -> None:
    rows = [row(i) for i in range(5)] + [row(2, "s")]
    cut = split_stream(encoded(rows), lambda i: int(i) % 3)
    assert set(cut) == {0, 1, 2}
    for rank, raw in cut.items():
        found = read_stream(pa.py_buffer(raw))
        assert plain(found.rows) == plain(
            read_stream(pa.py_buffer(encoded([r for r in rows if int(r.rollout.sample_id) % 3 == rank]))).rows
        )
        assert (found.part, found.dtype, found.payload) == (RECORD, "float32", "hidden_states")


def test_a_rank_receives_about_its_share_of_the_bytes() -> None:
    whole = encoded([row(i, tokens=64, width=256) for i in range(64)])
    cut = split_stream(whole, lambda i: int(i) % 8)
    sizes = [raw.nbytes for raw in cut.values()]
    assert len(sizes) == 8
    assert max(sizes) < 1.1 * whole.nbytes / 8


def test_a_part_of_one_rank_is_not_copied(in_process: Any) -> None:
    raw = encoded([row(0), row(1)])
    part = StreamPart(handle=raw, nbytes=raw.nbytes, samples=("0", "1"))
    assert split_part(part, lambda i: 4)[4] is raw
    assert set(split_part(part, int)) == {0, 1}
    assert split_part(StreamPart(handle=raw, nbytes=1, samples=()), int) == {}


@pytest.mark.parametrize("rank_of", [lambda i: 0, int])
def test_what_was_cut_is_checked_like_any_stream(rank_of: Any) -> None:
    cut = split_stream(encoded([row(0), row(1)]), rank_of).values()
    assert sum(len(read_stream(pa.py_buffer(raw), vocab_size=9).rows) for raw in cut) == 2
