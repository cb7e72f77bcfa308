"""Refusal of a teacher whose log-probs of its probe are not those that were recorded when it was registered."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from opd.errors import RunError

TOLERANCE = {"float32": 0.05, "bfloat16": 0.2}
"""Compute type -> largest mean difference, in nats."""


def refuse_other_weights(teacher: str, differences: Sequence[float], dtypes: tuple[str, str], directories: str) -> None:
    """Refuse a teacher whose log-probs differ too much. `differences`: of each token of the probe, nats; `dtypes`: the types in which
    both were computed, of which the larger tolerance holds; `directories`: those of the teacher's weights, in words.

    Raises: RunError.
    """
    gap, tolerance = fmean(differences), max(TOLERANCE[dtype] for dtype in dtypes)
    if not gap <= tolerance:  # a gap of NaN is refused too
        raise RunError(
            f"teacher {teacher}: log-probs differ by {gap:.3f} nats on average from those of its registration, "
            f"at most {tolerance} wanted: garbled or swapped weights under {directories}"
        )
