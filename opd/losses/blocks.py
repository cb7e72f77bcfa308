"""The teachers' scores of consecutive tokens on their way to an objective.

    block of N tokens  --select_chunk-->  C tokens, products with heads done  --view_chunk-->  `TeacherChunk`

Every payload has its own classes for these steps, in its file in `opd/payloads/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.losses.objective import TeacherChunk
    from opd.models.heads import Head


class BlockChunk(ABC):
    """A chunk of a block after its matrix products; everything that is left to compute is elementwise."""

    __slots__ = ()

    compiles: ClassVar[bool] = False
    """True if the elementwise part may be compiled, for which `pad_rows` is needed."""

    @abstractmethod
    def select_rows(self, rows: slice) -> BlockChunk:
        """Return the part that belongs to these rows of the chunk."""

    def pad_rows(self, rows: int) -> BlockChunk:
        """Return the chunk with that many rows more, of any content: their results are cut off."""
        raise NotImplementedError

    @abstractmethod
    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> TeacherChunk:
        """Return the chunk as the objective sees it; `token_C` are the sampled ids, `dtype` is the loss's type."""


class Block(ABC):
    """Consecutive response tokens of a micro-batch that are computed in one way."""

    __slots__ = ()

    says_something: ClassVar[bool] = True
    """False if no teacher has seen its tokens, so that no divergence can be computed."""
    is_mixture: ClassVar[bool] = False
    """True if only objectives that mix teachers (`Objective.mixes`) can use it."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    def head_keys(self) -> tuple[str, ...]:
        """Return the content hashes of the output heads that the block needs."""
        return ()

    def with_heads(self, heads: Mapping[str, Head]) -> Block:
        """Return the block with its heads, which are on this device; it can be computed then."""
        return self

    def products(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return pairs of hidden states and the output head that they are multiplied with: their widths have to agree."""
        return ()

    def select_chunk(self, part: slice, vocab_size: int) -> BlockChunk:
        """Multiply some of the tokens with the heads, each cut to `vocab_size` rows."""
        raise NotImplementedError(f"{type(self).__name__} has no heads yet")
