"""Responses that grow beyond what the domain's expert writes.

A student that has not learned the form yet may begin far above its expert and come down, so the norm is the longer of the two:
the expert's mean answer in its exam, and the student's own mean in the run's first steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from opd.monitors.signal import Signal, SignalHistory, tokens_of_responses


def _read(history: SignalHistory) -> Mapping[str, float]:
    start = tokens_of_responses(history.first_records)
    norms = {d: max(tokens, start[d]) for d, tokens in history.expert_tokens.items() if d in start}
    return {d: tokens / norms[d] for d, tokens in tokens_of_responses(history.last).items() if norms.get(d)}


SIGNAL = Signal(
    says="responses are {value:.1f} times as long as the expert's answers, and as they were at the start",
    advice="look whether they still end as the expert's do; lower trainer.lr, or see docs/objectives.md",
    read=_read,
    shown_by=lambda rollout: float(len(rollout.response_ids)),
)
