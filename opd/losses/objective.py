"""What an objective is: a function of the student's distribution at fixed states, and its slope.

Shapes: C tokens, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def token_entropy(p_C_V: Tensor, logp_C_V: Tensor) -> Tensor:
    """[C] nats. `torch.special.entr` takes the logarithms anew, nine times as long on a CPU."""
    return -(p_C_V * logp_C_V).sum(-1)


def likeliest_token(values_C_V: Tensor) -> Tensor:
    """[C] place of the largest value, the one that `argmax` gives, in a third of its time on a CPU."""
    return values_C_V.max(-1).indices


@dataclass(frozen=True, slots=True)
class StudentChunk:
    """C tokens as the student sees them; detached."""

    logp_C_V: Tensor
    p_C_V: Tensor
    token_C: Tensor
    """Sampled ids."""
    logp_C: Tensor
    """Log-prob of the sampled ids."""
    sampling_C: Tensor
    """Log-prob of the sampled ids at the temperature at which they were sampled: `behaviour_C` where no step came between."""
    behaviour_C: Tensor
    """Log-prob of the sampled ids when they were sampled."""


class TeacherChunk:
    """The same C tokens as the teacher sees them. Each payload has a class of its own, whose fields objectives read."""

    __slots__ = ()

    def first_C(self) -> Tensor | None:
        """The teacher's likeliest token at each place; None where the payload does not tell."""
        return None

    def entropy_C(self) -> Tensor | None:
        """Entropy of the teacher's whole distribution, nats; None where the payload does not tell."""
        return None


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
