"""Cross-entropy on tokens that the teacher wrote: -log p(y). A token that the student sampled has the value 0 and no gradient, because
nobody has said anything about it; a reward may teach it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from opd.config.objectives import ObjectiveConfig
from opd.losses.objective import Slope, StudentChunk

if TYPE_CHECKING:
    from opd.payloads.text import WrittenChunk


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Value: -log p(y) where the teacher wrote y."""

    mixes: ClassVar[bool] = False

    def __call__(self, student: StudentChunk, teacher: WrittenChunk) -> Slope:
        taught_C = teacher.taught_C.to(student.logp_C.dtype)
        p_slope_C_V = student.logp_C_V.new_zeros(student.logp_C_V.shape)
        # p_y df/dp_y of f = -log p_y is -1; through the softmax this gives the gradient p - 1 of the logit of y.
        p_slope_C_V.scatter_(1, student.token_C[:, None], -taught_C[:, None])
        return Slope(-student.logp_C * taught_C, p_slope_C_V)


class SFTConfig(ObjectiveConfig):
    OBJECTIVE: ClassVar[type[Any]] = CrossEntropy
    PAYLOADS: ClassVar[tuple[str, ...]] = ("text",)

    kind: Literal["sft"]
    """Cross-entropy on the answers of experts that only write text, see docs/text_only.md."""
