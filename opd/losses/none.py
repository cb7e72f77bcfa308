"""No divergence: no teacher is asked, and the student learns from `objective.reward` alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk, TeacherChunk


@dataclass(frozen=True, slots=True)
class NoDivergence:
    """The value 0 and the slope 0 at every token."""

    mixes: ClassVar[bool] = False

    def __call__(self, student: StudentChunk, teacher: TeacherChunk) -> Slope:
        return Slope(student.logp_C.new_zeros(len(student.logp_C)), student.p_C_V.new_zeros(student.p_C_V.shape))


class NoDivergenceConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = NoDivergence
    PAYLOADS: ClassVar[tuple[str, ...]] = ("none",)
    HAS_DIVERGENCE: ClassVar[bool] = False

    kind: Literal["none"]
    """Rewards alone."""
