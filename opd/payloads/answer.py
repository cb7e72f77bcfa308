"""The base class of all answers. Each payload is a class of answers. An answer holds what one teacher says of the trained tokens of
one response; tokens that are not trained are neither scored nor sent.

Importing this file needs no torch: code that checks a stream or counts bytes needs only pyarrow.
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
    from opd.vocabularies.alignment import Alignment
    from opd.vocabularies.spelling import Spelling

Columns = tuple[tuple[str, pa.DataType], ...]
"""Name and Arrow type of each column; every name is also a field of the answer."""
Position = Mapping[int, float]
"""Token id -> log-prob at one position of a sequence: of the token that stands there and, on request, of the likeliest tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherStates:
    """A teacher's forward pass over the trained tokens of one response, from which any payload makes its answer."""

    token_ids: Sequence[int]
    """[N] the trained tokens."""
    hidden_N_D: Tensor
    """The teacher's last hidden state after the final norm, at the position before each token; on the CPU."""
    head: str
    """Content hash of the teacher's output head."""
    logprobs: Callable[[], Tensor]
    """Function that computes [N, V] the log-probs, float32 on the CPU."""
    top_k: int
    """The pipeline's `objective.k`: how many of the likeliest tokens an answer may need."""
    sampled_ids: Sequence[int] | None = None
    """The student's tokens of the same text, if the teacher has another tokenizer; `token_ids` are the teacher's then."""
    alignment: Alignment | None = None
    """Parts of both that are the same text; None: they are the same tokens."""
    spelling: Spelling | None = None
    """The teacher's tokens in the student's; None: they are the same."""


class Answer(ABC):
    """One teacher's answer about the trained tokens of one response."""

    __slots__ = ()

    GROUP: ClassVar[Columns] = ()
    """Columns whose value is the same in all rows of a teacher in a domain."""
    ROW: ClassVar[Columns] = ()
    """Columns whose value differs from row to row."""
    TOKEN_IDS: ClassVar[tuple[str, ...]] = ()
    """Names of the columns that hold token ids; a reader checks that these are in the vocabulary."""
    SENDS_HEADS: ClassVar[bool] = False
    """True if the trainer needs the teacher's output head beside the answers."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the answer takes on the wire."""

    @property
    @abstractmethod
    def size(self) -> str:
        """Length of the answer as text, for an error message."""

    @abstractmethod
    def fits(self, num: int, itemsize: int) -> bool:
        """Return True if the lengths are right for `num` trained tokens; `itemsize`: bytes of a number in the stream's dtype."""

    def select_tokens(self, part: slice, num: int) -> Answer:
        """Return the answer about these consecutive ones of the `num` trained tokens."""
        raise NotImplementedError(f"{type(self).__name__} cannot be divided among ranks that share a row")

    def width(self, num: int) -> int | None:
        """Return the number of values per token if that must be equal in all rows of a stream, such as K; else None.

        `num`: trained tokens; if it is 0, the width is not known and the result is None.
        """
        return None

    def head_key(self) -> str:
        """Return the content hash of the output head that the answer's hidden states need; empty if heads are not sent."""
        return ""

    @classmethod
    @abstractmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        """Return the bytes that an answer takes for each trained token."""

    @classmethod
    @abstractmethod
    def of_states(cls, states: TeacherStates) -> Answer:
        """Make the answer from a teacher's hidden states or log-probs."""

    @classmethod
    def named_by_engine(cls, top_k: int) -> int | None:
        """Return how many of the likeliest tokens an engine must name at each position, beside the token that stands there.

        None if no answer can be made from an engine's log-probs.
        """
        return None

    @classmethod
    def of_positions(cls, token_ids: Sequence[int], positions: Sequence[Position], top_k: int) -> Answer:
        """Make the answer from an engine's log-probs, which are finite; `positions` [N] has those at each trained token."""
        raise NotImplementedError(f"{cls.__name__} needs more than an engine's log-probs")

    @classmethod
    @abstractmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        """Build the loss's blocks for the trained tokens of these samples, in order.

        `samples`: for each sample, one row from each of its teachers. `dtype`: that of the stream. `baselines`: sample id ->
        number that the objective subtracts from the sample's advantages; None without a baseline.
        """

    def gap(self, reference: Answer, num: int, dtype: torch.dtype) -> float:
        """Measure the difference from another engine's answer about the same `num` tokens.

        For log-probs it is the mean difference in nats; for hidden states, the norm of the difference relative to the norm of
        the reference.
        """
        raise NotImplementedError(f"{type(self).__name__} of two engines cannot be compared")

    def differences(
        self, token_ids: Sequence[int], logprobs: Sequence[float], dtype: torch.dtype, head: Callable[[], Head]
    ) -> list[float]:
        """Return, for each trained token, |`logprobs` - the answer's log-prob| in nats; empty if the answer tells no log-probs.

        If the answer does not have the token, the least possible difference is returned. `head` reads the teacher's output head,
        cut to the vocabulary.
        """
        return []
