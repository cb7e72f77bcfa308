"""Rollouts come back from Arrow as they were; what does not make sense is refused by name."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from opd.records.types import Rollout, Span
from opd.stream import rollouts as codec
from opd.stream.rollouts import (
    ORIGINS,
    SCHEMA,
    RolloutError,
    check_schema,
    decode_rollouts,
    encode_rollouts,
    read_file,
    write_file,
)
from tests.rows import spans_of

SPANS = (
    Span(length=1, origin="policy", policy_version=3),
    Span(length=2, origin="environment", policy_version=3),
    Span(length=1, origin="masked", policy_version=4),
)


def rollout(i: int = 0, **changes: Any) -> Rollout:
    rng = random.Random(i)
    made = Rollout(
        sample_id=f"000001/d/{i}", group="000001/d/0", episode=f"000001/d/{i}" if i % 3 else f"episode {i}", step=1,
        domain="d", prompt_ids=tuple(rng.choices(range(76), k=3)), response_ids=(5, 6, 7, 75),
        behaviour_logprobs=(-0.5, -1.25, -3.0, -0.0), spans=SPANS, stop_reason="length" if i % 2 else "stop",
        reward=None if i % 4 else 0.1 * i,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


EMPTY = rollout(9, response_ids=(), behaviour_logprobs=(), spans=(Span(length=0, origin="policy", policy_version=2),))


def test_rollouts_come_back_as_they_were() -> None:
    given = [*(rollout(i) for i in range(9)), EMPTY]
    assert decode_rollouts([encode_rollouts(given)], 76) == given
    assert decode_rollouts([encode_rollouts(given[:4]), encode_rollouts(given[4:])], 76) == given
    assert read_file(write_file(given), 76) == given
    assert decode_rollouts([], 76) == [] and read_file(write_file([]), 76) == []


def test_every_field_of_a_rollout_has_a_column() -> None:
    fields = {f.name for f in dataclasses.fields(Rollout)}
    assert set(SCHEMA.names) == {*fields, "policy_version"}
    changes: dict[str, Any] = {
        "sample_id": "x", "group": "g", "episode": "e", "step": 7, "domain": "o", "prompt_ids": (8,),
        "response_ids": (1, 2, 3, 4), "behaviour_logprobs": (-1.0,) * 4, "spans": spans_of((True,) * 4, 6),
        "stop_reason": "length", "reward": -1.5, "origin": "summary", "parent": "000001/d/3", "next": "000001/d/0+2",
    }  # fmt: skip
    assert set(changes) == fields
    for name, value in changes.items():
        beside = {"parent": "000001/d/3"} if name == "origin" else {}
        (found,) = decode_rollouts([encode_rollouts([rollout(0, **{name: value}, **beside)])], 76)
        assert getattr(found, name) == value != getattr(rollout(0), name)


def test_what_is_usual_costs_nothing() -> None:
    alone = rollout(1, group="000001/d/1", spans=spans_of((True,) * 4, 7))
    assert alone.episode == alone.sample_id
    row = encode_rollouts([alone]).to_pylist()[0]
    missing = ("group", "episode", "reward", "spans", "origin", "parent", "next")
    assert [row[name] for name in (*missing, "policy_version")] == [None] * 7 + [7]
    for other in (spans_of((False,) * 4, 7), spans_of((True, True, True, False), 7)):
        assert encode_rollouts([rollout(1, spans=other)]).to_pylist()[0]["spans"] is not None


def test_what_a_span_says() -> None:
    one = rollout(0)
    assert one.loss_mask == (True, False, False, False)
    assert (one.num_trained, one.trained_positions, one.trained_ids) == (1, (0,), (5,))
    assert (one.policy_version, one.truncated, rollout(1).truncated) == (4, False, True)
    assert (EMPTY.num_trained, EMPTY.trained_positions, EMPTY.policy_version) == (0, (), 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"response_ids": (5, 6, 7, 76)}, "token id 76, the tokenizer knows 0 to 75"),
        ({"prompt_ids": (-1,)}, "token id -1, the tokenizer knows 0 to 75"),
        ({"prompt_ids": ()}, "empty prompt"),
        ({"response_ids": (1, 2, 3)}, "3 response tokens, 4 log-probs, spans of .* disagree"),
        ({"behaviour_logprobs": (-1.0,)}, "disagree"),
        ({"spans": SPANS[:2]}, "disagree"),
        (
            {"spans": (dataclasses.replace(SPANS[0], length=5), dataclasses.replace(SPANS[1], length=-1))},
            "they disagree",
        ),
        ({"spans": spans_of((True,) * 4, -1)}, "policy version -1"),
        ({"stop_reason": "abort"}, "stop reason 'abort', wanted one of"),
        ({"reward": float("nan")}, "reward nan"),
        ({"reward": float("-inf")}, "reward -inf"),
        ({"origin": "copy", "parent": "000001/d/0"}, "segment origin 'copy', wanted one of"),
        ({"origin": "summary"}, "a segment of origin summary without a parent"),
        ({"origin": "sub_agent"}, "a segment of origin sub_agent without a parent"),
        ({"parent": "000001/d/1"}, "its own parent"),
        ({"next": "000001/d/1"}, "its own next one"),
    ],
)
def test_a_rollout_that_contradicts_itself_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RolloutError, match=f"rollout 000001/d/1: .*{words}"):
        decode_rollouts([encode_rollouts([rollout(0), rollout(1, **changes)])], 76)


def replaced(column: str, values: list[Any]) -> pa.RecordBatch:
    """Two rollouts with other values in a column."""
    batch = encode_rollouts([rollout(1), rollout(2)])
    columns = [pa.array(values, f.type) if f.name == column else batch.column(f.name) for f in SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


@pytest.mark.parametrize("origin", [-1, len(ORIGINS)])
def test_an_origin_that_does_not_exist_is_refused(origin: int) -> None:
    with pytest.raises(RolloutError, match=f"rollout 000001/d/2: a span of origin {origin}$"):
        decode_rollouts([replaced("spans", [[(4, 0, 4)], [(4, origin, 4)]])], 76)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("sample_id", ["a", None]),
        ("domain", [None, "d"]),
        ("response_ids", [[1, 2, 3, 4], None]),
        ("response_ids", [[1, 2, 3, 4], [1, None, 3, 4]]),
        ("spans", [[(4, 0, 3)], [(4, 0, None)]]),
        ("policy_version", [4, None]),
    ],
)
def test_a_missing_value_is_refused(column: str, values: list[Any]) -> None:
    with pytest.raises(RolloutError, match=f"column {column} has missing values"):
        decode_rollouts([replaced(column, values)], 76)


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("spans", [[(4, 1, 4)], []], "spans of ..: they disagree"),
        ("spans", [[(4, 1, 4)], [(4, 1, 3)]], "policy version 4, spans of .3."),
        ("policy_version", [4, 5], "policy version 5, spans of .3, 3, 4."),
    ],
)
def test_spans_that_contradict_the_other_columns_are_refused(column: str, values: list[Any], words: str) -> None:
    with pytest.raises(RolloutError, match=f"rollout 000001/d/2: .*{words}"):
        decode_rollouts([replaced(column, values)], 76)


def test_a_sample_that_comes_twice_is_refused() -> None:
    with pytest.raises(RolloutError, match="twice"):
        decode_rollouts([encode_rollouts([rollout(0)]), encode_rollouts([rollout(0)])], 76)


def test_other_columns_and_another_version_of_them() -> None:
    check_schema(SCHEMA)
    with pytest.raises(RolloutError, match=f"rollouts of version 1, wanted {codec.VERSION}"):
        check_schema(SCHEMA.with_metadata({"opd.rollouts": "1"}))
    with pytest.raises(RolloutError, match="rollouts of version none"):
        check_schema(SCHEMA.remove_metadata())
    with pytest.raises(RolloutError, match="columns"):
        check_schema(SCHEMA.remove(3))


def test_a_file_cut_at_any_byte_is_refused() -> None:
    whole = write_file([rollout(1), rollout(2)]).to_pybytes()
    end_marker = 8  # Arrow's own
    for cut in range(len(whole) - end_marker):
        with pytest.raises(RolloutError):
            read_file(whole[:cut], 76)


def test_damaged_bytes_are_refused_or_harmless_to_the_reader() -> None:
    whole, rng = write_file([rollout(i) for i in range(4)]).to_pybytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] = rng.integers(256)
        try:
            assert len(read_file(damaged, 76)) == 4
        except RolloutError:
            refused += 1
    assert 100 < refused < 990
