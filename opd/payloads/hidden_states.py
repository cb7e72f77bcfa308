"""Payload `hidden_states`: the teacher's last hidden state at each position. Output head and logit rule make its whole distribution of
it.

Shapes: N tokens of a block, C of a chunk, D or E a teacher's hidden width, V vocabulary rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from opd.interfaces import ScoredRow
from opd.losses.blocks import Block, BlockChunk
from opd.losses.objective import TeacherChunk, likeliest_token, token_entropy
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.payloads.answer import Answer, Columns, TeacherStates

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.models.heads import Head


@dataclass(frozen=True, slots=True)
class HiddenStates(Answer):
    """A teacher's hidden states at the trained tokens of one response."""

    GROUP: ClassVar[Columns] = (("head", pa.string()), ("hidden_size", pa.int32()))
    ROW: ClassVar[Columns] = (("hidden", pa.large_binary()),)
    SENDS_HEADS: ClassVar[bool] = True

    head: str
    """Content hash of the teacher's output head; the matrix itself travels once, apart from the rows. `OWN_HEAD` in rows that the
    trainer makes itself."""
    hidden_size: int
    """D, the teacher's hidden width."""
    hidden: memoryview | bytes
    """[N, D] little-endian, in the stream's dtype: the teacher's last hidden state after the final norm, at the
    position that predicts trained token n (one before it)."""

    @property
    def nbytes(self) -> int:
        return len(self.hidden)

    @property
    def size(self) -> str:
        return f"{len(self.hidden)} (hidden width {self.hidden_size})"

    def fits(self, num: int, itemsize: int) -> bool:
        return self.hidden_size > 0 and len(self.hidden) == num * self.hidden_size * itemsize

    def select_tokens(self, part: slice, num: int) -> HiddenStates:
        width = len(self.hidden) // max(1, num)
        return replace(self, hidden=self.hidden[part.start * width : part.stop * width])

    def head_key(self) -> str:
        return self.head

    @classmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        return hidden_size * itemsize

    @classmethod
    def of_states(cls, states: TeacherStates) -> HiddenStates:
        return cls.from_states(states.hidden_N_D, states.head)

    @classmethod
    def from_states(cls, hidden_N_D: Tensor, head: str) -> HiddenStates:
        """Make the answer of a teacher; `head` is the hash of its output head."""
        import torch

        return cls(head, hidden_N_D.shape[1], hidden_N_D.contiguous().view(torch.uint8).numpy().tobytes())

    def states(self, dtype: torch.dtype) -> Tensor:
        """Return [N, D] the states as a tensor."""
        # A copy: the stream's buffer is read-only shared memory, which torch does not accept silently.
        return bytes_to_states(bytearray(self.hidden), self.hidden_size, dtype)

    def logprobs(self, token_ids: Sequence[int], dtype: torch.dtype, head: Head) -> Tensor:
        """Return [N] the teacher's log-prob of each trained token; `head` is cut to the vocabulary."""
        import torch

        from opd.losses.logits import token_logprobs

        return token_logprobs(self.states(dtype), head.weight_V_D, torch.tensor(token_ids), head.rule)

    @classmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        runs: list[tuple[tuple[tuple[str, float], ...], list[list[HiddenStates]]]] = []
        for scored in samples:
            kind = tuple((row.answer.head, row.weight) for row in scored)
            # Consecutive samples of the same teachers become one block, so that products with heads are few and large.
            if not runs or runs[-1][0] != kind:
                runs.append((kind, [[] for _ in scored]))
            for parts, row in zip(runs[-1][1], scored, strict=True):
                parts.append(row.answer)
        return tuple(
            HiddenRun(
                heads=tuple(head for head, _ in kind),
                weights=_normalise_weights([weight for _, weight in kind]),
                hidden=tuple(_join_states(parts, dtype) for parts in columns),
            )
            for kind, columns in runs
        )

    def gap(self, reference: Answer, num: int, dtype: torch.dtype) -> float:
        assert isinstance(reference, HiddenStates)
        own_N, reference_N = (answer.states(dtype).flatten().float() for answer in (self, reference))
        return float((own_N - reference_N).norm() / reference_N.norm())

    def differences(
        self, token_ids: Sequence[int], logprobs: Sequence[float], dtype: torch.dtype, head: Callable[[], Head]
    ) -> list[float]:
        teacher_logprobs = self.logprobs(token_ids, dtype, head()).tolist()
        return [abs(was - now) for was, now in zip(logprobs, teacher_logprobs, strict=True)]


def _join_states(answers: Sequence[HiddenStates], dtype: torch.dtype) -> Tensor:
    """Return [N, D] the states of several responses, in one copy."""
    return bytes_to_states(bytearray().join(answer.hidden for answer in answers), answers[0].hidden_size, dtype)


def bytes_to_states(raw: bytearray, width: int, dtype: torch.dtype) -> Tensor:
    """Return [N, D] the bytes as a tensor, which shares their memory."""
    import torch

    if not raw:  # torch makes no tensor of an empty buffer
        return torch.zeros(0, width, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(-1, width)


def _normalise_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Divide the weights by their sum. They travel as float32, so that their sum is 1 only to about 1e-7."""
    return tuple(weight / sum(weights) for weight in weights)


@dataclass(frozen=True, slots=True)
class HiddenRun(Block):
    """Hidden states of consecutive trained tokens from the same teachers, while the teachers' heads are only named."""

    heads: tuple[str, ...]
    """Content hash of the head of each teacher; with several teachers the tokens have a mixture."""
    weights: tuple[float, ...]
    """Weight of each teacher; they add up to 1."""
    hidden: tuple[Tensor, ...]
    """For each teacher [N, D] its states; teachers may differ in width."""

    def __len__(self) -> int:
        return len(self.hidden[0])

    def head_keys(self) -> tuple[str, ...]:
        return self.heads

    def with_heads(self, heads: Mapping[str, Head]) -> TeacherBlock | MixtureBlock | ExtrapolatedBlock:
        teachers = tuple(
            TeacherBlock(hidden_N_D, heads[key].weight_V_D, heads[key].rule)
            for key, hidden_N_D in zip(self.heads, self.hidden, strict=True)
        )
        if len(teachers) == 1:
            return teachers[0]
        block_class = ExtrapolatedBlock if min(self.weights) < 0 else MixtureBlock
        return block_class(teachers, self.weights)


@dataclass(frozen=True, slots=True)
class TeacherBlock(Block):
    """Consecutive tokens with the hidden states of a single teacher, and its head."""

    hidden_N_E: Tensor
    head_V_E: Tensor
    rule: LogitRule = IDENTITY

    def __len__(self) -> int:
        return len(self.hidden_N_E)

    def products(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return ((self.hidden_N_E, self.head_V_E),)

    def logits(self, part: slice, vocab_size: int) -> Tensor:
        """Return [C, V] the teacher's logits of some tokens, in the head's type.

        A teacher's head has the type of the hidden states; the student's own head may have another one.
        """
        return self.rule.apply(self.hidden_N_E[part].to(self.head_V_E.dtype) @ self.head_V_E[:vocab_size].T)

    def select_chunk(self, part: slice, vocab_size: int) -> Logits:
        return Logits(self.logits(part, vocab_size))


@dataclass(frozen=True, slots=True)
class _TeacherGroupBlock(Block):
    """Consecutive tokens with the hidden states of several teachers, whose weights add up to 1."""

    teachers: tuple[TeacherBlock, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.teachers) == len(self.weights) and len({len(t) for t in self.teachers}) == 1
        assert abs(sum(self.weights) - 1) < 1e-6

    def __len__(self) -> int:
        return len(self.teachers[0])

    def products(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return tuple(pair for teacher in self.teachers for pair in teacher.products())

    def select_chunk(self, part: slice, vocab_size: int) -> TeacherGroupLogits:
        import torch

        return TeacherGroupLogits(
            tuple(teacher.logits(part, vocab_size) for teacher in self.teachers),
            tuple(torch.tensor(weight, dtype=torch.float64, device="cpu") for weight in self.weights),
            self.is_mixture,
        )


@dataclass(frozen=True, slots=True)
class MixtureBlock(_TeacherGroupBlock):
    """A mixture of teachers, with no weight below 0. Its objective is sum_k w_k KL(p || q_k) (DeepSeek-V4, arXiv 2606.19348).

    This equals KL(p || m) with the measure log m = sum_k w_k log q_k, which is not normalised.
    """

    is_mixture: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _TeacherGroupBlock.__post_init__(self)
        assert min(self.weights) >= 0


@dataclass(frozen=True, slots=True)
class ExtrapolatedBlock(_TeacherGroupBlock):
    """A target beyond the experts: the single distribution prod_k q_k^w_k / Z, with one weight below 0.

    With the weights {expert: lambda, start student: 1 - lambda}, a student that minimises KL(p || target) maximises
    lambda E[log q - log start] - KL(p || start) at each state (G-OPD, arXiv 2602.12125). A sum of other divergences with a
    negative weight has no minimum. So every objective sees the normalised target, as if one teacher had given it.
    """


@dataclass(frozen=True, slots=True)
class Logits(BlockChunk):
    """Logits of one distribution at C tokens, which `view_chunk` normalises."""

    compiles: ClassVar[bool] = True

    logits_C_V: Tensor

    def select_rows(self, rows: slice) -> Logits:
        return Logits(self.logits_C_V[rows])

    def pad_rows(self, rows: int) -> Logits:
        from opd.losses.logits import pad_rows

        return Logits(pad_rows(self.logits_C_V, rows))

    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> WholeChunk:
        return _whole_distribution(self.logits_C_V.to(dtype).log_softmax(-1), token_C, is_mixture=False)


@dataclass(frozen=True, slots=True)
class TeacherGroupLogits(BlockChunk):
    """Logits of several teachers at C tokens. Their weighted sum is elementwise, so that it is compiled with the rest."""

    compiles: ClassVar[bool] = True

    logits: tuple[Tensor, ...]
    """For each teacher [C, V]."""
    weights: tuple[Tensor, ...]
    """For each teacher a scalar on the CPU. A number would be compiled in, and other weights would be compiled once more."""
    is_mixture: bool

    def select_rows(self, rows: slice) -> TeacherGroupLogits:
        return replace(self, logits=tuple(logits_C_V[rows] for logits_C_V in self.logits))

    def pad_rows(self, rows: int) -> TeacherGroupLogits:
        from opd.losses.logits import pad_rows

        return replace(self, logits=tuple(pad_rows(logits_C_V, rows) for logits_C_V in self.logits))

    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> WholeChunk:
        from opd.losses.logits import upcast_for_loss

        def weigh_logits(weight: Tensor, logits_C_V: Tensor) -> Tensor:
            # Without a mixture the normalisers of single teachers fall out: they are the same for all ids.
            values_C_V = upcast_for_loss(logits_C_V)
            return weight * (values_C_V.log_softmax(-1) if self.is_mixture else values_C_V)

        sum_C_V = functools.reduce(operator.add, map(weigh_logits, self.weights, self.logits)).to(dtype)
        return _whole_distribution(
            sum_C_V if self.is_mixture else sum_C_V.log_softmax(-1), token_C, is_mixture=self.is_mixture
        )


@dataclass(frozen=True, slots=True)
class WholeChunk(TeacherChunk):
    """The teacher's whole distribution at C tokens."""

    logq_C_V: Tensor
    """Log-probs; for a mixture the log-measure, which is not normalised."""
    logq_C: Tensor
    """`logq_C_V` of the sampled ids."""
    is_mixture: bool
    baseline_C: None = None
    """This payload has no baseline: it would be needed before the forward pass, when log-probs are not computed yet."""

    def first_C(self) -> Tensor:
        return likeliest_token(self.logq_C_V)

    def q_C_V(self) -> Tensor:
        """Return the teacher's distribution; for a mixture the normalised product prod_k q_k^w_k."""
        return self._normalised_C_V().exp()

    def entropy_C(self) -> Tensor:
        logq_C_V = self._normalised_C_V()
        return token_entropy(logq_C_V.exp(), logq_C_V)

    def _normalised_C_V(self) -> Tensor:
        return self.logq_C_V.log_softmax(-1) if self.is_mixture else self.logq_C_V


def _whole_distribution(logq_C_V: Tensor, token_C: Tensor, *, is_mixture: bool) -> WholeChunk:
    return WholeChunk(logq_C_V, logq_C_V.gather(1, token_C[:, None])[:, 0], is_mixture)
