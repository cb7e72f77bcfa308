"""Responses that run into a loop: the sign of a collapse, which a teacher that loops itself teaches within a few steps."""

from __future__ import annotations

from collections.abc import Mapping

from opd.monitors.signal import Signal, SignalHistory, share_of_responses
from opd.records.tails import measure_repetition
from opd.records.types import Rollout


def _read(history: SignalHistory) -> Mapping[str, float]:
    return share_of_responses(history.last, lambda record: record.looping_by_domain)


def _shown_by(rollout: Rollout) -> float:
    return measure_repetition(rollout.response_ids)


SIGNAL = Signal(
    says="{value:.2f} of the responses run to their limit in a loop",
    advice="ask whether the domain's expert loops too; else lower trainer.lr or leave the domain out",
    read=_read,
    shown_by=_shown_by,
)
