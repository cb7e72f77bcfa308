"""The Arrow schema of a scored row, its writer and its checking reader. Needs pyarrow only.

A row is a rollout (`opd.stream.rollouts`), the teacher's name and weight, and its answer (`opd/payloads/`).

A scoring worker sends its rows of a step in parts, each as soon as it is scored; every part is a stream of its own:
schema (version, payload, dtype) → one batch of rows, whose metadata says which part this is and, if it is the worker's
last, how many rows each teacher gave. Arrow ends a stream that was cut before its batch without an error, so the reader
insists on that batch. No extension types: nothing in a stream is ever unpickled.

Every byte beside the payload counts, since rows are many and some are short: a payload has only its own columns, what
many rows share is a dictionary entry, and the small batches of a scorer travel as one.
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
"""A part is sent after the scorer's batch with which it reaches so many rows or bytes of payload: soon, but large enough that
the 2 kB of its schema and record are little beside it."""


SHARED = "shared"
"""The dictionary column: what is equal in many rows is in its entries, and a row has the number of one."""
TEACHER: Columns = (("teacher", pa.string()), ("weight", pa.float32()))
"""Fields of an entry under every payload, after those that rollouts share."""


def make_stream_columns(answers: type[Answer]) -> pa.Schema:
    """Return all columns of a stream with such answers."""

    def required(columns: Columns) -> list[pa.Field]:
        return [pa.field(name, type_, nullable=False) for name, type_ in columns]

    entry = pa.struct([*rollouts.SHARED, *required((*TEACHER, *answers.GROUP))])
    # int16 will do: a dictionary has at most one entry for each row of its part.
    shared = pa.field(SHARED, pa.dictionary(pa.int16(), entry), nullable=False)
    return pa.schema([rollouts.SAMPLE_ID, shared, *rollouts.OWN, *required(answers.ROW)])


class StreamError(RunError):
    """A target stream that is cut short, of another version, or whose lengths do not agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """Everything about one trained sequence: the rollout, and one teacher's answer.

    Example: TargetRow(rollout=rollout, teacher="reverse-expert", answer=SampledLogprobs([-0.25, -1.5]))
    """

    rollout: Rollout
    teacher: str
    """Name of the expert that scored the row."""
    weight: float = 1.0
    """Share of this teacher among those of the row's domain; a sample has one row for each, and they add up to 1. Where the
    trainer asks the start student (`opd.train.start`), its row is not among those that come."""
    answer: Answer
    """The teacher's answer about the trained tokens; its class is the payload's."""

    def with_weight(self, weight: float) -> TargetRow:
        """Return the row with another weight."""
        return self if weight == self.weight else replace(self, weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """The record that a worker sends with the rows of each part."""

    worker: int = 0
    """Number of the scoring worker in the step."""
    number: int = 0
    """Place among that worker's parts of the step, from 0: the reader insists on their order. The same rows make the same
    parts, so after a restart those that had come can be left out."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Sample id -> why its teacher's scores cannot be used; those since the part before."""
    teachers: Mapping[str, int] | None = None
    """The end of the step, in the worker's last part only: teacher -> rows that the worker sent."""


_PART_RECORD = TypeAdapter(PartRecord)


def make_stream_schema(dtype: str, payload: str) -> pa.Schema:
    """Return the schema with this stream's metadata; `dtype` is the type of the hidden states."""
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


def write_parts(
    batches: Iterable[Sequence[TargetRow]],
    dtype: str,
    payload: str,
    *,
    worker: int,
    broken: dict[str, str],
    teachers: Iterable[str],
) -> Iterator[pa.Buffer]:
    """Yield a worker's step as parts, each as soon as its last batch was scored; the last one, which may hold no row, ends it.

    The scorer fills `broken`, and each part empties it. `teachers` are those whose rows are counted.
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


def _encode_rows(rows: Sequence[TargetRow], schema: pa.Schema) -> pa.RecordBatch:
    values = [_row_values(row) for row in rows]
    columns = [
        _encode_shared(values, f.type) if f.name == SHARED else pa.array([v[f.name] for v in values], f.type)
        for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _encode_shared(values: Sequence[Mapping[str, Any]], kind: pa.DictionaryType) -> pa.DictionaryArray:
    """Encode the fields that these rows share as a dictionary, which has the entries of these rows alone."""
    names = [f.name for f in kind.value_type]
    entries = [tuple(row[name] for name in names) for row in values]
    numbers = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
    dictionary = pa.array([dict(zip(names, entry, strict=True)) for entry in numbers], kind.value_type)
    return pa.DictionaryArray.from_arrays(pa.array([numbers[e] for e in entries], kind.index_type), dictionary)


def _row_values(row: TargetRow) -> dict[str, Any]:
    """Return the row's value in each column, and in each field of the dictionary column."""
    own = {name: getattr(row.answer, name) for name, _ in (*row.answer.GROUP, *row.answer.ROW)}
    return rollouts.list_rollout_values(row.rollout) | {"teacher": row.teacher, "weight": row.weight} | own


@dataclass(frozen=True, slots=True)
class Stream:
    """A part that was read to its end."""

    dtype: str
    payload: str
    rows: tuple[TargetRow, ...]
    part: PartRecord = PartRecord()


def read_stream(source: pa.Buffer | bytes | memoryview, vocab_size: int | None = None) -> Stream:
    """Decode and check one part; hidden states stay views into `source`.

    `vocab_size` bounds the ids that a teacher may name; None where the tokenizer is not known.
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
            rows = tuple(_decode_rows(batch, answers))
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
    """Decode the record. Raises: StreamError for a text that `write_stream` cannot have written."""
    try:
        return _PART_RECORD.validate_json(text, strict=True)
    except ValidationError as error:
        raise StreamError(
            f"target stream: its record of the part is broken: {error.errors()[0]['msg']}: {text[:200]}"
        ) from None


def _check_ids(batch: pa.RecordBatch, answered: Sequence[str], vocab_size: int | None) -> None:
    """Refuse an id out of range, which would be read past the end of a row of log-probs. Raises: StreamError."""
    for name in (*rollouts.TOKEN_IDS, *answered):
        bounds = pc.min_max(batch.column(name).flatten()).as_py()
        # A column without a value has None for both.
        beyond = name in answered and vocab_size is not None and (bounds["max"] or 0) >= vocab_size
        if beyond or (bounds["min"] or 0) < 0:
            raise StreamError(
                f"target stream: {name} from {bounds['min']} to {bounds['max']}, wanted 0 to {(vocab_size or 1 << 31) - 1}"
            )


def _decode_rows(batch: pa.RecordBatch, answers: type[Answer]) -> Iterator[TargetRow]:
    """Yield the batch's rows. Raises: RolloutError for a rollout that contradicts itself."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    shared = columns.pop(SHARED)
    entries, numbers = shared.dictionary.to_pylist(), shared.indices.to_pylist()
    lists = {
        name: _binary_views(c) if pa.types.is_large_binary(c.type) else c.to_pylist() for name, c in columns.items()
    }
    answered = [name for name, _ in (*answers.GROUP, *answers.ROW)]
    for i, number in enumerate(numbers):
        values = entries[number] | {name: column[i] for name, column in lists.items()}
        yield TargetRow(
            rollout=rollouts.build_rollout(values),
            teacher=values["teacher"],
            weight=values["weight"],
            answer=answers(**{name: values[name] for name in answered}),
        )


def _binary_views(binary: pa.LargeBinaryArray) -> list[memoryview]:
    """Return the values without a copy, out of the buffers: a scalar's `as_buffer` would copy."""
    _, raw_offsets, data = binary.buffers()
    # Offsets are int64. An array that is a slice of another one has the buffers of the whole.
    offsets = memoryview(raw_offsets)[8 * binary.offset : 8 * (binary.offset + len(binary) + 1)].cast("q")
    values = memoryview(data if data is not None else b"")
    return [values[start:stop] for start, stop in pairwise(offsets)]


def _check_answer(row: TargetRow, itemsize: int, payload: str, widths: set[int]) -> None:
    """Check a row's answer. `widths` collects the widths of the stream's answers, such as the K of a top-k: there may be one.

    Raises: StreamError if this cannot be the answer about the rollout's trained tokens.
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
