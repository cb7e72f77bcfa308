"""Payload `aligned_states`: the answers of a teacher with another tokenizer, about the chunks that both encodings of a response share.

A chunk is *spelt* if it is one of the teacher's tokens, written as `opd.vocabularies.spelling` spells it.

Shapes: N the student's trained tokens of a block, M the teacher's tokens of a response, K chunks of a response, R states of a block, C
tokens of a chunk of the loss, D the teacher's hidden width, V the student's vocabulary ids, U the teacher's, E extensions of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from opd.interfaces import ScoredRow
from opd.losses.blocks import Block, BlockChunk
from opd.losses.objective import TeacherChunk
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.payloads.answer import Answer, Columns, TeacherStates
from opd.payloads.hidden_states import bytes_to_states
from opd.vocabularies.alignment import Alignment
from opd.vocabularies.spelling import Spelling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.models.heads import Head


@dataclass(frozen=True, slots=True)
class AlignedStates(Answer):
    """A teacher's answer about the chunks of one response."""

    GROUP: ClassVar[Columns] = (("head", pa.string()), ("hidden_size", pa.int32()))
    ROW: ClassVar[Columns] = (
        ("hidden", pa.large_binary()),
        ("student_counts", pa.list_(pa.int32())),
        ("teacher_counts", pa.list_(pa.int32())),
        ("spelt", pa.list_(pa.bool_())),
        ("last_ids", pa.list_(pa.int32())),
        ("text_logprobs", pa.list_(pa.float32())),
    )
    SENDS_HEADS: ClassVar[bool] = True

    head: str
    """Content hash of the teacher's output head and of the tables by which the student spells its tokens."""
    hidden_size: int
    """D, the teacher's hidden width."""
    hidden: memoryview | bytes
    """[K..2K, D] little-endian, in the stream's dtype: for each chunk the state after the final norm that predicts its first token,
    and the one that predicts its last token if that is another and `last_ids` has it."""
    student_counts: Sequence[int]
    """[K] the student's tokens of each chunk."""
    teacher_counts: Sequence[int]
    """[K] the teacher's."""
    spelt: Sequence[bool]
    """[K] True if the student's tokens are the spelling of one of the teacher's."""
    last_ids: Sequence[int]
    """[K] the teacher's last token of each chunk if the spelling of another token begins with its own, else -1."""
    text_logprobs: Sequence[float]
    """[N] log-probs of the text under the teacher, given the text before: in a spelt chunk of each token of the student's; in any other
    of the whole chunk, at its first token, and 0 at the others. What goes on with the teacher's last token before counts only within
    a chunk."""

    @property
    def nbytes(self) -> int:
        return len(self.hidden) + 13 * len(self.student_counts) + 4 * len(self.text_logprobs)

    @property
    def size(self) -> str:
        return f"{sum(self.student_counts)} in {len(self.student_counts)} chunks (hidden width {self.hidden_size})"

    def fits(self, num: int, itemsize: int) -> bool:
        columns = (self.student_counts, self.teacher_counts, self.spelt, self.last_ids)
        return (
            {len(column) for column in columns} == {len(self.student_counts)}
            and all(count > 0 for count in (*self.student_counts, *self.teacher_counts))
            and all(last >= -1 for last in self.last_ids)
            and sum(self.student_counts) == num == len(self.text_logprobs)
            and self.hidden_size > 0
            and len(self.hidden) == sum(self.state_counts()) * self.hidden_size * itemsize
        )

    def state_counts(self) -> list[int]:
        """Return [K] the number of states of each chunk."""
        return [1 + (last >= 0 and count > 1) for last, count in zip(self.last_ids, self.teacher_counts, strict=True)]

    def head_key(self) -> str:
        return self.head

    @classmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        return 2 * hidden_size * itemsize + 17

    @classmethod
    def of_states(cls, states: TeacherStates) -> AlignedStates:
        import torch

        logq_M_U, ids = states.logprobs(), states.token_ids
        logq_M = logq_M_U.gather(1, torch.tensor(ids, dtype=torch.long)[:, None])[:, 0].tolist()
        sampled = ids if states.sampled_ids is None else states.sampled_ids
        alignment = states.alignment or Alignment((1,) * len(ids), (1,) * len(ids))
        starts = [0, *accumulate(alignment.teacher_counts)]
        places = [0, *accumulate(alignment.student_counts)]
        rows: list[int] = []
        spelt: list[bool] = []
        last_ids: list[int] = []
        text_logprobs: list[float] = []
        # Log of the probability that the teacher ends its token where the chunk before ends, given the text up to there.
        stay = 0.0
        for (start, stop), (place, end) in zip(pairwise(starts), pairwise(places), strict=True):
            last = stop - 1
            prefixes = _measure_prefixes(states.spelling, ids[last], logq_M_U[last]) or [logq_M[last]]
            own = tuple(sampled[place:end])
            is_spelt = stop - start == 1 and (states.spelling is None or own == states.spelling.tokens[ids[last]])
            if is_spelt:
                text_logprobs += [after - before for before, after in pairwise([-stay, *prefixes])]
            else:
                text_logprobs += [stay + sum(logq_M[start:last]) + prefixes[-1], *[0.0] * (len(own) - 1)]
            goes_on = states.spelling is not None and states.spelling.has_extensions(ids[last])
            rows += [start, last] if goes_on and last > start else [start]
            spelt.append(is_spelt)
            last_ids.append(ids[last] if goes_on else -1)
            stay = logq_M[last] - prefixes[-1]
        return cls(
            head=states.head,
            hidden_size=states.hidden_N_D.shape[1],
            hidden=states.hidden_N_D[rows].contiguous().view(torch.uint8).numpy().tobytes(),
            student_counts=alignment.student_counts,
            teacher_counts=alignment.teacher_counts,
            spelt=spelt,
            last_ids=last_ids,
            text_logprobs=text_logprobs,
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
        return [abs(was - now) for was, now in zip(logprobs, self.text_logprobs, strict=True)]


def _measure_prefixes(spelling: Spelling | None, token: int, logq_U: Tensor) -> list[float]:
    """Return for each part with which the spelling of one of the teacher's tokens begins the log-prob of all tokens whose spelling
    begins so, too; the last part is the whole spelling. Nothing is returned for a token without a spelling."""
    import torch

    if spelling is None:
        return []
    own = spelling.tokens[token]
    parts = (torch.from_numpy(spelling.find_tokens(own[:length])) for length in range(1, len(own) + 1))
    return [float(logq_U[ids].double().logsumexp(0)) for ids in parts]


def _build_block(head: str, rows: Sequence[ScoredRow], dtype: torch.dtype) -> AlignedRun:
    """Build the block of rows of one teacher."""
    import torch

    states: list[Tensor] = []
    columns: list[tuple[Tensor, ...]] = []
    num_states = 0
    for row in rows:
        answer: AlignedStates = row.answer
        behaviours = [row.rollout.behaviour_logprobs[position] for position in row.rollout.trained_positions]
        count_K = torch.tensor(answer.student_counts, dtype=torch.long)
        spelt_K = torch.tensor(answer.spelt, dtype=torch.bool)
        behaviour_N = torch.tensor(behaviours, dtype=torch.float64)
        text_N = torch.tensor(answer.text_logprobs, dtype=torch.float64)
        chunk_N = torch.repeat_interleave(torch.arange(len(count_K)), count_K)
        first_N = torch.ones(len(chunk_N), dtype=torch.bool)
        first_N[1:] = chunk_N[1:] != chunk_N[:-1]
        # Sums of log-probs in float64: the log-prob of a token is taken out of the sum that it is in.
        ratio_K = torch.zeros(len(count_K), dtype=torch.float64).index_add_(0, chunk_N, text_N - behaviour_N)
        logq_N = text_N.where(spelt_K[chunk_N], ratio_K[chunk_N] + behaviour_N)
        # The states of a chunk are one or two; those of the chunk before end where its own begin.
        state_count_K = torch.tensor(answer.state_counts(), dtype=torch.long)
        start_K = state_count_K.cumsum(0) - state_count_K + num_states
        before_K = torch.tensor([-1, *answer.last_ids][: len(count_K)], dtype=torch.long)
        states.append(bytes_to_states(bytearray(answer.hidden), answer.hidden_size, dtype))
        num_states += len(states[-1])
        columns.append(
            (
                first_N,
                spelt_K[chunk_N],
                count_K[chunk_N],
                logq_N.float(),
                start_K[chunk_N],
                before_K[chunk_N].where(first_N, -1),
            )
        )
    return AlignedRun(head, torch.cat(states), AlignedColumns(*map(torch.cat, zip(*columns, strict=True))))


@dataclass(frozen=True, slots=True)
class AlignedColumns:
    """Numbers of N tokens of the student's."""

    first_N: Tensor
    """True for the first token of its chunk."""
    spelt_N: Tensor
    """True if its chunk is the spelling of one of the teacher's tokens."""
    length_N: Tensor
    """The student's tokens of its chunk."""
    logq_N: Tensor
    """In a spelt chunk the teacher's log-prob of the token; in any other that of the chunk, less the log-probs with which the chunk's
    other tokens were sampled."""
    state_N: Tensor
    """Index of the state before its chunk. The state before that one predicts the teacher's last token before the chunk."""
    before_N: Tensor
    """The teacher's last token before the chunk, at the first token of a chunk where another token of the teacher's goes on with it; else
    -1."""

    def select_rows(self, rows: slice) -> AlignedColumns:
        """Return the numbers of some tokens."""
        parts = (self.first_N, self.spelt_N, self.length_N, self.logq_N, self.state_N, self.before_N)
        return AlignedColumns(*(column[rows] for column in parts))


@dataclass(frozen=True, slots=True)
class AlignedRun(Block):
    """Consecutive trained tokens with the answers of one teacher, whose head is only named."""

    head: str
    hidden_R_D: Tensor
    columns: AlignedColumns

    def __len__(self) -> int:
        return len(self.columns.first_N)

    def head_keys(self) -> tuple[str, ...]:
        return (self.head,)

    def with_heads(self, heads: Mapping[str, Head]) -> AlignedBlock:
        head = heads[self.head]
        assert head.tables is not None, "the head of a teacher with another tokenizer comes with tables"
        num_lists = len(fields(HeadTables))
        lists = head.tables[num_lists:].split(head.tables[:num_lists].tolist())
        tables = HeadTables(*(part.long() for part in lists))
        return AlignedBlock(self.hidden_R_D, self.columns, head.weight_V_D, tables, head.rule)


@dataclass(frozen=True, slots=True)
class HeadTables:
    """The lists of `opd.vocabularies.spelling.SpellingTables`, as tensors beside a head."""

    single_V: Tensor
    other_L: Tensor
    first_L: Tensor
    start_U: Tensor
    """[U + 1]"""
    extension_E: Tensor
    next_E: Tensor


@dataclass(frozen=True, slots=True)
class AlignedBlock(Block):
    """Consecutive trained tokens with the answers of one teacher, and its head."""

    hidden_R_D: Tensor
    columns: AlignedColumns
    head_U_D: Tensor
    tables: HeadTables
    rule: LogitRule = IDENTITY

    def __len__(self) -> int:
        return len(self.columns.first_N)

    def products(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return ((self.hidden_R_D, self.head_U_D),)

    def select_chunk(self, part: slice, vocab_size: int) -> AlignedLogits:
        import torch

        columns = self.columns.select_rows(part)
        # Each state is multiplied once, though several tokens may need it.
        before_C = columns.state_N[columns.before_N >= 0] - 1
        needed_R = torch.cat([columns.state_N, before_C]).unique()
        head_U_D = self.head_U_D[: len(self.tables.start_U) - 1]
        logits_R_U = self.rule.apply(self.hidden_R_D[needed_R].to(head_U_D.dtype) @ head_U_D.T)
        columns = replace(columns, state_N=torch.searchsorted(needed_R, columns.state_N))
        return AlignedLogits(logits_R_U, columns, self.tables, vocab_size)


@dataclass(frozen=True, slots=True)
class AlignedLogits(BlockChunk):
    """The teacher's logits at C tokens, in its own ids."""

    logits_R_U: Tensor
    """At the states that the tokens of a chunk of the loss need; those of two neighbours stay neighbours."""
    columns: AlignedColumns
    """`state_N` is an index among these states."""
    tables: HeadTables
    vocab_size: int

    def select_rows(self, rows: slice) -> AlignedLogits:
        return replace(self, columns=self.columns.select_rows(rows))

    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> AlignedChunk:
        logq_C_V = self._spell_logprobs(dtype)
        if bool((self.columns.before_N >= 0).any()):
            logq_C_V = self._add_extensions(logq_C_V)
        columns = self.columns
        return AlignedChunk(
            logq_C_V=logq_C_V,
            first_in_chunk_C=columns.first_N,
            spelt_C=columns.spelt_N,
            length_C=columns.length_N.to(dtype),
            logq_C=columns.logq_N.to(dtype),
        )

    def _spell_logprobs(self, dtype: torch.dtype) -> Tensor:
        """Return [C, V] for each of the student's tokens the log-prob of all of the teacher's whose spelling begins with it; -inf for a
        token with which none begins."""
        tables = self.tables
        logq_C_U = self.logits_R_U[self.columns.state_N].to(dtype).log_softmax(-1)
        single_V = tables.single_V[: self.vocab_size]
        logq_C_V = logq_C_U[:, single_V.clamp(min=0)].masked_fill_(single_V < 0, float("-inf"))
        if not len(tables.other_L):
            return logq_C_V
        begun_V = (single_V < 0).new_zeros(self.vocab_size).index_fill_(0, tables.first_L, True)
        p_C_L = logq_C_U[:, tables.other_L].exp()
        p_C_V = logq_C_V.new_zeros(logq_C_V.shape).scatter_add_(1, tables.first_L.expand_as(p_C_L), p_C_L)
        # A sum of numbers that are all too small counts as the smallest one that there is.
        others_C_V = p_C_V.clamp_(min=_smallest_normal(p_C_V)).log_().masked_fill_(~begun_V, float("-inf"))
        return logq_C_V.logaddexp(others_C_V)

    def _add_extensions(self, logq_C_V: Tensor) -> Tensor:
        """Return the log-probs [C, V] with what goes on with the teacher's last token.

        The teacher either ended this token or wrote a longer one that begins so. A softmax over these has the chances of both.
        """
        import torch

        tables, columns = self.tables, self.columns
        last_C = columns.before_N.clamp(min=0)
        start_C = tables.start_U[last_C]
        count_C = (tables.start_U[last_C + 1] - start_C).masked_fill(columns.before_N < 0, 0)
        row_E = torch.repeat_interleave(count_C)
        place_E = torch.arange(len(row_E), device=row_E.device) - (count_C.cumsum(0) - count_C - start_C)[row_E]
        next_E = tables.next_E[place_E]
        before_C = (columns.state_N - 1).clamp(min=0)
        own_C = self.logits_R_U[before_C, last_C].to(logq_C_V.dtype)
        longer_E = self.logits_R_U[before_C[row_E], tables.extension_E[place_E]].to(logq_C_V.dtype)
        most_C = own_C.scatter_reduce(0, row_E, longer_E, "amax")
        total_C = (own_C - most_C).exp().scatter_add(0, row_E, (longer_E - most_C[row_E]).exp()).log() + most_C
        place_CV = row_E * self.vocab_size + next_E
        p_E = (longer_E - total_C[row_E]).exp().clamp(min=_smallest_normal(longer_E))
        goes_on_C_V = torch.zeros_like(logq_C_V).flatten().scatter_add_(0, place_CV, p_E).view_as(logq_C_V)
        return (logq_C_V + (own_C - total_C)[:, None]).logaddexp(goes_on_C_V.log())


def _smallest_normal(values: Tensor) -> float:
    """Return the smallest normal number of a tensor's type."""
    import torch

    return torch.finfo(values.dtype).tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedChunk(TeacherChunk):
    """A teacher with another tokenizer at C tokens of the student's."""

    logq_C_V: Tensor
    """The teacher's log-probs of the student's tokens at the token's chunk, given the text before; -inf for tokens that are longer than
    the teacher's."""
    first_in_chunk_C: Tensor
    """True for the first token of its chunk."""
    spelt_C: Tensor
    """True if the chunk is the spelling of one of the teacher's tokens."""
    length_C: Tensor
    """The student's tokens of the chunk."""
    logq_C: Tensor
    """The numbers of `AlignedColumns.logq_N`."""

    def first_C(self) -> Tensor:
        """Return [C] the student's tokens that are likeliest under the teacher; -1, which is no token, where it does not say."""
        return self.logq_C_V.max(-1).indices.masked_fill(~(self.first_in_chunk_C & self.spelt_C), -1)
