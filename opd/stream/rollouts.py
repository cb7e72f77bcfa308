"""The Arrow form of a rollout: its columns, and functions to write, read and check them. It needs only pyarrow.

It is used in three places. Arrow Flight carries rollouts to teachers; the target log keeps those of a step in a file; and every row
of the target stream (`opd.stream.schema`) begins with these columns. There are no extension types and there is no pickle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pyarrow as pa
from blake3 import blake3

from opd.errors import RunError
from opd.records.token_ids import find_unknown_id
from opd.records.types import Origin, Rollout, SegmentOrigin, Span, StopReason

VERSION = "3"
"""Version of the columns. Version 1 had no group, episode, reward, and no policy version of a span; 2 had no origin, parent, next."""
ORIGINS: tuple[Origin, ...] = get_args(Origin)
"""A span's origin is sent as its index in this tuple."""

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
    pa.field("policy_version", pa.int32(), nullable=False),
    pa.field("stop_reason", pa.string(), nullable=False),
    pa.field("group", pa.string()),
    pa.field("episode", pa.string()),
    pa.field("reward", pa.float64()),
    pa.field("origin", pa.string()),
    pa.field("parent", pa.string()),
    pa.field("next", pa.string()),
)
"""Columns with equal values in many rollouts of a step: the target stream sends each combination of values once. `group` and `episode`
are null where they equal the sample id, `origin` where it is `main`; `reward`, `parent` and `next` where the rollout has None."""
OWN: tuple[pa.Field, ...] = (
    pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("behaviour_logprobs", pa.list_(pa.float32()), nullable=False),
    pa.field("spans", pa.list_(pa.field("item", _SPAN, nullable=False))),
)
"""Columns whose values differ from rollout to rollout. `spans` is null where the policy wrote the whole response with the weights of
`policy_version`."""
TOKEN_IDS = ("prompt_ids", "response_ids")
SCHEMA = pa.schema([SAMPLE_ID, *SHARED, *OWN], {"opd.rollouts": VERSION})


class RolloutError(RunError):
    """Rollouts were written by another release, are damaged, or contradict themselves."""


def list_rollout_values(rollout: Rollout) -> dict[str, Any]:
    """Return column -> the rollout's value, with None for what `SHARED` and `OWN` leave out."""
    values = {name: getattr(rollout, name) for name in SCHEMA.names}
    for name in ("group", "episode"):
        if values[name] == rollout.sample_id:
            values[name] = None
    if rollout.origin == "main":
        values["origin"] = None
    if rollout.spans == _usual_spans(len(rollout.response_ids), rollout.policy_version):
        values["spans"] = None
    else:
        values["spans"] = [(s.length, ORIGINS.index(s.origin), s.policy_version) for s in rollout.spans]
    return values


def build_rollout(values: Mapping[str, Any]) -> Rollout:
    """Make the rollout from its values, as `list_rollout_values` made them and Arrow's `to_pylist` returns them.

    Raises: RolloutError if they contradict each other.
    """
    sample_id = values["sample_id"]
    rollout = Rollout(
        sample_id=sample_id,
        group=sample_id if values["group"] is None else values["group"],
        episode=sample_id if values["episode"] is None else values["episode"],
        step=values["step"],
        domain=values["domain"],
        prompt_ids=tuple(values["prompt_ids"]),
        response_ids=tuple(values["response_ids"]),
        behaviour_logprobs=tuple(values["behaviour_logprobs"]),
        spans=_read_spans(values),
        stop_reason=values["stop_reason"],
        reward=values["reward"],
        origin="main" if values["origin"] is None else values["origin"],
        parent=values["parent"],
        next=values["next"],
    )
    wrong = _find_contradiction(rollout, values["policy_version"])
    if wrong:
        raise RolloutError(f"rollout {sample_id}: {wrong}")
    return rollout


def _usual_spans(num: int, policy_version: int) -> tuple[Span, ...]:
    """Return the spans of a response of `num` tokens that the policy wrote alone, with the weights of one version."""
    # A response without tokens has a span too, which has the policy version.
    return (Span(length=num, origin="policy", policy_version=policy_version),)


def _read_spans(values: Mapping[str, Any]) -> tuple[Span, ...]:
    """Return the spans of a row; `values` is as in `build_rollout`. Raises: RolloutError for an origin that does not exist."""
    if values["spans"] is None:
        return _usual_spans(len(values["response_ids"]), values["policy_version"])
    spans = []
    for span in values["spans"]:
        if not 0 <= span["origin"] < len(ORIGINS):
            raise RolloutError(f"rollout {values['sample_id']}: a span of origin {span['origin']}")
        spans.append(Span(**span | {"origin": ORIGINS[span["origin"]]}))
    return tuple(spans)


def _find_contradiction(rollout: Rollout, policy_version: int) -> str:
    """Describe a contradiction in a rollout; empty if there is none. `policy_version`: the value of the column of that name."""
    num, lengths = len(rollout.response_ids), [span.length for span in rollout.spans]
    if not lengths or min(lengths) < 0 or not num == len(rollout.behaviour_logprobs) == sum(lengths):
        return f"{num} response tokens, {len(rollout.behaviour_logprobs)} log-probs, spans of {lengths}: they disagree"
    if rollout.policy_version != policy_version or min(span.policy_version for span in rollout.spans) < 0:
        return f"policy version {policy_version}, spans of {[span.policy_version for span in rollout.spans]}"
    if not rollout.prompt_ids:
        return "an empty prompt, nothing predicts its first token"
    if rollout.stop_reason not in get_args(StopReason):
        return f"stop reason {rollout.stop_reason!r}, wanted one of {get_args(StopReason)}"
    if rollout.reward is not None and not math.isfinite(rollout.reward):
        return f"reward {rollout.reward}, wanted a finite number or none"
    return _find_segment_contradiction(rollout)


def _find_segment_contradiction(rollout: Rollout) -> str:
    """Describe a contradiction in a segment's place in its episode, empty if there is none."""
    if rollout.origin not in get_args(SegmentOrigin):
        return f"segment origin {rollout.origin!r}, wanted one of {get_args(SegmentOrigin)}"
    if rollout.origin != "main" and rollout.parent is None:
        return f"a segment of origin {rollout.origin} without a parent"
    if rollout.sample_id in (rollout.parent, rollout.next):
        return "a segment that is its own parent or its own next one"
    return ""


_NUMBERS = {"prompt_ids": np.int64, "response_ids": np.int64, "behaviour_logprobs": np.float32}
"""Fields with many numbers -> type in which `digest_rollout` compares them. Log-probs travel as float32."""
_OTHER_FIELDS = tuple(field.name for field in fields(Rollout) if field.name not in _NUMBERS)


def digest_rollout(rollout: Rollout) -> str:
    """Return a hash, 32 hexadecimal digits, that is equal for a rollout and for the same one after it was encoded and decoded."""
    digest = blake3(repr([getattr(rollout, name) for name in _OTHER_FIELDS]).encode())
    for name, kind in _NUMBERS.items():
        numbers = np.array(getattr(rollout, name), kind)
        digest.update(repr(len(numbers)).encode())
        digest.update(numbers.tobytes())
    return digest.hexdigest(length=16)


def encode_rollouts(rollouts: Sequence[Rollout]) -> pa.RecordBatch:
    """Convert the rollouts to Arrow, in order."""
    values = [list_rollout_values(rollout) for rollout in rollouts]
    return pa.RecordBatch.from_arrays([pa.array([v[f.name] for v in values], f.type) for f in SCHEMA], schema=SCHEMA)


def check_schema(schema: pa.Schema) -> None:
    """Check the schema of rollouts. Raises: RolloutError if the writer has other columns, or another version of them."""
    version = (schema.metadata or {}).get(b"opd.rollouts", b"none").decode(errors="replace")
    if version != VERSION:
        raise RolloutError(f"rollouts of version {version}, wanted {VERSION}: install the same release on both")
    if not schema.equals(SCHEMA):
        raise RolloutError(f"rollouts with columns {schema.names}, wanted {SCHEMA.names}")


def decode_rollouts(batches: Iterable[pa.RecordBatch], vocab_size: int) -> list[Rollout]:
    """Decode the batches of `encode_rollouts`, whose schema was checked.

    Raises: RolloutError for damaged columns, a rollout that contradicts itself, an id that no token of the vocabulary has,
    and a sample id that comes twice.
    """
    rollouts: list[Rollout] = []
    for batch in batches:
        try:
            missing = find_incomplete_column(batch)
        except pa.ArrowInvalid as error:
            raise RolloutError(f"rollouts: {error}") from None
        if missing:
            raise RolloutError(f"rollouts: column {missing} has missing values")
        rollouts += [build_rollout(values) for values in batch.to_pylist()]
    for rollout in rollouts:
        wrong = find_unknown_id((*rollout.prompt_ids, *rollout.response_ids), vocab_size)
        if wrong is not None:
            raise RolloutError(
                f"rollout {rollout.sample_id}: token id {wrong}, the tokenizer knows 0 to {vocab_size - 1}"
            )
    if len({r.sample_id for r in rollouts}) != len(rollouts):
        raise RolloutError("rollouts: a sample id comes twice")
    return rollouts


def write_file(rollouts: Sequence[Rollout]) -> pa.Buffer:
    """Return the bytes of a file that holds these rollouts."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(encode_rollouts(rollouts))
    return sink.getvalue()


def read_file(source: pa.Buffer | bytes | memoryview, vocab_size: int) -> list[Rollout]:
    """Decode the bytes of `write_file`. Raises: RolloutError, also for bytes that are no whole Arrow stream."""
    try:
        with pa.ipc.open_stream(source) as reader:
            check_schema(reader.schema)
            batches = list(reader)
    except (pa.ArrowException, ValueError, OSError) as error:  # ValueError: text that is not UTF-8
        raise RolloutError(f"rollouts: not a whole Arrow stream: {error}") from None
    if len(batches) != 1:
        raise RolloutError(f"rollouts: {len(batches)} batches, wanted 1: the file was cut")
    return decode_rollouts(batches, vocab_size)


def find_incomplete_column(batch: pa.RecordBatch) -> str | None:
    """Return the first column with a missing value where the schema allows none; None if there is no such column.

    Arrow itself does not check this. Raises: pa.ArrowInvalid for wrong offsets, dictionary indices or UTF-8, at any depth.
    """
    batch.validate(full=True)
    columns = zip(batch.schema, batch.columns, strict=True)
    return next((field.name for field, column in columns if _has_gap(column, field.nullable)), None)


def _has_gap(array: pa.Array, nullable: bool) -> bool:
    """Return True if the array or its children lack a value that may not be missing. Items of a list may never be missing."""
    if array.null_count and not nullable:
        return True
    if isinstance(array, pa.DictionaryArray):
        return _has_gap(array.dictionary, False)
    if isinstance(array, pa.ListArray):
        return _has_gap(array.values, False)
    if isinstance(array, pa.StructArray):
        return any(_has_gap(array.field(i), array.type.field(i).nullable) for i in range(array.type.num_fields))
    return False
