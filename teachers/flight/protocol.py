"""The messages between server and client. Each side checks what it receives, since the other may run another release."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from json import JSONDecodeError, loads
from typing import TypeVar

import pyarrow as pa
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError

from opd.errors import RunError
from opd.models.logit_rule import LogitRule
from opd.records.types import Rollout
from opd.stream.rollouts import encode_rollouts
from opd.stream.schema import VERSION as STREAM_VERSION

PROTOCOL = "3"
"""Version of these messages; both sides need the same."""
SLICE_BYTES = 4 << 20
"""Most bytes of a stream or head in one message."""
BATCH_TOKENS = 1 << 16
"""Most tokens of one batch of rollouts, about a megabyte; a longer rollout is a batch of its own."""

SLICES = pa.schema([pa.field("bytes", pa.large_binary(), nullable=False)])
"""Schema of a message with one slice of a byte string; the slices come in order."""
PART_ENDS = b"end"
"""Metadata that marks the last slice of a part."""


class ProtocolError(RunError):
    """The other side sent something that this release does not understand."""


class Wire(BaseModel):
    """Base of every JSON record."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServedTeacher(Wire):
    """One of the teachers of a domain."""

    name: str
    weight: float
    digest: str
    """Digest of its weights; see `opd.records.types.Teacher.digest`."""
    head: str
    """Content hash of its output head."""


class WireRule(Wire):
    """`opd.models.logit_rule.LogitRule` as JSON."""

    scale: float
    softcap: float | None

    def to_logit_rule(self) -> LogitRule:
        return LogitRule(scale=self.scale, softcap=self.softcap)


class Hello(Wire):
    """The server's first answer: versions, types, domains, teachers and heads of the pool that it serves."""

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
    """Content hash of a head -> the rule that the architecture applies to its logits."""

    def compute_identity(self) -> str:
        """Return a hash that is equal for two pools that give the same answers.

        With it a client notices that another pool now answers at the same address.
        """
        return blake3(self.model_dump_json().encode()).hexdigest()


class ScoreRequest(Wire):
    """Message of a client before the rollouts of a step."""

    protocol: str = PROTOCOL
    served: str
    """`Hello.compute_identity` of the `Hello` that this client got."""
    rollouts: int
    """Number of rollouts that follow."""


class ScoreReply(Wire):
    """Message of the server after the last slice."""

    sizes: tuple[int, ...]
    """Bytes of each part, in order."""


W = TypeVar("W", bound=Wire)


def parse_record(model: type[W], raw: bytes) -> W:
    """Parse and check a record. Raises: ProtocolError for another version of the protocol, or for bytes that are no such record."""
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


def encode_batches(rollouts: Sequence[Rollout]) -> Iterator[pa.RecordBatch]:
    """Yield the rollouts, in order, as Arrow batches of at most `BATCH_TOKENS` tokens or of one longer rollout."""
    batch: list[Rollout] = []
    tokens = 0
    for rollout in rollouts:
        length = len(rollout.prompt_ids) + len(rollout.response_ids)
        if batch and tokens + length > BATCH_TOKENS:
            yield encode_rollouts(batch)
            batch, tokens = [], 0
        batch.append(rollout)
        tokens += length
    if batch:
        yield encode_rollouts(batch)


def split_slices(raw: memoryview) -> Iterator[pa.RecordBatch]:
    """Yield a byte string as messages of at most `SLICE_BYTES` each. Nothing is copied: the arrays point into `raw`."""
    for start in range(0, len(raw), SLICE_BYTES):
        piece = raw[start : start + SLICE_BYTES]
        offsets = pa.array([0, len(piece)], pa.int64()).buffers()[1]
        data = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(piece)])
        yield pa.RecordBatch.from_arrays([data], schema=SLICES)
