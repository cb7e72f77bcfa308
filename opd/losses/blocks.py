"""The steps by which the teachers' answers about consecutive tokens become what an objective reads.

    `Block` of N tokens  --select_chunk-->  `BlockChunk` of C tokens  --view_chunk-->  `TeacherChunk`
                                            (multiplied with the teachers' output heads, if there are any)

Every payload has its own classes for these steps, in its file in `opd/payloads/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.losses.objective import TeacherChunk
    from opd.models.heads import Head


class BlockChunk(ABC):
    """Some tokens of a block, after the products with output heads. What is left to compute is elementwise."""

    __slots__ = ()

    compiles: ClassVar[bool] = False
    """True if torch.compile may compile the elementwise part. Such a class needs `pad_rows`."""

    @abstractmethod
    def select_rows(self, rows: slice) -> BlockChunk:
        """Return the part of the chunk with these rows; a row is a token."""

    def pad_rows(self, rows: int) -> BlockChunk:
        """Return the chunk with `rows` more rows. These may hold anything, because their results are cut off."""
        raise NotImplementedError

    @abstractmethod
    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> TeacherChunk:
        """Return the chunk as the objective sees it. `token_C`: sampled ids; `dtype`: type in which the loss is computed."""


class Block(ABC):
    """Teachers' answers about consecutive tokens of a micro-batch that are computed alike, such as those of the same teachers."""

    __slots__ = ()

    says_something: ClassVar[bool] = True
    """False if no teacher has scored these tokens, so that no divergence can be computed."""
    is_mixture: ClassVar[bool] = False
    """True if only objectives with `Objective.mixes` can use the block."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    def head_keys(self) -> tuple[str, ...]:
        """Return the content hashes of the output heads that the block needs."""
        return ()

    def with_heads(self, heads: Mapping[str, Head]) -> Block:
        """Return the block with its heads filled in; only then can `select_chunk` be called. `heads`: content hash -> head."""
        return self

    def products(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return pairs of hidden states and output head that will be multiplied, so that a caller can check their widths."""
        return ()

    def select_chunk(self, part: slice, vocab_size: int) -> BlockChunk:
        """Return the tokens `part` of the block, multiplied with the heads; each head is cut to `vocab_size` rows."""
        raise NotImplementedError(f"{type(self).__name__} has no heads yet")


@dataclass(frozen=True, slots=True)
class DomainBlock(Block):
    """A block of a domain that has an objective of its own."""

    domain: str
    block: Block

    def __len__(self) -> int:
        return len(self.block)

    def head_keys(self) -> tuple[str, ...]:
        return self.block.head_keys()

    def with_heads(self, heads: Mapping[str, Head]) -> DomainBlock:
        return DomainBlock(self.domain, self.block.with_heads(heads))

    def products(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return self.block.products()

    def select_chunk(self, part: slice, vocab_size: int) -> BlockChunk:
        return self.block.select_chunk(part, vocab_size)
