"""Whether the teacher that a worker loaded is the one that was registered: it has to give the same few log-probs.

Asked through the scorer's own `score`, so that what is compared is what the student would be trained on. A `top_k`
payload does not tell every log-prob, only bounds: then the difference is the smallest that the bounds allow.
"""

from __future__ import annotations

from statistics import fmean

import torch
from torch import Tensor

from opd.errors import RunError
from opd.stream.schema import TargetRow
from opd.train.student import token_logprobs
from opd.types import Probe, Rollout, Segment, Teacher
from teachers.scorers import Scorer, ScorerOptions

TOLERANCE = {"float32": 0.05, "bfloat16": 0.2}
"""Largest mean difference, nats, by the coarser of the two types that were computed in."""


def check_probe(scorer: Scorer, teacher: Teacher, options: ScorerOptions) -> None:
    """Raises: RunError if the teacher carries a probe and gives other log-probs, or none."""
    probe = teacher.probe
    if probe is None:
        return
    rollout = _rollout(probe)
    broken: dict[str, str] = {}
    rows = [row for batch in scorer.score(teacher, [rollout], broken) for row in batch]
    if broken:
        raise RunError(f"{broken[rollout.sample_id]} on the probe of its registration: garbled weights")
    (row,) = rows
    gap = fmean(_differences(scorer, teacher, options, row, probe))
    tolerance = max(TOLERANCE[options.dtype], TOLERANCE[probe.dtype])
    if not gap <= tolerance:  # NaN is not
        raise RunError(
            f"teacher {teacher.name}: log-probs differ by {gap:.3f} nats on average from those of its registration, "
            f"at most {tolerance} wanted: garbled or swapped weights under {_places(teacher)}"
        )


def _places(teacher: Teacher) -> str:
    return f"{teacher.model_dir}" + (f" or {teacher.adapter_dir}" if teacher.adapter_dir else "")


def _rollout(probe: Probe) -> Rollout:
    ids, num = probe.token_ids, len(probe.logprobs)
    return Rollout(
        sample_id="probe",
        step=0,
        domain="probe",
        policy_version=0,
        prompt_ids=ids[:1],
        response_ids=ids[1:],
        behaviour_logprobs=(0.0,) * num,
        segments=(Segment(length=num, trained=False),),
        truncated=False,
    )


def _differences(scorer: Scorer, teacher: Teacher, options: ScorerOptions, row: TargetRow, probe: Probe) -> list[float]:
    """|registered - found| log-prob of each token, or the least that it can be."""
    if options.payload == "top_k":
        return _least_differences(row, probe)
    found = row.teacher_logprobs
    if options.payload == "hidden_states":
        found = hidden_logprobs(scorer, teacher, options, row).tolist()
    return [abs(was - now) for was, now in zip(probe.logprobs, found, strict=True)]


def hidden_logprobs(scorer: Scorer, teacher: Teacher, options: ScorerOptions, row: TargetRow) -> Tensor:
    """[R] the teacher's log-prob of each response token, from its hidden states and its head."""
    dtype = getattr(torch, options.dtype)
    hidden_R_D = torch.frombuffer(bytearray(row.hidden), dtype=dtype).view(-1, row.hidden_size)
    head_V_D = scorer.head(teacher)[: options.vocab_size]
    return token_logprobs(hidden_R_D, head_V_D, torch.tensor(row.response_ids), scorer.head_rule(teacher))


def _least_differences(row: TargetRow, probe: Probe) -> list[float]:
    """A token outside the likeliest is at most as likely as the last of them."""
    k = len(row.topk_ids) // len(probe.logprobs)
    differences = []
    for index, (token, was) in enumerate(zip(row.response_ids, probe.logprobs, strict=True)):
        part = slice(index * k, (index + 1) * k)
        known = dict(zip(row.topk_ids[part], row.topk_logprobs[part], strict=True))
        differences.append(abs(was - known[token]) if token in known else max(0.0, was - min(known.values())))
    return differences
