"""What teachers said of consecutive tokens on its way to an objective: a block, a chunk of it, and what the objective sees.

    block of N tokens  --given(part)-->  C tokens, products with heads done  --chunk-->  `TeacherChunk`

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


class Given(ABC):
    """What is left of a chunk of a block once its matrix products are done; the rest is elementwise."""

    __slots__ = ()

    compiles: ClassVar[bool] = False
    """Whether the elementwise part may be compiled, for which `pad_rows` is needed."""

    @abstractmethod
    def select_rows(self, rows: slice) -> Given:
        """What belongs to some of the chunk's tokens."""

    def pad_rows(self, rows: int) -> Given:
        """The same with that many more tokens, whatever they say."""
        raise NotImplementedError

    @abstractmethod
    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> TeacherChunk:
        """What the objective sees; `token_C` are the sampled ids, `dtype` is that of the loss."""


class Block(ABC):
    """Consecutive response tokens of a micro-batch that are computed in one way."""

    __slots__ = ()

    says_something: ClassVar[bool] = True
    """False if no teacher has seen its tokens, so that no divergence can be computed."""
    is_mixture: ClassVar[bool] = False
    """True if only objectives that mix teachers (`Objective.mixes`) can use it."""

    @abstractmethod
    def __len__(self) -> int:
        """Its tokens."""

    def head_keys(self) -> tuple[str, ...]:
        """Content hashes of the output heads that it needs."""
        return ()

    def with_heads(self, heads: Mapping[str, Head]) -> Block:
        """The block that can be computed, once its heads are on this device."""
        return self

    def products(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Hidden states and the output head that each of them is multiplied with: their widths have to agree."""
        return ()

    def select_chunk(self, part: slice, vocab_size: int) -> Given:
        """Some of its tokens; a head is cut to `vocab_size` rows."""
        raise NotImplementedError(f"{type(self).__name__} has no heads yet")
