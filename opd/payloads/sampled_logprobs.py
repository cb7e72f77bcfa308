"""Payload `sampled_logprobs`: the teacher's log-prob of each sampled token, and nothing of other tokens.

Shapes: N tokens of a block, C of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from opd.interfaces import ScoredRow
from opd.losses.blocks import Block, BlockChunk
from opd.losses.objective import TeacherChunk
from opd.payloads.answer import Answer, Columns, Position, TeacherStates

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.models.heads import Head


@dataclass(frozen=True, slots=True)
class SampledLogprobs(Answer):
    """A teacher's log-probs of the trained tokens of one response."""

    ROW: ClassVar[Columns] = (("teacher_logprobs", pa.list_(pa.float32())),)

    teacher_logprobs: Sequence[float]
    """[N] log-prob of each trained token."""

    @property
    def nbytes(self) -> int:
        return 4 * len(self.teacher_logprobs)

    @property
    def size(self) -> str:
        return str(len(self.teacher_logprobs))

    def fits(self, num: int, itemsize: int) -> bool:
        return len(self.teacher_logprobs) == num

    def select_tokens(self, part: slice, num: int) -> SampledLogprobs:
        return SampledLogprobs(self.teacher_logprobs[part])

    @classmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        return 4

    @classmethod
    def of_states(cls, states: TeacherStates) -> SampledLogprobs:
        import torch

        token_N = torch.tensor(states.token_ids, dtype=torch.long)
        return cls(states.logprobs().gather(1, token_N[:, None])[:, 0].tolist())

    @classmethod
    def named_by_engine(cls, top_k: int) -> int | None:
        return 0

    @classmethod
    def of_positions(cls, token_ids: Sequence[int], positions: Sequence[Position], top_k: int) -> SampledLogprobs:
        return cls([position[token] for token, position in zip(token_ids, positions, strict=True)])

    @classmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        import torch

        logprob_N = torch.tensor([x for scored in samples for x in mixed_logprobs(scored)], dtype=torch.float32)
        if baselines is None:
            return (SampledBlock(logprob_N),)
        values = [baselines[s[0].rollout.sample_id] for s in samples for _ in range(s[0].rollout.num_trained)]
        return (SampledBlock(logprob_N, torch.tensor(values, dtype=torch.float32)),)

    def gap(self, reference: Answer, num: int, dtype: torch.dtype) -> float:
        assert isinstance(reference, SampledLogprobs)
        pairs = zip(reference.teacher_logprobs, self.teacher_logprobs, strict=True)
        gaps = [abs(a - b) for a, b in pairs]
        return sum(gaps) / len(gaps)

    def differences(
        self, token_ids: Sequence[int], logprobs: Sequence[float], dtype: torch.dtype, head: Callable[[], Head]
    ) -> list[float]:
        return [abs(was - now) for was, now in zip(logprobs, self.teacher_logprobs, strict=True)]


def mixed_logprobs(scored: Sequence[ScoredRow]) -> list[float]:
    """Return [N] sum_k w_k log q_k(y) over the teachers k of a sample; with a single teacher that is its log-prob."""
    columns = [[row.weight * x for x in row.answer.teacher_logprobs] for row in scored]
    return [sum(values) for values in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class SampledBlock(Block, BlockChunk):
    """Consecutive trained tokens with the teachers' weighted log-prob of each. The same class serves as block and as chunk."""

    compiles: ClassVar[bool] = True

    logprob_N: Tensor
    """`mixed_logprobs` of the samples."""
    baseline_N: Tensor | None = None
    """Number that `SampledKL` subtracts from each token's advantage. It must not depend on the token's own response."""

    def __len__(self) -> int:
        return len(self.logprob_N)

    def select_chunk(self, part: slice, vocab_size: int) -> SampledBlock:
        return self.select_rows(part)

    def select_rows(self, rows: slice) -> SampledBlock:
        return SampledBlock(self.logprob_N[rows], None if self.baseline_N is None else self.baseline_N[rows])

    def pad_rows(self, rows: int) -> SampledBlock:
        from opd.losses.logits import pad_rows

        baseline_N = None if self.baseline_N is None else pad_rows(self.baseline_N, rows)
        return SampledBlock(pad_rows(self.logprob_N, rows), baseline_N)

    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> SampledChunk:
        baseline_C = None if self.baseline_N is None else self.baseline_N.to(dtype)
        return SampledChunk(self.logprob_N.to(dtype), baseline_C)


@dataclass(frozen=True, slots=True)
class SampledChunk(TeacherChunk):
    """The teacher's log-probs of C sampled tokens."""

    logq_C: Tensor
    """Log-prob of the sampled ids."""
    baseline_C: Tensor | None = None
