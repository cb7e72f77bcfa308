"""Payload `aligned_states`: the answers of a teacher with another tokenizer, about the chunks that both encodings of a response share.

Shapes: N the student's trained tokens of a block, M the teacher's tokens of a response, K chunks of a response, C tokens of a chunk of
the loss, D the teacher's hidden width, V the student's vocabulary ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from opd.interfaces import ScoredRow
from opd.losses.blocks import Block, BlockChunk
from opd.losses.objective import TeacherChunk
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.payloads.answer import Answer, Columns, TeacherStates
from opd.payloads.hidden_states import bytes_to_states

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.models.heads import Head
    from opd.vocabularies.alignment import Alignment


@dataclass(frozen=True, slots=True)
class AlignedStates(Answer):
    """What a teacher says of the chunks of one response."""

    GROUP: ClassVar[Columns] = (("head", pa.string()), ("hidden_size", pa.int32()))
    ROW: ClassVar[Columns] = (
        ("hidden", pa.large_binary()),
        ("student_counts", pa.list_(pa.int32())),
        ("teacher_counts", pa.list_(pa.int32())),
        ("chunk_logprobs", pa.list_(pa.float32())),
        ("shared_logprobs", pa.list_(pa.float32())),
    )
    SENDS_HEADS: ClassVar[bool] = True

    head: str
    """Content hash of the teacher's output head in the student's ids: a row for each of its tokens, NaN where the teacher has none.
    Zeros would not do: the row of a token for padding may be zero."""
    hidden_size: int
    """D, the teacher's hidden width."""
    hidden: memoryview | bytes
    """[K, D] little-endian, in the stream's dtype: the state after the final norm that predicts the chunk's first token."""
    student_counts: Sequence[int]
    """[K] the student's tokens of each chunk."""
    teacher_counts: Sequence[int]
    """[K] the teacher's."""
    chunk_logprobs: Sequence[float]
    """[K] log-prob of all of the teacher's tokens of the chunk."""
    shared_logprobs: Sequence[float]
    """[K] log of the probability that the teacher has, before the chunk, for the tokens that both vocabularies have."""

    @property
    def nbytes(self) -> int:
        return len(self.hidden) + 16 * len(self.student_counts)

    @property
    def size(self) -> str:
        return f"{sum(self.student_counts)} in {len(self.student_counts)} chunks (hidden width {self.hidden_size})"

    def fits(self, num: int, itemsize: int) -> bool:
        columns = (self.student_counts, self.teacher_counts, self.chunk_logprobs, self.shared_logprobs)
        return (
            {len(column) for column in columns} == {len(self.student_counts)}
            and all(count > 0 for count in (*self.student_counts, *self.teacher_counts))
            and sum(self.student_counts) == num
            and self.hidden_size > 0
            and len(self.hidden) == len(self.student_counts) * self.hidden_size * itemsize
        )

    def head_key(self) -> str:
        return self.head

    @classmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        return hidden_size * itemsize + 16

    @classmethod
    def of_states(cls, states: TeacherStates) -> AlignedStates:
        """Make the answer about the teacher's own tokens, each of which is a chunk; `join_chunks` makes of it that about the student's."""
        import torch

        logq_M_V = states.logprobs()
        token_M = torch.tensor(states.token_ids, dtype=torch.long)
        ids_V = slice(None) if states.shared_ids is None else torch.as_tensor(states.shared_ids)
        # A few rows at a time, because the columns are copied.
        shared_M = torch.cat([part_V[:, ids_V].logsumexp(-1) for part_V in logq_M_V.split(64)])
        single = (1,) * len(token_M)
        return cls(
            head=states.head,
            hidden_size=states.hidden_N_D.shape[1],
            hidden=states.hidden_N_D.contiguous().view(torch.uint8).numpy().tobytes(),
            student_counts=single,
            teacher_counts=single,
            chunk_logprobs=logq_M_V.gather(1, token_M[:, None])[:, 0].tolist(),
            shared_logprobs=shared_M.tolist(),
        )

    def join_chunks(self, alignment: Alignment) -> AlignedStates:
        starts = [0, *accumulate(alignment.teacher_counts)]
        width = len(self.hidden) // max(1, len(self.chunk_logprobs))
        return replace(
            self,
            hidden=b"".join(self.hidden[start * width : (start + 1) * width] for start in starts[:-1]),
            student_counts=alignment.student_counts,
            teacher_counts=alignment.teacher_counts,
            chunk_logprobs=[sum(self.chunk_logprobs[start:stop]) for start, stop in pairwise(starts)],
            shared_logprobs=[self.shared_logprobs[start] for start in starts[:-1]],
        )

    @classmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        assert all(len(scored) == 1 for scored in samples), "aligned_states does not mix teachers"
        rows = [scored[0] for scored in samples]
        # Consecutive samples of the same teacher become one block, so that products with heads are few and large.
        return tuple(
            _build_block(head, list(alike), dtype) for head, alike in groupby(rows, lambda row: str(row.answer.head))
        )

    def differences(
        self, token_ids: Sequence[int], logprobs: Sequence[float], dtype: torch.dtype, head: Callable[[], Head]
    ) -> list[float]:
        return [abs(was - now) for was, now in zip(logprobs, self.chunk_logprobs, strict=True)]


def _build_block(head: str, rows: Sequence[ScoredRow], dtype: torch.dtype) -> AlignedRun:
    """Build the block of rows of one teacher."""
    import torch

    states: list[Tensor] = []
    columns: list[tuple[Tensor, ...]] = []
    for row in rows:
        answer: AlignedStates = row.answer
        behaviours = [row.rollout.behaviour_logprobs[position] for position in row.rollout.trained_positions]
        hidden_K_D = bytes_to_states(bytearray(answer.hidden), answer.hidden_size, dtype)
        count_K = torch.tensor(answer.student_counts, dtype=torch.long)
        behaviour_N = torch.tensor(behaviours, dtype=torch.float64)
        chunk_N = torch.repeat_interleave(torch.arange(len(count_K)), count_K)
        first_N = torch.ones(len(chunk_N), dtype=torch.bool)
        first_N[1:] = chunk_N[1:] != chunk_N[:-1]
        written_K = torch.zeros(len(count_K), dtype=torch.float64).index_add_(0, chunk_N, behaviour_N)
        # Sums of log-probs in float64: the log-prob of a token is taken out of the sum that it is in.
        others_N = (torch.tensor(answer.chunk_logprobs, dtype=torch.float64) - written_K)[chunk_N] + behaviour_N
        single_K = (count_K == 1) & (torch.tensor(answer.teacher_counts, dtype=torch.long) == 1)
        shared_K = torch.tensor(answer.shared_logprobs, dtype=torch.float32)
        states.append(hidden_K_D[chunk_N])
        columns.append((first_N, single_K[chunk_N], count_K[chunk_N], others_N.float(), shared_K[chunk_N]))
    return AlignedRun(head, torch.cat(states), AlignedColumns(*map(torch.cat, zip(*columns, strict=True))))


@dataclass(frozen=True, slots=True)
class AlignedColumns:
    """Numbers of N tokens of the student's."""

    first_N: Tensor
    """True for the first token of its chunk."""
    single_N: Tensor
    """True if its chunk is one token on both sides."""
    length_N: Tensor
    """The student's tokens of its chunk."""
    logq_N: Tensor
    """The teacher's log-prob of the chunk, less the log-probs with which the chunk's other tokens were sampled."""
    shared_logprob_N: Tensor
    """Log of the teacher's probability of the shared tokens before the chunk."""

    def select_rows(self, rows: slice) -> AlignedColumns:
        """Return the numbers of some tokens."""
        parts = (self.first_N, self.single_N, self.length_N, self.logq_N, self.shared_logprob_N)
        return AlignedColumns(*(column[rows] for column in parts))


@dataclass(frozen=True, slots=True)
class AlignedRun(Block):
    """Consecutive trained tokens with the answers of one teacher, whose head is only named."""

    head: str
    hidden_N_D: Tensor
    """The state before the token's chunk."""
    columns: AlignedColumns

    def __len__(self) -> int:
        return len(self.hidden_N_D)

    def head_keys(self) -> tuple[str, ...]:
        return (self.head,)

    def with_heads(self, heads: Mapping[str, Head]) -> AlignedBlock:
        head = heads[self.head]
        return AlignedBlock(self.hidden_N_D, self.columns, head.weight_V_D, head.rule)


@dataclass(frozen=True, slots=True)
class AlignedBlock(Block):
    """Consecutive trained tokens with the answers of one teacher, and its head in the student's ids."""

    hidden_N_D: Tensor
    columns: AlignedColumns
    head_V_D: Tensor
    rule: LogitRule = IDENTITY

    def __len__(self) -> int:
        return len(self.hidden_N_D)

    def products(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return ((self.hidden_N_D, self.head_V_D),)

    def select_chunk(self, part: slice, vocab_size: int) -> AlignedLogits:
        head_V_D = self.head_V_D[:vocab_size]
        logits_C_V = self.rule.apply(self.hidden_N_D[part].to(head_V_D.dtype) @ head_V_D.T)
        return AlignedLogits(logits_C_V, ~head_V_D[:, 0].isnan(), self.columns.select_rows(part))


@dataclass(frozen=True, slots=True)
class AlignedLogits(BlockChunk):
    """The teacher's logits of the shared tokens at C tokens."""

    logits_C_V: Tensor
    shared_V: Tensor
    columns: AlignedColumns

    def select_rows(self, rows: slice) -> AlignedLogits:
        return AlignedLogits(self.logits_C_V[rows], self.shared_V, self.columns.select_rows(rows))

    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> AlignedChunk:
        logits_C_V = self.logits_C_V.to(dtype).masked_fill(~self.shared_V, float("-inf"))
        columns = self.columns
        return AlignedChunk(
            logq_C_V=logits_C_V.log_softmax(-1),
            shared_V=self.shared_V,
            first_in_chunk_C=columns.first_N,
            single_C=columns.single_N & self.shared_V[token_C],
            length_C=columns.length_N.to(dtype),
            logq_C=columns.logq_N.to(dtype),
            shared_logprob_C=columns.shared_logprob_N.to(dtype),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedChunk(TeacherChunk):
    """A teacher with another tokenizer at C tokens of the student's."""

    logq_C_V: Tensor
    """Log-probs among the shared tokens before the token's chunk; -inf for other tokens."""
    shared_V: Tensor
    """True for tokens that both vocabularies have."""
    first_in_chunk_C: Tensor
    """True for the first token of its chunk."""
    single_C: Tensor
    """True if the chunk is one shared token."""
    length_C: Tensor
    """The student's tokens of the chunk."""
    logq_C: Tensor
    """The numbers of `AlignedColumns.logq_N`."""
    shared_logprob_C: Tensor
    """Log of the teacher's probability of the shared tokens."""

    def first_C(self) -> Tensor:
        """Return [C] the teacher's likeliest shared tokens; -1, which is no token, within a chunk of several."""
        return self.logq_C_V.max(-1).indices.masked_fill(~self.single_C, -1)
