"""The Arrow schema of a scored row, and functions that write rows, read them and check them. It needs only pyarrow.

A row is a rollout (`opd.stream.rollouts`), the teacher's name and weight, and its answer (`opd/payloads/`).

A scoring worker sends its rows of a step in parts, each as soon as it is scored. Every part is an Arrow stream of its own: a schema
with version, payload and dtype, then one batch of rows. The batch's metadata says which part this is and, in the worker's last part,
how many rows each teacher gave. If a stream was cut before its batch, Arrow reports no error, so the reader insists on the batch.
There are no extension types, so that nothing in a stream is ever unpickled.

Rows are many and some are short, so the bytes beside the payload are kept few: a stream has only the columns of its payload, values
that many rows share are an entry of a dictionary, and a scorer's small batches are sent as one part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter, ValidationError

from opd.config.payloads import PAYLOADS
from opd.errors import RunError
from opd.payloads import answer_class
from opd.payloads.answer import Answer, Columns
from opd.records.types import Rollout
from opd.settings.strict import DTYPE_BYTES
from opd.stream import rollouts

VERSION = "6"
PART_ROWS = 256
PART_BYTES = 4 << 20
"""A part is sent as soon as it has at least so many rows, or so many bytes of payload. So it is sent early, but large enough that the
2 kB of its schema and record do not matter."""


SHARED = "shared"
"""Name of the dictionary column. Its entries hold values that are equal in many rows; a row has the index of an entry."""
TEACHER: Columns = (("teacher", pa.string()), ("weight", pa.float32()))
"""Fields of an entry that every payload has, after the rollouts' own (`opd.stream.rollouts.SHARED`)."""


def make_stream_columns(answers: type[Answer]) -> pa.Schema:
    """Return the columns of a stream with answers of this class."""

    def required(columns: Columns) -> list[pa.Field]:
        return [pa.field(name, type_, nullable=False) for name, type_ in columns]

    entry = pa.struct([*rollouts.SHARED, *required((*TEACHER, *answers.GROUP))])
    # int16 will do: a dictionary has at most one entry for each row of its part.
    shared = pa.field(SHARED, pa.dictionary(pa.int16(), entry), nullable=False)
    return pa.schema([rollouts.SAMPLE_ID, shared, *rollouts.OWN, *required(answers.ROW)])


class StreamError(RunError):
    """A target stream was cut short, has another version, or contradicts itself or the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """A rollout with one teacher's answer about it.

    Example: TargetRow(rollout=rollout, teacher="reverse-expert", answer=SampledLogprobs([-0.25, -1.5]))
    """

    rollout: Rollout
    teacher: str
    """Name of the expert that scored the row."""
    weight: float = 1.0
    """Weight of this teacher in the row's domain. A sample has a row from each teacher of its domain, and their weights add up to
    1. Rows with which the trainer scores itself (`opd.train.base_scoring`) are not in the stream."""
    answer: Answer
    """The teacher's answer about the trained tokens; its class is the payload's."""

    def as_sampled(self) -> TargetRow:
        """Return the row about the rollout as the student wrote it, whatever prompt and tokens the teacher read."""
        rollout = self.rollout.as_sampled()
        return self if rollout is self.rollout else replace(self, rollout=rollout)

    def with_weight(self, weight: float) -> TargetRow:
        """Return the row with another weight."""
        return self if weight == self.weight else replace(self, weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """The record that a worker sends with the rows of each part."""

    worker: int = 0
    """Number of the scoring worker in the step."""
    number: int = 0
    """Number of the part among that worker's parts of the step, from 0; the reader insists on their order. Equal rows make equal
    parts, so that a worker that was restarted need not send again the parts that had come."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Sample id -> why its teacher's scores cannot be used; only samples since the worker's part before."""
    teachers: Mapping[str, int] | None = None
    """Teacher -> number of rows that the worker sent in the step. It is set in the worker's last part, and ends its step."""


_PART_RECORD = TypeAdapter(PartRecord)


def make_stream_schema(dtype: str, payload: str) -> pa.Schema:
    """Return the schema of a stream, with version, payload and dtype as metadata; `dtype` is the type of hidden states."""
    assert dtype in DTYPE_BYTES, dtype
    return make_stream_columns(answer_class(payload)).with_metadata(
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
    schema = make_stream_schema(dtype, payload)
    record = json.dumps(asdict(part), separators=(",", ":"))
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(_encode_rows(rows, schema), custom_metadata={"opd.part": record})
    return sink.getvalue()


def cut_parts(
    batches: Iterable[Sequence[TargetRow]], *, worker: int, broken: dict[str, str], teachers: Iterable[str]
) -> Iterator[tuple[list[TargetRow], PartRecord]]:
    """Yield rows and record of each part of a worker's step, as soon as it is full. The last part, which may have no row, ends the step.

    `batches`: rows as the scorer yields them. `broken`: the scorer puts samples in that it cannot score, and each part takes
    them out. `teachers`: names of all teachers of the step, whose rows the last part counts.
    """
    counts = dict.fromkeys(teachers, 0)
    rows: list[TargetRow] = []
    number = 0
    for batch in batches:
        rows += batch
        for row in batch:
            counts[row.teacher] += 1
        if len(rows) >= PART_ROWS or sum(row.answer.nbytes for row in rows) >= PART_BYTES:
            yield rows, PartRecord(worker=worker, number=number, broken=dict(broken))
            broken.clear()
            rows, number = [], number + 1
    yield rows, PartRecord(worker=worker, number=number, broken=dict(broken), teachers=counts)


def write_parts(
    batches: Iterable[Sequence[TargetRow]],
    dtype: str,
    payload: str,
    *,
    worker: int,
    broken: dict[str, str],
    teachers: Iterable[str],
) -> Iterator[pa.Buffer]:
    """Yield the parts of `cut_parts`, encoded."""
    for rows, record in cut_parts(batches, worker=worker, broken=broken, teachers=teachers):
        yield write_stream(rows, dtype, payload, record)


def _encode_rows(rows: Sequence[TargetRow], schema: pa.Schema) -> pa.RecordBatch:
    values = [_row_values(row) for row in rows]
    columns = [
        _encode_shared(values, f.type) if f.name == SHARED else pa.array([v[f.name] for v in values], f.type)
        for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _encode_shared(values: Sequence[Mapping[str, Any]], kind: pa.DictionaryType) -> pa.DictionaryArray:
    """Encode the fields of the dictionary column; the dictionary has only entries that these rows use."""
    names = [f.name for f in kind.value_type]
    entries = [tuple(row[name] for name in names) for row in values]
    numbers = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
    dictionary = pa.array([dict(zip(names, entry, strict=True)) for entry in numbers], kind.value_type)
    return pa.DictionaryArray.from_arrays(pa.array([numbers[e] for e in entries], kind.index_type), dictionary)


def _row_values(row: TargetRow) -> dict[str, Any]:
    """Return name -> value for each column and each field of the dictionary column."""
    answer = {name: getattr(row.answer, name) for name, _ in (*row.answer.GROUP, *row.answer.ROW)}
    return rollouts.list_rollout_values(row.rollout) | {"teacher": row.teacher, "weight": row.weight} | answer


@dataclass(frozen=True, slots=True)
class Stream:
    """A part that was read to its end."""

    dtype: str
    payload: str
    rows: tuple[TargetRow, ...]
    part: PartRecord = PartRecord()


def read_stream(
    source: pa.Buffer | bytes | memoryview,
    vocab_size: int | None = None,
    wanted: Callable[[str], bool] = lambda sample_id: True,
) -> Stream:
    """Decode and check one part. Hidden states stay views into `source`.

    `vocab_size`: ids that a teacher names have to be below it; None if the tokenizer is not known. `wanted` says of a sample id
    whether its rows are decoded.
    Raises: StreamError if the version differs, the stream was cut, a row's lengths disagree, or an id is out of range.
    """
    try:
        with pa.ipc.open_stream(source) as reader:
            dtype, payload = _check_schema(reader.schema)
            answers = answer_class(payload)
            batch, part = _read_batch(reader)
            missing = rollouts.find_incomplete_column(batch)
            if missing:
                raise StreamError(f"target stream: column {missing} has missing values")
            _check_ids(batch, answers.TOKEN_IDS, vocab_size)
            rows = tuple(_decode_rows(batch, answers, wanted))
    except rollouts.RolloutError as error:
        raise StreamError(f"target stream: {error}") from None
    except (pa.ArrowException, ValueError, OSError) as error:  # ValueError: text that is not UTF-8
        raise StreamError(f"target stream: not a whole Arrow stream: {error}") from None
    widths: set[int] = set()
    for row in rows:
        _check_answer(row, DTYPE_BYTES[dtype], payload, widths)
    return Stream(dtype, payload, rows, part)


def read_part_record(source: pa.Buffer | bytes | memoryview) -> PartRecord:
    """Read the record of a part without its rows. Raises: StreamError as `read_stream`."""
    try:
        with pa.ipc.open_stream(source) as reader:
            _check_schema(reader.schema)
            return _read_batch(reader)[1]
    except (pa.ArrowException, ValueError, OSError) as error:
        raise StreamError(f"target stream: not a whole Arrow stream: {error}") from None


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
    expected = make_stream_columns(answer_class(payload))
    if not schema.equals(expected):
        raise StreamError(f"target stream: columns {schema.names} of {payload}, wanted {expected.names}")
    return dtype, payload


def _read_batch(reader: pa.RecordBatchStreamReader) -> tuple[pa.RecordBatch, PartRecord]:
    try:
        batch, metadata = reader.read_next_batch_with_custom_metadata()
    except StopIteration:
        raise StreamError("target stream: ends before its rows: it was cut") from None
    record = (metadata or {}).get(b"opd.part")
    if record is None:
        raise StreamError("target stream: it does not say which part of a step it is")
    return batch, _decode_part_record(record.decode())


def _decode_part_record(text: str) -> PartRecord:
    """Decode the JSON of a part's record. Raises: StreamError for a text that `write_stream` cannot have written."""
    try:
        return _PART_RECORD.validate_json(text, strict=True)
    except ValidationError as error:
        raise StreamError(
            f"target stream: its record of the part is broken: {error.errors()[0]['msg']}: {text[:200]}"
        ) from None


def _check_ids(batch: pa.RecordBatch, answered: Sequence[str], vocab_size: int | None) -> None:
    """Refuse token ids out of range: the loss would read past the end of a row of log-probs. Raises: StreamError.

    `answered`: columns of ids that a teacher named, the only ones for which the upper bound is checked here.
    """
    for name in (*rollouts.TOKEN_IDS, *answered):
        bounds = pc.min_max(batch.column(name).flatten()).as_py()
        # Both bounds are None for a column without values.
        beyond = name in answered and vocab_size is not None and (bounds["max"] or 0) >= vocab_size
        if beyond or (bounds["min"] or 0) < 0:
            raise StreamError(
                f"target stream: {name} from {bounds['min']} to {bounds['max']}, wanted 0 to {(vocab_size or 1 << 31) - 1}"
            )


def _decode_rows(batch: pa.RecordBatch, answers: type[Answer], wanted: Callable[[str], bool]) -> Iterator[TargetRow]:
    """Yield the batch's rows of the samples that are wanted. Raises: RolloutError for a rollout that contradicts itself."""
    numbers = [i for i, sample_id in enumerate(batch.column("sample_id").to_pylist()) if wanted(sample_id)]
    columns = {name: batch.column(name) for name in batch.schema.names}
    shared = columns.pop(SHARED)
    entries, entry_of = shared.dictionary.to_pylist(), shared.indices.to_pylist()
    lists = {name: _list_values(column, numbers) for name, column in columns.items()}
    answered = [name for name, _ in (*answers.GROUP, *answers.ROW)]
    for place, i in enumerate(numbers):
        values = entries[entry_of[i]] | {name: column[place] for name, column in lists.items()}
        yield TargetRow(
            rollout=rollouts.build_rollout(values),
            teacher=values["teacher"],
            weight=values["weight"],
            answer=answers(**{name: values[name] for name in answered}),
        )


def _list_values(column: pa.Array, numbers: Sequence[int]) -> list[Any]:
    """Return the values of some rows; those of hidden states are views into the column's buffers."""
    if pa.types.is_large_binary(column.type):
        views = _binary_views(column)
        return [views[i] for i in numbers]
    values: list[Any] = column.take(pa.array(numbers, pa.int64())).to_pylist()
    return values


def _binary_views(binary: pa.LargeBinaryArray) -> list[memoryview]:
    """Return the values as views into the array's buffers; `as_buffer` of a scalar would copy."""
    _, raw_offsets, data = binary.buffers()
    # Offsets are int64, 8 bytes each. A slice of an array has the buffers of the whole array, and begins at `binary.offset`.
    offsets = memoryview(raw_offsets)[8 * binary.offset : 8 * (binary.offset + len(binary) + 1)].cast("q")
    values = memoryview(data if data is not None else b"")
    return [values[start:stop] for start, stop in pairwise(offsets)]


def _check_answer(row: TargetRow, itemsize: int, payload: str, widths: set[int]) -> None:
    """Check that a row's answer can be about the rollout's trained tokens, and has the width of the stream's other answers.

    `widths` collects the widths of the stream's answers, such as the K of a top-k; there may be only one. `itemsize`: bytes of
    a number in the stream's dtype. Raises: StreamError.
    """
    num = row.rollout.num_trained
    fits = row.answer.fits(num, itemsize)
    width = row.answer.width(num) if fits else None
    if width is not None:
        widths.add(width)
    if not fits or len(widths) > 1:
        raise StreamError(
            f"target stream: row {row.rollout.sample_id}: {num} trained tokens, payload {payload} of {row.answer.size}"
        )
