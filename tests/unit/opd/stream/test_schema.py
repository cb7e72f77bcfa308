"""A target stream is read whole and as written, or refused."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pyarrow as pa
import pytest
import torch

from opd.errors import RunError
from opd.stream.schema import FIELDS, Stream, StreamError, TargetRow, read_stream, stream_schema, write_stream

D = 3


def row(
    i: int = 0, *, prompt: int = 2, response: int = 3, width: int = D, itemsize: int = 4, **changes: Any
) -> TargetRow:
    values = {
        "sample_id": f"000012/reverse/{i}",
        "step": 12,
        "domain": "reverse",
        "teacher": "reverse-expert",
        "policy_version": 11,
        "prompt_ids": list(range(i, i + prompt)),
        "response_ids": [100 + i + k for k in range(response)],
        "loss_mask": [k % 2 == 0 for k in range(response)],
        "behaviour_logprobs": [-0.5 * k for k in range(response)],
        "head": "ab" * 32,
        "hidden_size": width,
        "hidden": bytes((i + k) % 256 for k in range(response * width * itemsize)),
        "teacher_logprobs": [],
        "topk_ids": [],
        "topk_logprobs": [],
    }
    return TargetRow(**values | changes)


BATCHES = [[row(0), row(1, response=1)], [row(2, prompt=5, response=4, width=5)]]


def plain(stream: Stream) -> list[dict[str, Any]]:
    return [dataclasses.asdict(dataclasses.replace(r, hidden=bytes(r.hidden))) for r in stream.rows]


def test_rows_come_back_as_they_were_written() -> None:
    stream = read_stream(write_stream(BATCHES, "float32"))
    assert (stream.dtype, stream.payload) == ("float32", "hidden_states")
    assert plain(stream) == [dataclasses.asdict(r) for batch in BATCHES for r in batch]


@pytest.mark.parametrize("kind", [bytes, memoryview, lambda b: pa.py_buffer(b.to_pybytes())])
def test_a_stream_is_read_from_any_kind_of_bytes(kind: Any) -> None:
    assert len(read_stream(kind(write_stream(BATCHES, "float32"))).rows) == 3


@pytest.mark.parametrize("batches", [[], [[]], [[], [], []]])
def test_a_step_without_rows_is_a_whole_stream(batches: Any) -> None:
    assert read_stream(write_stream(batches, "bfloat16")) == Stream("bfloat16", "hidden_states", ())


def test_hidden_states_are_read_without_a_copy_and_bit_by_bit() -> None:
    states = torch.tensor([[1.0, -0.0, float("inf")], [1e-38, 3.14159, -65504.0]], dtype=torch.bfloat16)
    written = write_stream(
        [[row(0, response=2, itemsize=2, hidden=states.view(torch.uint8).numpy().tobytes())]], "bfloat16"
    )
    (read,) = read_stream(written).rows
    assert torch.equal(torch.frombuffer(bytearray(read.hidden), dtype=torch.int16), states.view(torch.int16).flatten())
    view = pa.py_buffer(read.hidden)
    assert written.address <= view.address < written.address + written.size


def test_log_probs_lose_no_float32_digit() -> None:
    value = float(torch.tensor(-0.123456789))
    (read,) = read_stream(write_stream([[row(0, response=1, behaviour_logprobs=[value])]], "float32")).rows
    assert read.behaviour_logprobs == [value]


# Other payloads


def answered(payload: str, i: int = 0, *, response: int = 3, **changes: Any) -> TargetRow:
    """A row with that payload and no hidden states."""
    ids = [(7 * i + k) % 76 for k in range(2 * response)]
    answers: dict[str, dict[str, Any]] = {
        "sampled_logprobs": {"teacher_logprobs": [-0.125 * (i + k) for k in range(response)]},
        "top_k": {"topk_ids": ids, "topk_logprobs": [-0.5 - k for k in range(2 * response)]},
    }
    return row(i, response=response, **{"hidden": b"", "hidden_size": 0} | answers[payload] | changes)


LIGHT = ["sampled_logprobs", "top_k"]


@pytest.mark.parametrize("payload", LIGHT)
def test_other_payloads_come_back_as_they_were_written(payload: str) -> None:
    batches = [[answered(payload, 0), answered(payload, 1, response=1)], [answered(payload, 2, response=4)]]
    stream = read_stream(write_stream(batches, "bfloat16", payload))
    assert (stream.dtype, stream.payload) == ("bfloat16", payload)
    assert plain(stream) == [dataclasses.asdict(r) for batch in batches for r in batch]


@pytest.mark.parametrize(
    ("payload", "changes"),
    [
        ("sampled_logprobs", {"teacher_logprobs": []}),
        ("sampled_logprobs", {"teacher_logprobs": [0.0] * 2}),
        ("sampled_logprobs", {"teacher_logprobs": [0.0] * 6}),
        ("sampled_logprobs", {"loss_mask": [True]}),
        ("top_k", {"topk_ids": [], "topk_logprobs": []}),
        ("top_k", {"topk_ids": [1] * 5}),
        ("top_k", {"topk_ids": [1] * 5, "topk_logprobs": [0.0] * 5}),
        ("top_k", {"topk_logprobs": [0.0] * 3}),
        ("top_k", {"behaviour_logprobs": [0.0] * 4}),
    ],
)
def test_a_row_whose_payload_does_not_fit_is_refused_by_name(payload: str, changes: dict[str, Any]) -> None:
    with pytest.raises(StreamError, match=f"row 000012/reverse/7: .* payload {payload} "):
        read_stream(write_stream([[answered(payload), answered(payload, 7, **changes)]], "float32", payload))


@pytest.mark.parametrize("payload", LIGHT)
def test_a_stream_that_says_another_payload_is_refused(payload: str) -> None:
    with pytest.raises(StreamError, match=f"payload {payload} of 0 "):
        read_stream(write_stream(BATCHES, "float32", payload))


def test_top_k_of_two_widths_is_refused() -> None:
    wide = answered("top_k", 7, topk_ids=[1] * 9, topk_logprobs=[0.0] * 9)
    with pytest.raises(StreamError, match=r"row 000012/reverse/7"):
        read_stream(write_stream([[answered("top_k"), wide]], "float32", "top_k"))


# Streams that were cut


def test_a_stream_cut_at_any_byte_is_refused() -> None:
    whole = write_stream(BATCHES, "float32").to_pybytes()
    end_marker = 8  # Arrow's own; all rows and the end-of-step record lie before it
    for cut in range(len(whole) - end_marker):
        with pytest.raises(StreamError):
            read_stream(whole[:cut])
    want = plain(read_stream(whole))
    for cut in range(len(whole) - end_marker, len(whole)):
        assert plain(read_stream(whole[:cut])) == want


def rebuilt(batches: list[tuple[pa.RecordBatch, dict[str, str] | None]], schema: pa.Schema | None = None) -> pa.Buffer:
    """A well-formed Arrow stream of these batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema or stream_schema("float32", "hidden_states")) as writer:
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    return sink.getvalue()


def parts() -> list[tuple[pa.RecordBatch, dict[str, str] | None]]:
    """The batches of a stream of BATCHES: two with rows, then the end-of-step record."""
    with pa.ipc.open_stream(write_stream(BATCHES, "float32")) as reader:
        found = []
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return found
            found.append((batch, {k.decode(): v.decode() for k, v in metadata.items()} if metadata else None))


def test_the_parts_make_the_whole() -> None:
    assert len(parts()) == 3
    assert len(read_stream(rebuilt(parts())).rows) == 3


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_stream_that_ends_between_two_batches_is_refused(kept: int) -> None:
    rows = sum(batch.num_rows for batch, _ in parts()[:kept])
    with pytest.raises(StreamError, match=f"ends after {rows} rows without its end-of-step record"):
        read_stream(rebuilt(parts()[:kept]))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_batch_is_noticed(lost: int) -> None:
    left = [part for i, part in enumerate(parts()) if i != lost]
    with pytest.raises(StreamError, match="end-of-step record says 3 in 2"):
        read_stream(rebuilt(left))


def test_a_batch_that_came_twice_is_noticed() -> None:
    first, second, end = parts()
    with pytest.raises(StreamError, match="5 rows in 3 batches"):
        read_stream(rebuilt([first, first, second, end]))


@pytest.mark.parametrize(
    "end",
    [
        {"opd.end": "1", "opd.rows": "4", "opd.batches": "2"},
        {"opd.end": "1", "opd.rows": "3", "opd.batches": "1"},
        {"opd.end": "1", "opd.rows": "3"},
        {"opd.end": "1", "opd.rows": "three", "opd.batches": "2"},
    ],
)
def test_an_end_record_that_counts_otherwise_is_refused(end: dict[str, str]) -> None:
    first, second, (empty, _) = parts()
    with pytest.raises(StreamError):
        read_stream(rebuilt([first, second, (empty, end)]))


def test_rows_inside_the_end_record_are_not_dropped() -> None:
    first, (batch, _), (_, end) = parts()
    with pytest.raises(StreamError):
        read_stream(rebuilt([first, (batch, end)]))


# Streams of another kind


def with_schema(schema: pa.Schema) -> pa.Buffer:
    columns = [pa.array([], f.type) for f in schema]
    return rebuilt([(pa.RecordBatch.from_arrays(columns, schema=schema), None)], schema)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"opd.version": "2", "opd.dtype": "float32"}, "version 2, wanted 1"),
        (None, "version None"),
        ({"opd.version": "1", "opd.dtype": "float8"}, "dtype 'float8'"),
        ({"opd.version": "1"}, "dtype ''"),
        ({"opd.version": "1", "opd.dtype": "float32"}, "payload ''"),
        (
            {"opd.version": "1", "opd.dtype": "float32", "opd.payload": "logits"},
            "payload 'logits', wanted one of hidden",
        ),
    ],
)
def test_another_version_or_dtype_is_refused(metadata: dict[str, str] | None, word: str) -> None:
    with pytest.raises(StreamError, match=word):
        read_stream(with_schema(FIELDS.with_metadata(metadata)))


@pytest.mark.parametrize("change", ["missing", "extra", "renamed", "retyped", "reordered", "nullable"])
def test_other_columns_are_refused(change: str) -> None:
    fields = list(FIELDS)
    if change == "missing":
        fields.pop()
    elif change == "extra":
        fields.append(pa.field("note", pa.string()))
    elif change == "renamed":
        fields[0] = fields[0].with_name("id")
    elif change == "retyped":
        fields[1] = pa.field("step", pa.int64(), nullable=False)
    elif change == "reordered":
        fields[0], fields[1] = fields[1], fields[0]
    else:
        fields[0] = fields[0].with_nullable(True)
    with pytest.raises(StreamError, match="columns"):
        read_stream(with_schema(pa.schema(fields, stream_schema("float32", "hidden_states").metadata)))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": [True]},
        {"behaviour_logprobs": [0.0] * 4},
        {"hidden": b"\0" * (3 * D * 4 - 1)},
        {"hidden": b""},
        {"hidden_size": D + 1},
        {"response_ids": [1, 2]},
    ],
)
def test_a_row_whose_lengths_differ_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(StreamError, match="row 000012/reverse/7: "):
        read_stream(write_stream([[row(0), row(7, **changes)]], "float32"))


def test_hidden_states_of_the_other_dtype_are_refused() -> None:
    with pytest.raises(StreamError, match=r"payload hidden_states of 18 \(hidden width 3\)"):
        read_stream(write_stream([[row(0, itemsize=2)]], "float32"))


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 64, b"\xff" * 64, b"PK\x03\x04", b"ARROW1\0\0", random.Random(0).randbytes(4096)]
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(StreamError):
        read_stream(data)


def test_a_flipped_bit_is_refused_or_harmless_to_the_reader() -> None:
    whole, rng = write_stream(BATCHES, "float32").to_pybytes(), random.Random(1)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        try:
            assert len(read_stream(damaged).rows) == 3
        except StreamError:
            refused += 1
    assert refused > 500


def test_a_stream_error_ends_a_run() -> None:
    assert issubclass(StreamError, RunError)


# Size


def test_bytes_on_the_wire_per_token() -> None:
    width, tokens = 576, [64 + 7 * i % 64 for i in range(100)]
    rows = [row(i, prompt=20, response=n, width=width, itemsize=2) for i, n in enumerate(tokens)]
    size = write_stream([rows[i : i + 10] for i in range(0, 100, 10)], "bfloat16").size
    assert size / sum(tokens) <= 2 * width + 16
