"""Objectives: one small file each, behind one dictionary from `objective.kind` to what computes it."""

from __future__ import annotations

from opd.config.objectives import ObjectiveConfig
from opd.losses.forward_kl import ForwardKL
from opd.losses.jsd import JSD
from opd.losses.objective import Objective
from opd.losses.reverse_kl import ReverseKL
from opd.losses.sampled import Sampled
from opd.losses.skew import Skew
from opd.losses.top_k import TopK

OBJECTIVES: dict[str, type] = {
    "reverse_kl": ReverseKL,
    "forward_kl": ForwardKL,
    "jsd": JSD,
    "skew": Skew,
    "sampled": Sampled,
    "top_k": TopK,
}


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective with the options that are its own: everything but `kind` and how it is computed and averaged."""
    options = config.model_dump(exclude={"kind", "chunk", "compile", "normalize", "baseline"})
    return OBJECTIVES[config.kind](**options)
