"""Base class of all payloads. A payload is a class of answers; an answer holds a teacher's scores of the trained tokens of one
response. Tokens that are not trained are neither scored nor sent.

Nothing here imports torch before it is called: whoever checks a stream, or counts bytes, needs pyarrow alone.
Shapes: N trained tokens of a response, D a teacher's hidden width, V vocabulary ids, K of a top-k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.interfaces import ScoredRow
    from opd.losses.blocks import Block
    from opd.models.heads import Head

Columns = tuple[tuple[str, pa.DataType], ...]
"""Name and Arrow type; every name is also a field of the answer."""
Position = Mapping[int, float]
"""Token -> log-prob at one position of a sequence: the token that is there, and on request the likeliest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherStates:
    """A teacher's forward pass over the trained tokens of one response, from which any payload makes its answer."""

    token_ids: Sequence[int]
    """[N]"""
    hidden_N_D: Tensor
    """The last hidden state after the final norm, at the position before each token; on the CPU."""
    head: str
    """Content hash of the teacher's output head."""
    logprobs: Callable[[], Tensor]
    """Computes the [N, V] log-probs, float32 on the CPU."""
    top_k: int
    """`objective.k`."""


class Answer(ABC):
    """Base of every payload's answers."""

    __slots__ = ()

    GROUP: ClassVar[Columns] = ()
    """Columns that are equal in all rows of a teacher in a domain."""
    ROW: ClassVar[Columns] = ()
    """Columns with a value of its own in each row."""
    TOKEN_IDS: ClassVar[tuple[str, ...]] = ()
    """The columns that hold token ids, which have to lie in the vocabulary."""
    SENDS_HEADS: ClassVar[bool] = False
    """True if the trainer needs the teacher's output head beside the answers."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the answer takes on the wire."""

    @property
    @abstractmethod
    def size(self) -> str:
        """Length of the answer, for an error message."""

    @abstractmethod
    def fits(self, num: int, itemsize: int) -> bool:
        """Return True if this can be the answer about `num` trained tokens; `itemsize` belongs to the stream's dtype."""

    def width(self, num: int) -> int | None:
        """Return the number that has to be equal in all rows of a stream, such as K; None if there is none, or `num` is 0."""
        return None

    def head_key(self) -> str:
        """Return the content hash of the output head that belongs to the answer; empty if heads are not sent."""
        return ""

    @classmethod
    @abstractmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        """Return the bytes of the answer about one token."""

    @classmethod
    @abstractmethod
    def of_states(cls, states: TeacherStates) -> Answer:
        """Make the answer from a teacher's hidden states or log-probs."""

    @classmethod
    def named_by_engine(cls, top_k: int) -> int | None:
        """Return the number of likeliest tokens that an engine has to return at each position, beside the token that is there;
        None if no answer can be made of an engine's log-probs."""
        return None

    @classmethod
    def of_positions(cls, token_ids: Sequence[int], positions: Sequence[Position], top_k: int) -> Answer:
        """Make the answer from an engine's log-probs at each trained token, [N]; they are finite."""
        raise NotImplementedError(f"{cls.__name__} needs more than an engine's log-probs")

    @classmethod
    @abstractmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        """Build the loss's blocks for the trained tokens of these samples, in order; each sample has a row from each of its
        teachers. `dtype` is the stream's, `baselines` maps sample ids to numbers."""

    def gap(self, reference: Answer, num: int, dtype: torch.dtype) -> float:
        """Measure the difference from another engine's answer about the same `num` tokens: for log-probs the mean in nats, for
        hidden states relative to their norm."""
        raise NotImplementedError(f"{type(self).__name__} of two engines cannot be compared")

    def differences(
        self, token_ids: Sequence[int], logprobs: Sequence[float], dtype: torch.dtype, head: Callable[[], Head]
    ) -> list[float]:
        """Return the difference of `logprobs` and the answer's log-prob at each trained token, or the least that it can be; empty
        if the answer has no log-probs. `head` reads the teacher's output head, cut to the vocabulary."""
        return []
