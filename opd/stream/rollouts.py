"""The one Arrow form of a rollout: its columns, and how they are written, read and checked. Needs pyarrow only.

Three places use it. Arrow Flight carries rollouts to teachers, the target log keeps those of a step in a file, and every
row of the target stream (`opd.stream.schema`) begins with these columns. No extension types and no pickle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import pyarrow as pa

from opd.errors import RunError
from opd.types import Origin, Rollout, Span, StopReason, unknown_id

VERSION = "2"
"""1 had no group, episode, reward or policy version for each span."""
ORIGINS: tuple[Origin, ...] = get_args(Origin)
"""A span's origin travels as its place in this tuple."""

_SPAN = pa.struct(
    [
        pa.field("length", pa.int32(), nullable=False),
        pa.field("origin", pa.int8(), nullable=False),
        pa.field("policy_version", pa.int32(), nullable=False),
    ]
)
SAMPLE_ID = pa.field("sample_id", pa.string(), nullable=False)
SHARED: tuple[pa.Field, ...] = (
    pa.field("step", pa.int32(), nullable=False),
    pa.field("domain", pa.string(), nullable=False),
    pa.field("stop_reason", pa.string(), nullable=False),
)
"""Columns with few different values in a step: the target stream sends each combination once."""
OWN: tuple[pa.Field, ...] = (
    pa.field("group", pa.string()),
    pa.field("episode", pa.string()),
    pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("behaviour_logprobs", pa.list_(pa.float32()), nullable=False),
    pa.field("spans", pa.list_(pa.field("item", _SPAN, nullable=False)), nullable=False),
    pa.field("reward", pa.float64()),
)
"""Columns with a value of its own in each rollout. `group` and `episode` are missing where they equal the sample id,
`reward` where there is none; nothing else may be missing."""
TOKEN_IDS = ("prompt_ids", "response_ids")
SCHEMA = pa.schema([SAMPLE_ID, *SHARED, *OWN], {"opd.rollouts": VERSION})


class RolloutError(RunError):
    """Rollouts that another release wrote, that were damaged, or that contradict themselves."""


def values_of(rollout: Rollout) -> dict[str, Any]:
    """Column -> value."""
    values = {name: getattr(rollout, name) for name in SCHEMA.names}
    for name in ("group", "episode"):
        if values[name] == rollout.sample_id:
            values[name] = None
    values["spans"] = [(s.length, ORIGINS.index(s.origin), s.policy_version) for s in rollout.spans]
    return values


def rollout_of(values: Mapping[str, Any]) -> Rollout:
    """Inverse of `values_of`, for values out of Arrow's `to_pylist`. Raises: RolloutError if they contradict each other."""
    sample_id = values["sample_id"]
    where = f"rollout {sample_id}"
    num = len(values["response_ids"])
    spans = tuple(_span(where, **span) for span in values["spans"])
    if not spans or not num == len(values["behaviour_logprobs"]) == sum(s.length for s in spans):
        raise RolloutError(
            f"{where}: {num} response tokens, {len(values['behaviour_logprobs'])} log-probs, "
            f"spans of {[s.length for s in spans]}: the lengths disagree"
        )
    if not values["prompt_ids"]:
        raise RolloutError(f"{where}: an empty prompt, nothing predicts its first token")
    if values["stop_reason"] not in get_args(StopReason):
        raise RolloutError(f"{where}: stop reason {values['stop_reason']!r}, wanted one of {get_args(StopReason)}")
    if values["reward"] is not None and not math.isfinite(values["reward"]):
        raise RolloutError(f"{where}: reward {values['reward']}, wanted a finite number or none")
    return Rollout(
        sample_id=sample_id,
        group=sample_id if values["group"] is None else values["group"],
        episode=sample_id if values["episode"] is None else values["episode"],
        step=values["step"],
        domain=values["domain"],
        prompt_ids=tuple(values["prompt_ids"]),
        response_ids=tuple(values["response_ids"]),
        behaviour_logprobs=tuple(values["behaviour_logprobs"]),
        spans=spans,
        stop_reason=values["stop_reason"],
        reward=values["reward"],
    )


def _span(where: str, *, length: int, origin: int, policy_version: int) -> Span:
    if not 0 <= origin < len(ORIGINS) or length < 0 or policy_version < 0:
        raise RolloutError(f"{where}: a span of {length} tokens, origin {origin} and policy version {policy_version}")
    return Span(length=length, origin=ORIGINS[origin], policy_version=policy_version)


def encode(rollouts: Sequence[Rollout]) -> pa.RecordBatch:
    """The rollouts as Arrow, in order."""
    values = [values_of(rollout) for rollout in rollouts]
    return pa.RecordBatch.from_arrays([pa.array([v[f.name] for v in values], f.type) for f in SCHEMA], schema=SCHEMA)


def check_schema(schema: pa.Schema) -> None:
    """Raises: RolloutError if the writer has other columns or another version of them."""
    version = (schema.metadata or {}).get(b"opd.rollouts", b"none").decode(errors="replace")
    if version != VERSION:
        raise RolloutError(f"rollouts of version {version}, wanted {VERSION}: install the same release on both")
    if not schema.equals(SCHEMA):
        raise RolloutError(f"rollouts with columns {schema.names}, wanted {SCHEMA.names}")


def decode(batches: Iterable[pa.RecordBatch], vocab_size: int) -> list[Rollout]:
    """Inverse of `encode`, for batches whose schema was checked.

    Raises: RolloutError for damaged columns, a rollout that contradicts itself, an id that no token of the vocabulary has,
    and a sample id that comes twice.
    """
    rollouts: list[Rollout] = []
    for batch in batches:
        try:
            missing = incomplete_column(batch)
        except pa.ArrowInvalid as error:
            raise RolloutError(f"rollouts: {error}") from None
        if missing:
            raise RolloutError(f"rollouts: column {missing} has missing values")
        rollouts += [rollout_of(values) for values in batch.to_pylist()]
    for rollout in rollouts:
        wrong = unknown_id((*rollout.prompt_ids, *rollout.response_ids), vocab_size)
        if wrong is not None:
            raise RolloutError(
                f"rollout {rollout.sample_id}: token id {wrong}, the tokenizer knows 0 to {vocab_size - 1}"
            )
    if len({r.sample_id for r in rollouts}) != len(rollouts):
        raise RolloutError("rollouts: a sample id comes twice")
    return rollouts


def write_file(rollouts: Sequence[Rollout]) -> pa.Buffer:
    """The bytes of a file that holds these rollouts."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(encode(rollouts))
    return sink.getvalue()


def read_file(source: pa.Buffer | bytes | memoryview, vocab_size: int) -> list[Rollout]:
    """Inverse of `write_file`. Raises: RolloutError, also for bytes that are no whole Arrow stream."""
    try:
        with pa.ipc.open_stream(source) as reader:
            check_schema(reader.schema)
            batches = list(reader)
    except (pa.ArrowException, OSError) as error:
        raise RolloutError(f"rollouts: not a whole Arrow stream: {error}") from None
    if len(batches) != 1:
        raise RolloutError(f"rollouts: {len(batches)} batches, wanted 1: the file was cut")
    return decode(batches, vocab_size)


def incomplete_column(batch: pa.RecordBatch) -> str | None:
    """The first column with a missing value where its type allows none, which Arrow itself lets pass.

    Raises: pa.ArrowInvalid for offsets, dictionary numbers or UTF-8 that are wrong, all the way down.
    """
    batch.validate(full=True)
    may_miss = {field.name for field in OWN if field.nullable}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name not in may_miss and any(part.null_count for part in _parts(column)):
            return name
    return None


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
