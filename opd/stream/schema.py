"""The Arrow schema of a scored row, its writer and its checking reader. Needs pyarrow only.

A stream is: schema (version, payload, dtype) → row batches → one empty batch whose metadata says how many rows and
batches came before it. Arrow ends a stream that was cut between two batches without an error, so the reader insists on
that end-of-step record. No extension types: nothing in a stream is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from opd.errors import RunError

VERSION = "1"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
PAYLOADS = ("hidden_states", "sampled_logprobs", "top_k")

FIELDS = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("teacher", pa.string(), nullable=False),
        pa.field("weight", pa.float32(), nullable=False),
        pa.field("policy_version", pa.int32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("behaviour_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("head", pa.string(), nullable=False),
        pa.field("hidden_size", pa.int32(), nullable=False),
        pa.field("hidden", pa.large_binary(), nullable=False),
        pa.field("teacher_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("topk_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("topk_logprobs", pa.list_(pa.float32()), nullable=False),
    ]
)


class StreamError(RunError):
    """A target stream that is cut short, of another version, or whose lengths do not agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """Everything about one trained sequence. R response tokens, D the teacher's hidden width.

    Example: TargetRow(sample_id="000012/reverse/17", teacher="reverse-expert", head="9f3c...", hidden_size=128, ...)
    """

    sample_id: str
    step: int
    domain: str
    teacher: str
    """Name of the expert that scored the row."""
    weight: float = 1.0
    """Share of this teacher among those of the row's domain; a sample has one row for each, and they add up to 1."""
    policy_version: int
    """Version of the student that wrote the response."""
    prompt_ids: Sequence[int]
    """[P]"""
    response_ids: Sequence[int]
    """[R]"""
    loss_mask: Sequence[bool]
    """[R] True where the token is trained."""
    behaviour_logprobs: Sequence[float]
    """[R] what the rollout engine said, nats."""
    head: str
    """BLAKE3 of the teacher's output head; the matrix itself travels once, apart from the rows."""
    hidden_size: int
    """D"""
    hidden: memoryview | bytes = b""
    """[R, D] little-endian, in the stream's dtype: the teacher's last hidden state after the final norm, at the
    position that predicts response token r (one before it). Empty under other payloads."""
    teacher_logprobs: Sequence[float] = ()
    """[R] teacher's log-prob of each response token; payload `sampled_logprobs`."""
    topk_ids: Sequence[int] = ()
    """[R, K] the teacher's likeliest tokens, row after row; payload `top_k`."""
    topk_logprobs: Sequence[float] = ()
    """[R, K] their log-probs under the whole distribution."""

    def weighted(self, weight: float) -> TargetRow:
        """The same row with another weight."""
        return self if weight == self.weight else replace(self, weight=weight)


def stream_schema(dtype: str, payload: str) -> pa.Schema:
    """The schema with this stream's metadata; `dtype` is that of the hidden states."""
    assert dtype in DTYPE_BYTES, dtype
    assert payload in PAYLOADS, payload
    return FIELDS.with_metadata(
        {"opd.version": VERSION, "opd.payload": payload, "opd.norm": "after", "opd.dtype": dtype}
    )


def write_stream(batches: Iterable[Sequence[TargetRow]], dtype: str, payload: str = "hidden_states") -> pa.Buffer:
    """Encode batches of rows, and the end-of-step record, as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    schema = stream_schema(dtype, payload)
    num_rows = num_batches = 0
    with pa.ipc.new_stream(sink, schema) as writer:
        for rows in batches:
            columns = [pa.array([getattr(row, f.name) for row in rows], f.type) for f in FIELDS]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            num_rows += len(rows)
            num_batches += 1
        empty = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in FIELDS], schema=schema)
        writer.write_batch(
            empty, custom_metadata={"opd.end": "1", "opd.rows": str(num_rows), "opd.batches": str(num_batches)}
        )
    return sink.getvalue()


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream that was read to its end-of-step record."""

    dtype: str
    payload: str
    rows: tuple[TargetRow, ...]


def read_stream(source: pa.Buffer | bytes | memoryview) -> Stream:
    """Decode and check one stream; hidden states stay views into `source`.

    Raises: StreamError if the version differs, the stream was cut, or a row's lengths disagree.
    """
    try:
        with pa.ipc.open_stream(source) as reader:
            dtype, payload = _check_schema(reader.schema)
            rows = tuple(_read_rows(reader, DTYPE_BYTES[dtype], payload))
    except (pa.ArrowException, ValueError, OSError) as error:  # ValueError: text that is not UTF-8
        raise StreamError(f"target stream: not a whole Arrow stream: {error}") from None
    return Stream(dtype, payload, rows)


def _check_schema(schema: pa.Schema) -> tuple[str, str]:
    metadata = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
    version = metadata.get("opd.version")
    if version != VERSION:
        raise StreamError(
            f"target stream: version {version}, wanted {VERSION}: teachers and trainer run different releases"
        )
    if not schema.equals(FIELDS):
        raise StreamError(f"target stream: columns {schema.names}, wanted {FIELDS.names}")
    dtype = metadata.get("opd.dtype", "")
    if dtype not in DTYPE_BYTES:
        raise StreamError(f"target stream: dtype {dtype!r}, wanted one of {', '.join(DTYPE_BYTES)}")
    payload = metadata.get("opd.payload", "")
    if payload not in PAYLOADS:
        raise StreamError(f"target stream: payload {payload!r}, wanted one of {', '.join(PAYLOADS)}")
    return dtype, payload


def _read_rows(reader: pa.RecordBatchStreamReader, itemsize: int, payload: str) -> Iterator[TargetRow]:
    num_rows = num_batches = 0
    widths: set[int] = set()
    end: dict[str, str] | None = None
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            break
        if metadata is not None and b"opd.end" in metadata:
            end = {k.decode(): v.decode() for k, v in metadata.items()}
            break
        batch.validate(full=True)
        for row in _rows_of(batch):
            _check_lengths(row, itemsize, payload, widths)
            yield row
        num_rows += batch.num_rows
        num_batches += 1
    if end is None:
        raise StreamError(f"target stream: ends after {num_rows} rows without its end-of-step record: it was cut")
    promised = (end.get("opd.rows"), end.get("opd.batches"))
    if promised != (str(num_rows), str(num_batches)):
        raise StreamError(
            f"target stream: {num_rows} rows in {num_batches} batches, its end-of-step record says {promised[0]} in {promised[1]}"
        )


def _rows_of(batch: pa.RecordBatch) -> Iterator[TargetRow]:
    hidden = batch.column("hidden")
    # Through the buffers: a scalar's `as_buffer` copies.
    _, raw_offsets, data = hidden.buffers()
    offsets = memoryview(raw_offsets)[8 * hidden.offset : 8 * (hidden.offset + len(hidden) + 1)].cast("q")
    payload = memoryview(data if data is not None else b"")
    light = {name: batch.column(name).to_pylist() for name in FIELDS.names if name != "hidden"}
    for i in range(batch.num_rows):
        yield TargetRow(
            hidden=payload[offsets[i] : offsets[i + 1]], **{name: values[i] for name, values in light.items()}
        )


def _check_lengths(row: TargetRow, itemsize: int, payload: str, widths: set[int]) -> None:
    """`widths` collects the K of top-k rows: a stream has one."""
    num = len(row.response_ids)
    width = {
        "hidden_states": len(row.hidden),
        "sampled_logprobs": len(row.teacher_logprobs),
        "top_k": len(row.topk_ids),
    }
    fits = {
        "hidden_states": width["hidden_states"] == num * row.hidden_size * itemsize,
        "sampled_logprobs": width["sampled_logprobs"] == num,
        "top_k": len(row.topk_ids) == len(row.topk_logprobs) and (num == 0) == (len(row.topk_ids) == 0),
    }
    if payload == "top_k" and num and fits["top_k"]:
        widths.add(len(row.topk_ids) // num)
        fits["top_k"] = len(row.topk_ids) % num == 0 and len(widths) == 1
    if not (num == len(row.loss_mask) == len(row.behaviour_logprobs) and fits[payload]):
        raise StreamError(
            f"target stream: row {row.sample_id}: {num} response tokens, {len(row.loss_mask)} mask values, "
            f"{len(row.behaviour_logprobs)} log-probs, payload {payload} of {width[payload]} "
            f"(hidden width {row.hidden_size})"
        )
