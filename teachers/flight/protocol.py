"""What the two sides say to each other. Both check it: neither trusts that the other runs the same release."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from json import JSONDecodeError, loads
from typing import Any, TypeVar

import pyarrow as pa
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from opd.errors import RunError
from opd.losses.rule import LogitRule
from opd.stream.schema import VERSION as STREAM_VERSION
from opd.types import Rollout, Segment

PROTOCOL = "2"
ROLLOUTS_VERSION = "1"
SLICE_BYTES = 4 << 20
"""Largest piece of a stream or head in one message."""
BATCH_TOKENS = 1 << 16
"""Tokens of one batch of rollouts, about a megabyte; a longer rollout is a batch of its own."""

ROLLOUTS = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("policy_version", pa.int32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("behaviour_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("segment_lengths", pa.list_(pa.int32()), nullable=False),
        pa.field("segment_trained", pa.list_(pa.bool_()), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
    ],
    metadata={"opd.rollouts": ROLLOUTS_VERSION},
)
SLICES = pa.schema([pa.field("bytes", pa.large_binary(), nullable=False)])
"""Pieces of byte strings, in order."""
PART_ENDS = b"end"
"""Metadata of a part's last piece."""


class ProtocolError(RunError):
    """The other side said something that this release does not understand."""


class Wire(BaseModel):
    """Base of every JSON record."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServedTeacher(Wire):
    """One of the teachers of a domain."""

    name: str
    weight: float
    digest: str
    """See `opd.types.Teacher.digest`."""
    head: str
    """Content hash of its output head."""


class WireRule(Wire):
    """`opd.losses.rule.LogitRule` on the wire."""

    scale: float
    softcap: float | None

    def rule(self) -> LogitRule:
        return LogitRule(scale=self.scale, softcap=self.softcap)


class Hello(Wire):
    """What a pool serves."""

    protocol: str = PROTOCOL
    stream: str = STREAM_VERSION
    """Version of the target stream."""
    release: str
    payload: str
    dtype: str
    top_k: int
    vocab_size: int
    domains: dict[str, tuple[ServedTeacher, ...]]
    heads: dict[str, WireRule]
    """Content hash -> what the architecture does to its logits."""

    def identity(self) -> str:
        """Equal for two pools that give the same answers: a client notices if another one took the address."""
        return blake3(self.model_dump_json().encode()).hexdigest()


class ScoreRequest(Wire):
    """Goes before the rollouts."""

    protocol: str = PROTOCOL
    served: str
    """Identity of the `Hello` that the client knows."""
    rollouts: int


class Reply(Wire):
    """Comes after the slices."""

    sizes: tuple[int, ...]
    """Bytes of each part, in order."""


W = TypeVar("W", bound=Wire)


def parse(model: type[W], raw: bytes) -> W:
    """Raises: ProtocolError for another version or anything that is not this record."""
    try:
        data = loads(raw)
        version = data.get("protocol", PROTOCOL) if isinstance(data, dict) else PROTOCOL
        if version != PROTOCOL:
            raise ProtocolError(
                f"speaks protocol {version!r}, this side {PROTOCOL!r}: install the same release on both"
            )
        return model.model_validate(data)
    except (JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ProtocolError(f"no {model.__name__} of protocol {PROTOCOL}: {str(error).splitlines()[0]}") from None


def rollout_batches(rollouts: Sequence[Rollout]) -> Iterator[pa.RecordBatch]:
    """The rollouts as Arrow, in order."""
    batch: list[Rollout] = []
    tokens = 0
    for rollout in rollouts:
        length = len(rollout.prompt_ids) + len(rollout.response_ids)
        if batch and tokens + length > BATCH_TOKENS:
            yield _encode(batch)
            batch, tokens = [], 0
        batch.append(rollout)
        tokens += length
    if batch:
        yield _encode(batch)


def _encode(rollouts: Sequence[Rollout]) -> pa.RecordBatch:
    own = {
        "segment_lengths": [[s.length for s in r.segments] for r in rollouts],
        "segment_trained": [[s.trained for s in r.segments] for r in rollouts],
    }
    columns = [pa.array(own.get(f.name) or [getattr(r, f.name) for r in rollouts], f.type) for f in ROLLOUTS]
    return pa.RecordBatch.from_arrays(columns, schema=ROLLOUTS)


def check_rollouts_schema(schema: pa.Schema) -> None:
    """Raises: ProtocolError if the sender has other columns or another version of them."""
    version = (schema.metadata or {}).get(b"opd.rollouts", b"none").decode(errors="replace")
    if version != ROLLOUTS_VERSION:
        raise ProtocolError(
            f"rollouts of version {version}, wanted {ROLLOUTS_VERSION}: install the same release on both"
        )
    if not schema.equals(ROLLOUTS):
        raise ProtocolError(f"rollouts with columns {schema.names}, wanted {ROLLOUTS.names}")


def read_rollouts(batches: Iterable[pa.RecordBatch], vocab_size: int) -> list[Rollout]:
    """Inverse of `rollout_batches`. Raises: ProtocolError for a row that a teacher could not or must not read."""
    rollouts: list[Rollout] = []
    for batch in batches:
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise ProtocolError(f"rollouts: {error}") from None
        if any(column.null_count for column in batch.columns):
            raise ProtocolError("rollouts: a value is missing")
        rollouts += [_decode(row, vocab_size) for row in batch.to_pylist()]
    if len({r.sample_id for r in rollouts}) != len(rollouts):
        raise ProtocolError("rollouts: a sample id comes twice")
    return rollouts


def _decode(row: dict[str, Any], vocab_size: int) -> Rollout:
    segments = tuple(
        Segment(length=length, trained=trained)
        for length, trained in zip(row.pop("segment_lengths"), row.pop("segment_trained"), strict=False)
    )
    lists: dict[str, Any] = {
        name: tuple(row.pop(name)) for name in ("prompt_ids", "response_ids", "behaviour_logprobs")
    }
    rollout = Rollout(segments=segments, **lists, **row)
    num = len(rollout.response_ids)
    if not num == len(rollout.behaviour_logprobs) == sum(s.length for s in segments):
        raise ProtocolError(f"rollout {rollout.sample_id}: lengths of response, log-probs and segments disagree")
    if not rollout.prompt_ids:
        raise ProtocolError(f"rollout {rollout.sample_id}: an empty prompt, nothing predicts its first token")
    ids = (*rollout.prompt_ids, *rollout.response_ids)
    if any(i is None or not 0 <= i < vocab_size for i in ids):
        raise ProtocolError(f"rollout {rollout.sample_id}: a token id outside 0..{vocab_size - 1}")
    return rollout


def slices(raw: memoryview) -> Iterator[pa.RecordBatch]:
    """A byte string in pieces; nothing is copied."""
    for start in range(0, len(raw), SLICE_BYTES):
        piece = raw[start : start + SLICE_BYTES]
        offsets = pa.array([0, len(piece)], pa.int64()).buffers()[1]
        data = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(piece)])
        yield pa.RecordBatch.from_arrays([data], schema=SLICES)
