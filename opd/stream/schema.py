"""The Arrow schema of a scored row, its writer and its checking reader. Needs pyarrow only.

What a payload adds is said in its file in `opd/payloads/`; here is what all rows have.

A scoring worker sends its rows of a step in parts, each as soon as it is scored; every part is a stream of its own:
schema (version, payload, dtype) → one batch of rows, whose metadata says which part this is and, if it is the worker's
last, how many rows each teacher gave. Arrow ends a stream that was cut before its batch without an error, so the reader
insists on that batch. No extension types: nothing in a stream is ever unpickled.

Every byte beside the payload counts, since rows are many and some are short: a payload has only its own columns, what
is equal in all rows of a group is a dictionary entry, and the small batches of a scorer travel as one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter, ValidationError

from opd.config.strict import DTYPE_BYTES
from opd.errors import RunError
from opd.payloads import PAYLOADS, answer_class
from opd.payloads.answer import Answer, Columns

VERSION = "4"
PART_ROWS = 256
PART_BYTES = 4 << 20
"""A part leaves with the scorer's batch that brings it to so many rows or bytes of payload: soon, and yet the 2 kB that
each part has of its own are little beside it."""


OWN_GROUP: Columns = (("domain", pa.string()), ("teacher", pa.string()), ("weight", pa.float32()))
"""What is equal in all rows of a group, under every payload."""
OWN: Columns = (
    ("step", pa.int32()),
    ("policy_version", pa.int32()),
    ("prompt_ids", pa.list_(pa.int32())),
    ("response_ids", pa.list_(pa.int32())),
    ("loss_mask", pa.list_(pa.bool_())),
    ("behaviour_logprobs", pa.list_(pa.float32())),
)
"""What each row has under every payload, after its sample and its group."""
OWN_NAMES = {"sample_id", *(name for name, _ in OWN_GROUP + OWN)}


def columns_of(answers: type[Answer]) -> pa.Schema:
    """All columns of a stream with such answers."""

    def required(columns: Columns) -> list[pa.Field]:
        return [pa.field(name, type_, nullable=False) for name, type_ in columns]

    group = pa.dictionary(pa.int16(), pa.struct(required((*OWN_GROUP, *answers.GROUP))))
    return pa.schema(required((("sample_id", pa.string()), ("group", group), *OWN, *answers.ROW)))


class StreamError(RunError):
    """A target stream that is cut short, of another version, or whose lengths do not agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """Everything about one trained sequence. R response tokens.

    Example: TargetRow(sample_id="000012/reverse/17", teacher="reverse-expert", ..., answer=SampledLogprobs([-0.25, -1.5]))
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
    answer: Answer
    """What the teacher says of the response; its class is the payload's."""

    def weighted(self, weight: float) -> TargetRow:
        """The same row with another weight."""
        return self if weight == self.weight else replace(self, weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """What a worker says with each part about the step, beside the part's rows."""

    worker: int = 0
    """Which of the step's scoring workers."""
    number: int = 0
    """Place among that worker's parts of the step, from 0: the reader insists on their order. The same rows make the same
    parts, so after a restart those that had come can be left out."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Sample id -> why its teacher's scores cannot be used; those since the part before."""
    teachers: Mapping[str, int] | None = None
    """The end of the step, in the worker's last part only: teacher -> rows that the worker sent."""


_PART_RECORD = TypeAdapter(PartRecord)


def stream_schema(dtype: str, payload: str) -> pa.Schema:
    """The schema with this stream's metadata; `dtype` is that of the hidden states."""
    assert dtype in DTYPE_BYTES, dtype
    return columns_of(answer_class(payload)).with_metadata(
        {"opd.version": VERSION, "opd.payload": payload, "opd.norm": "after", "opd.dtype": dtype}
    )


def write_stream(
    rows: Sequence[TargetRow],
    dtype: str,
    payload: str = "hidden_states",
    part: PartRecord = PartRecord(),
) -> pa.Buffer:
    """Encode one part as one Arrow IPC stream."""
    assert all(type(row.answer) is answer_class(payload) for row in rows), payload
    sink = pa.BufferOutputStream()
    schema = stream_schema(dtype, payload)
    record = json.dumps(asdict(part), separators=(",", ":"))
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(_encode(rows, schema), custom_metadata={"opd.part": record})
    return sink.getvalue()


def write_parts(
    batches: Iterable[Sequence[TargetRow]],
    dtype: str,
    payload: str,
    *,
    worker: int,
    broken: dict[str, str],
    teachers: Iterable[str],
) -> Iterator[pa.Buffer]:
    """A worker's step as parts, each as soon as its last batch was scored; the last one, which may hold no row, ends it.

    `broken` is what the scorer fills, and is emptied into each part; `teachers` are those whose rows are counted.
    """
    counts = dict.fromkeys(teachers, 0)
    rows: list[TargetRow] = []
    number = 0
    for batch in batches:
        rows += batch
        for row in batch:
            counts[row.teacher] += 1
        if len(rows) >= PART_ROWS or sum(row.answer.nbytes for row in rows) >= PART_BYTES:
            yield write_stream(rows, dtype, payload, PartRecord(worker=worker, number=number, broken=broken))
            broken.clear()
            rows, number = [], number + 1
    end = PartRecord(worker=worker, number=number, broken=broken, teachers=counts)
    yield write_stream(rows, dtype, payload, end)


def _encode(rows: Sequence[TargetRow], schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        _encode_groups(rows, f.type) if f.name == "group" else pa.array([_value(r, f.name) for r in rows], f.type)
        for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _encode_groups(rows: Sequence[TargetRow], kind: pa.DictionaryType) -> pa.DictionaryArray:
    """A dictionary of these rows' groups alone."""
    names = [f.name for f in kind.value_type]
    groups = [tuple(_value(row, name) for name in names) for row in rows]
    numbers = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    values = pa.array([dict(zip(names, group, strict=True)) for group in numbers], kind.value_type)
    return pa.DictionaryArray.from_arrays(pa.array([numbers[g] for g in groups], kind.index_type), values)


def _value(row: TargetRow, name: str) -> Any:
    """What a row says in a column."""
    return getattr(row if name in OWN_NAMES else row.answer, name)


@dataclass(frozen=True, slots=True)
class Stream:
    """A part that was read to its end."""

    dtype: str
    payload: str
    rows: tuple[TargetRow, ...]
    part: PartRecord = PartRecord()


def read_stream(source: pa.Buffer | bytes | memoryview, vocab_size: int | None = None) -> Stream:
    """Decode and check one part; hidden states stay views into `source`.

    `vocab_size`: ids that a teacher may name, where the stream comes from another cluster.
    Raises: StreamError if the version differs, the stream was cut, a row's lengths disagree, or an id is out of range.
    """
    try:
        with pa.ipc.open_stream(source) as reader:
            dtype, payload = _check_schema(reader.schema)
            answers = answer_class(payload)
            batch, part = _read_batch(reader)
            _check_batch(batch)
            _check_ids(batch, answers.TOKEN_IDS, vocab_size)
            rows = tuple(_rows_of(batch, answers))
    except (pa.ArrowException, ValueError, OSError) as error:  # ValueError: text that is not UTF-8
        raise StreamError(f"target stream: not a whole Arrow stream: {error}") from None
    widths: set[int] = set()
    for row in rows:
        _check_lengths(row, DTYPE_BYTES[dtype], payload, widths)
    return Stream(dtype, payload, rows, part)


def _check_schema(schema: pa.Schema) -> tuple[str, str]:
    metadata = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
    version = metadata.get("opd.version")
    if version != VERSION:
        raise StreamError(
            f"target stream: version {version}, wanted {VERSION}: teachers and trainer run different releases"
        )
    dtype = metadata.get("opd.dtype", "")
    if dtype not in DTYPE_BYTES:
        raise StreamError(f"target stream: dtype {dtype!r}, wanted one of {', '.join(DTYPE_BYTES)}")
    payload = metadata.get("opd.payload", "")
    if payload not in PAYLOADS:
        raise StreamError(f"target stream: payload {payload!r}, wanted one of {', '.join(PAYLOADS)}")
    wanted = columns_of(answer_class(payload))
    if not schema.equals(wanted):
        raise StreamError(f"target stream: columns {schema.names} of {payload}, wanted {wanted.names}")
    return dtype, payload


def _read_batch(reader: pa.RecordBatchStreamReader) -> tuple[pa.RecordBatch, PartRecord]:
    try:
        batch, metadata = reader.read_next_batch_with_custom_metadata()
    except StopIteration:
        raise StreamError("target stream: ends before its rows: it was cut") from None
    record = (metadata or {}).get(b"opd.part")
    if record is None:
        raise StreamError("target stream: it does not say which part of a step it is")
    return batch, _part_record(record.decode())


def _part_record(text: str) -> PartRecord:
    """Raises: StreamError for anything but what `write_stream` writes."""
    try:
        return _PART_RECORD.validate_json(text, strict=True)
    except ValidationError as error:
        raise StreamError(
            f"target stream: its record of the part is broken: {error.errors()[0]['msg']}: {text[:200]}"
        ) from None


def _check_batch(batch: pa.RecordBatch) -> None:
    """Offsets, group numbers and UTF-8, all the way down; a missing value is the one thing Arrow lets pass."""
    batch.validate(full=True)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if any(part.null_count for part in _parts(column)):
            raise StreamError(f"target stream: column {name} has missing values")


def _check_ids(batch: pa.RecordBatch, answered: Sequence[str], vocab_size: int | None) -> None:
    """An id out of range would be read past the end of a row of log-probs. Raises: StreamError."""
    for name in ("prompt_ids", "response_ids", *answered):
        found = pc.min_max(batch.column(name).flatten()).as_py()
        beyond = name in answered and vocab_size is not None and (found["max"] or 0) >= vocab_size
        if beyond or (found["min"] or 0) < 0:
            raise StreamError(
                f"target stream: {name} from {found['min']} to {found['max']}, wanted 0 to {(vocab_size or 1 << 31) - 1}"
            )


def _parts(array: pa.Array) -> Iterator[pa.Array]:
    """The array and all that it is made of."""
    yield array
    if isinstance(array, pa.DictionaryArray):
        yield from _parts(array.dictionary)
    elif isinstance(array, pa.ListArray):
        yield from _parts(array.values)
    elif isinstance(array, pa.StructArray):
        for i in range(array.type.num_fields):
            yield from _parts(array.field(i))


def _rows_of(batch: pa.RecordBatch, answers: type[Answer]) -> Iterator[TargetRow]:
    columns = {name: batch.column(name) for name in batch.schema.names}
    group = columns.pop("group")
    groups, numbers = group.dictionary.to_pylist(), group.indices.to_pylist()
    own = {name: columns.pop(name) for name, _ in answers.ROW}
    said = {name: _views(c) if pa.types.is_large_binary(c.type) else c.to_pylist() for name, c in own.items()}
    light = {name: column.to_pylist() for name, column in columns.items()}
    for i, number in enumerate(numbers):
        shared = dict(groups[number])
        answer = {name: shared.pop(name) for name, _ in answers.GROUP} | {name: said[name][i] for name in own}
        yield TargetRow(answer=answers(**answer), **shared, **{name: values[i] for name, values in light.items()})


def _views(binary: pa.LargeBinaryArray) -> list[memoryview]:
    """Through the buffers: a scalar's `as_buffer` copies."""
    _, raw_offsets, data = binary.buffers()
    offsets = memoryview(raw_offsets)[8 * binary.offset : 8 * (binary.offset + len(binary) + 1)].cast("q")
    values = memoryview(data if data is not None else b"")
    return [values[start:stop] for start, stop in pairwise(offsets)]


def _check_lengths(row: TargetRow, itemsize: int, payload: str, widths: set[int]) -> None:
    """`widths` collects what the answers of a stream have in common, such as the K of a top-k: there is one."""
    num = len(row.response_ids)
    fits = row.answer.fits(num, itemsize)
    width = row.answer.width(num) if fits else None
    if width is not None:
        widths.add(width)
    if not (num == len(row.loss_mask) == len(row.behaviour_logprobs) and fits and len(widths) <= 1):
        raise StreamError(
            f"target stream: row {row.sample_id}: {num} response tokens, {len(row.loss_mask)} mask values, "
            f"{len(row.behaviour_logprobs)} log-probs, payload {payload} of {row.answer.size}"
        )
