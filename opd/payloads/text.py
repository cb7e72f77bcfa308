"""Payload `text`: the teacher wrote an answer. Where it stands in the place of the student's response, the row itself has it, so
nothing else is sent.

Shapes: N tokens of a block, C of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from opd.interfaces import ScoredRow
from opd.losses.blocks import Block, BlockChunk
from opd.losses.objective import TeacherChunk
from opd.payloads.none import Unscored

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WrittenAnswer(Unscored):
    """The answer of a teacher that writes text. It has no column in the stream."""

    @classmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        import torch

        sampled = [sampled for scored in samples for sampled in scored[0].rollout.sampled_mask]
        return (WrittenBlock(~torch.tensor(sampled, dtype=torch.bool)),)


@dataclass(frozen=True, slots=True)
class WrittenBlock(Block, BlockChunk):
    """Consecutive trained tokens, and which of them the teacher wrote. The same class serves as block and as chunk."""

    compiles: ClassVar[bool] = True

    taught_N: Tensor
    """True where the teacher wrote the token, False where the student sampled it."""

    def __len__(self) -> int:
        return len(self.taught_N)

    def select_chunk(self, part: slice, vocab_size: int) -> WrittenBlock:
        return self.select_rows(part)

    def select_rows(self, rows: slice) -> WrittenBlock:
        return WrittenBlock(self.taught_N[rows])

    def pad_rows(self, rows: int) -> WrittenBlock:
        from opd.losses.logits import pad_rows

        return WrittenBlock(pad_rows(self.taught_N, rows))

    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> WrittenChunk:
        return WrittenChunk(self.taught_N)


@dataclass(frozen=True, slots=True)
class WrittenChunk(TeacherChunk):
    """C tokens of which the teacher wrote some."""

    taught_C: Tensor
