"""Whether the teacher that a worker loaded is the one that was registered: it has to give the same few log-probs.

Asked through the scorer's own `score`, so that what is compared is what the student would be trained on. What a payload
tells of log-probs, its answers know (`Answer.differences`).
"""

from __future__ import annotations

from statistics import fmean

import torch

from opd.errors import RunError
from opd.stream.heads import Head
from opd.types import Rollout, Teacher
from teachers.scorers import Scorer, ScorerOptions

TOLERANCE = {"float32": 0.05, "bfloat16": 0.2}
"""Largest mean difference, nats, by the coarser of the two types that were computed in."""


def check_probe(scorer: Scorer, teacher: Teacher, options: ScorerOptions) -> None:
    """Raises: RunError if the teacher carries a probe and gives other log-probs, or none."""
    probe = teacher.probe
    if probe is None:
        return
    rollout = Rollout.to_score("probe", probe.token_ids[:1], probe.token_ids[1:])
    broken: dict[str, str] = {}
    rows = [row for batch in scorer.score(teacher, [rollout], broken) for row in batch]
    if broken:
        raise RunError(f"{broken[rollout.sample_id]} on the probe of its registration: garbled weights")
    (row,) = rows
    differences = row.answer.differences(
        rollout.trained_ids, probe.logprobs, getattr(torch, options.dtype), lambda: cut_head(scorer, teacher, options)
    )
    if not differences:  # a payload that tells nothing of log-probs
        return
    gap = fmean(differences)
    tolerance = max(TOLERANCE[options.dtype], TOLERANCE[probe.dtype])
    if not gap <= tolerance:  # NaN is not
        raise RunError(
            f"teacher {teacher.name}: log-probs differ by {gap:.3f} nats on average from those of its registration, "
            f"at most {tolerance} wanted: garbled or swapped weights under {_places(teacher)}"
        )


def _places(teacher: Teacher) -> str:
    return f"{teacher.model_dir}" + (f" or {teacher.adapter_dir}" if teacher.adapter_dir else "")


def cut_head(scorer: Scorer, teacher: Teacher, options: ScorerOptions) -> Head:
    """The teacher's output head without padding rows."""
    return Head(scorer.head(teacher)[: options.vocab_size], scorer.head_rule(teacher))
