"""What every payload says about itself. Each one is a class of answers; an answer is what a teacher says of the
trained tokens of one response. Tokens that are not trained are neither scored nor sent.

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
"""Token -> log-prob at one place of a sequence: the token that stands there, and the likeliest ones if asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a teacher computed about the trained tokens of one response."""

    token_ids: Sequence[int]
    """[N]"""
    hidden_N_D: Tensor
    """The last hidden state after the final norm, at the position before each token; on the CPU."""
    head: str
    """Content hash of the teacher's output head."""
    logprobs: Callable[[], Tensor]
    """Gives the [N, V] log-probs, float32 on the CPU; computed when it is called."""
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
        """How much the answer holds, for an error."""

    @abstractmethod
    def fits(self, num: int, itemsize: int) -> bool:
        """Whether this can be the answer about `num` trained tokens; `itemsize` is that of the stream's dtype."""

    def width(self, num: int) -> int | None:
        """What has to be equal in all rows of a stream, such as K; None where nothing has to, or `num` does not tell."""
        return None

    def head_key(self) -> str:
        """Content hash of the output head that belongs to the answer; empty where none is sent."""
        return ""

    @classmethod
    @abstractmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        """Bytes of the answer about one token."""

    @classmethod
    @abstractmethod
    def of_states(cls, said: Said) -> Answer:
        """The answer of a teacher whose states and log-probs are at hand."""

    @classmethod
    def named_by_engine(cls, top_k: int) -> int | None:
        """How many of the likeliest tokens an engine has to name at each position, beside the one that stands there; None
        where its log-probs do not make an answer."""
        return None

    @classmethod
    def of_positions(cls, token_ids: Sequence[int], positions: Sequence[Position], top_k: int) -> Answer:
        """The answer from an engine's log-probs at each trained token, [N]; they are finite."""
        raise NotImplementedError(f"{cls.__name__} needs more than an engine's log-probs")

    @classmethod
    @abstractmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        """What the loss gets for the trained tokens of these samples, in order; each sample has a row from each of its
        teachers. `dtype` is the stream's, `baselines` maps sample ids to numbers."""

    def gap(self, wanted: Answer, num: int, dtype: torch.dtype) -> float:
        """How far this is from another engine's answer about the same `num` tokens: for log-probs the mean difference in
        nats, for states the difference relative to their norm."""
        raise NotImplementedError(f"{type(self).__name__} of two engines cannot be compared")

    def differences(
        self, token_ids: Sequence[int], logprobs: Sequence[float], dtype: torch.dtype, head: Callable[[], Head]
    ) -> list[float]:
        """|given - answered| log-prob of each trained token, or the least that it can be; empty where the answer does not
        tell. `head` reads the teacher's output head, cut to the vocabulary."""
        return []
