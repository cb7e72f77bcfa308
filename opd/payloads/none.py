"""Payload `none`: no teacher was asked. The rows have only rollouts, and the student learns from their rewards.

Shapes: N tokens of a block, C of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from opd.interfaces import ScoredRow
from opd.losses.blocks import Block, BlockChunk
from opd.losses.objective import TeacherChunk
from opd.payloads.answer import Answer, TeacherStates

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Unscored(Answer):
    """The empty answer. It has no column in the stream."""

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def size(self) -> str:
        return "nothing"

    def fits(self, num: int, itemsize: int) -> bool:
        return True

    def select_tokens(self, part: slice, num: int) -> Unscored:
        return self

    @classmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        return 0

    @classmethod
    def of_states(cls, states: TeacherStates) -> Unscored:
        return cls()

    @classmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        return (UnscoredBlock(sum(scored[0].rollout.num_trained for scored in samples)),)


@dataclass(frozen=True, slots=True)
class UnscoredBlock(Block, BlockChunk):
    """A number of consecutive trained tokens that no teacher has scored. The same class serves as block and as chunk."""

    tokens: int
    says_something: ClassVar[bool] = False
    compiles: ClassVar[bool] = True

    def __len__(self) -> int:
        return self.tokens

    def select_chunk(self, part: slice, vocab_size: int) -> UnscoredBlock:
        return self.select_rows(part)

    def select_rows(self, rows: slice) -> UnscoredBlock:
        return UnscoredBlock(len(range(self.tokens)[rows]))

    def pad_rows(self, rows: int) -> UnscoredBlock:
        return UnscoredBlock(self.tokens + rows)

    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> TeacherChunk:
        return TeacherChunk()
