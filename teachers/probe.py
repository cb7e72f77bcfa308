"""Check that a worker loaded the model that was registered: it must give the log-probs that were recorded of its probe.

The probe goes through the scorer's own `score`, so the check covers the same answers that the student is trained on.
`Answer.differences` of each payload compares an answer with the recorded log-probs.
"""

from __future__ import annotations

import torch

from opd.errors import RunError
from opd.interfaces import Scorer
from opd.models.heads import Head
from opd.models.probe_gap import refuse_other_weights
from opd.records.types import Rollout, Teacher
from teachers.scorers import ScorerOptions


def check_probe(scorer: Scorer, teacher: Teacher, options: ScorerOptions) -> None:
    """Score the teacher's probe, if it has one. Raises: RunError if the log-probs differ, or if there are none."""
    probe = teacher.probe
    if probe is None:
        return
    rollout = Rollout.from_tokens("probe", probe.token_ids[:1], probe.token_ids[1:])
    broken: dict[str, str] = {}
    rows = [row for batch in scorer.score(teacher, [rollout], broken) for row in batch]
    if broken:
        raise RunError(f"{broken[rollout.sample_id]} on the probe of its registration: garbled weights")
    (row,) = rows
    differences = row.answer.differences(
        rollout.trained_ids, probe.logprobs, getattr(torch, options.dtype), lambda: cut_head(scorer, teacher, options)
    )
    if not differences:  # the payload holds no log-probs to compare
        return
    directories = f"{teacher.model_dir}" + (f" or {teacher.adapter_dir}" if teacher.adapter_dir else "")
    refuse_other_weights(teacher.name, differences, (options.dtype, probe.dtype), directories)


def cut_head(scorer: Scorer, teacher: Teacher, options: ScorerOptions) -> Head:
    """Return the teacher's output head without padding rows."""
    return Head(scorer.head(teacher)[: options.vocab_size], scorer.head_rule(teacher))
