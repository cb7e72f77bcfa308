"""What a teacher said of consecutive tokens, in each of the forms in which it can come.

Shapes: N tokens, C of them, E a teacher's width, V vocabulary rows, K of a top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What an architecture does to head times hidden state: Cohere and Granite scale it, Gemma caps it."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, raw_C_V: Tensor) -> Tensor:
        """logits = softcap * tanh(scale * raw / softcap), or scale * raw without a cap."""
        if self.scale != 1.0:
            raw_C_V = raw_C_V * self.scale
        return raw_C_V if self.softcap is None else (raw_C_V / self.softcap).tanh() * self.softcap

    def pull_back(self, grad_C_V: Tensor, logits_C_V: Tensor) -> Tensor:
        """Gradient by the raw products, from the gradient by the logits."""
        if self.softcap is not None:
            grad_C_V = grad_C_V * (1 - (logits_C_V / self.softcap).square())
        return grad_C_V if self.scale == 1.0 else grad_C_V * self.scale

    @property
    def is_identity(self) -> bool:
        return self.scale == 1.0 and self.softcap is None


IDENTITY = LogitRule()


@dataclass(frozen=True, slots=True)
class TeacherBlock:
    """Consecutive tokens of a micro-batch scored exactly by one teacher."""

    hidden_N_E: Tensor
    head_V_E: Tensor
    rule: LogitRule = IDENTITY

    def __len__(self) -> int:
        return len(self.hidden_N_E)

    def logits(self, part: slice, vocab_size: int) -> Tensor:
        """[C, V] in the hidden states' type."""
        return self.rule.apply(self.hidden_N_E[part] @ self.head_V_E[:vocab_size].T)


@dataclass(frozen=True, slots=True)
class MixtureBlock:
    """Consecutive tokens scored by several teachers, weights summing to one: sum_k w_k KL(p || q_k).

    Equals KL against the unnormalised log-measure zbar - sum_k w_k lse_k with zbar = sum_k w_k z_k (DeepSeek-V4,
    arXiv 2606.19348, states the objective), so one [C, V] accumulator and one backward do for any number of teachers.
    """

    teachers: tuple[TeacherBlock, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.teachers) == len(self.weights) and len({len(t) for t in self.teachers}) == 1
        assert abs(sum(self.weights) - 1) < 1e-6 and min(self.weights) >= 0

    def __len__(self) -> int:
        return len(self.teachers[0])

    def folded(self, lse_N: Tensor) -> FoldedBlock | None:
        """One averaged hidden vector and one number a token instead of K vectors, if all teachers share one linear head.

        `lse_N` is sum_k w_k logsumexp(z_k), which each teacher can send along; it moves the value, not the gradient.
        """
        first = self.teachers[0]
        if any(t.head_V_E is not first.head_V_E or not t.rule.is_identity for t in self.teachers):
            return None
        hidden_N_E = torch.zeros_like(upcast(first.hidden_N_E))
        for weight, teacher in zip(self.weights, self.teachers, strict=True):
            hidden_N_E += weight * teacher.hidden_N_E
        return FoldedBlock(hidden_N_E.to(first.hidden_N_E.dtype), first.head_V_E, lse_N)


@dataclass(frozen=True, slots=True)
class FoldedBlock:
    """A mixture over one common head, see `MixtureBlock.folded`."""

    hidden_N_E: Tensor
    head_V_E: Tensor
    lse_N: Tensor
    """sum_k w_k logsumexp(z_k)."""

    def __len__(self) -> int:
        return len(self.hidden_N_E)


@dataclass(frozen=True, slots=True)
class SampledBlock:
    """Consecutive tokens of which the teacher said only the sampled token's log-prob."""

    logprob_N: Tensor
    baseline_N: Tensor | None = None
    """What `Sampled` takes off the advantage; it may depend on anything but the token's own response."""

    def __len__(self) -> int:
        return len(self.logprob_N)

    def part(self, part: slice) -> SampledBlock:
        """Some of the tokens."""
        return SampledBlock(self.logprob_N[part], None if self.baseline_N is None else self.baseline_N[part])


@dataclass(frozen=True, slots=True)
class TopKBlock:
    """Consecutive tokens of which the teacher gave its K likeliest tokens, true (not renormalised) log-probs."""

    ids_N_K: Tensor
    logprob_N_K: Tensor

    def __len__(self) -> int:
        return len(self.ids_N_K)

    def part(self, part: slice) -> TopKBlock:
        """Some of the tokens."""
        return TopKBlock(self.ids_N_K[part], self.logprob_N_K[part])


Block = TeacherBlock | MixtureBlock | FoldedBlock | SampledBlock | TopKBlock


def upcast(values: Tensor) -> Tensor:
    """To the type that the loss computes in: float32, or float64 as it is."""
    return values if values.dtype == torch.float64 else values.float()
