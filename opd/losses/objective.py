"""What an objective is: a function of the student's distribution at fixed states, and its slope.

Shapes: C tokens, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from opd.losses.blocks import TopKBlock


@dataclass(frozen=True, slots=True)
class StudentChunk:
    """C tokens as the student sees them; detached."""

    logp_C_V: Tensor
    p_C_V: Tensor
    token_C: Tensor
    """Sampled ids."""
    logp_C: Tensor
    """Log-prob of the sampled ids."""
    behaviour_C: Tensor
    """Log-prob of the sampled ids when they were sampled."""
    weight_C: Tensor


@dataclass(frozen=True, slots=True)
class TeacherChunk:
    """The same C tokens as the teacher sees them; what its payload does not hold is None."""

    logq_C_V: Tensor | None
    """Log-probs; for a mixture the unnormalised log-measure."""
    logq_C: Tensor | None
    """Log-prob of the sampled ids."""
    topk: TopKBlock | None
    baseline_C: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Slope:
    """An objective on C tokens: f(p), p * df/dp, and what else it can tell of each token."""

    value_C: Tensor
    p_slope_C_V: Tensor
    clipped_C: Tensor | None = None
    """Whether a clip was active."""
    student_mass_C: Tensor | None = None
    """Student's probability of the tokens that the teacher gave."""
    teacher_mass_C: Tensor | None = None


class Objective(Protocol):
    """One way to measure how far the student is from the teacher."""

    mixes: ClassVar[bool]
    """Whether a mixture's log-measure can stand for its teachers; true of sums over teachers only."""

    def __call__(self, student: StudentChunk, teacher: TeacherChunk) -> Slope: ...
