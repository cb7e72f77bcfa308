"""Responses that end at their limit and not by an end token."""

from __future__ import annotations

from collections.abc import Mapping

from opd.monitors.signal import Signal, SignalHistory, share_of_responses


def _read(history: SignalHistory) -> Mapping[str, float]:
    return share_of_responses(history.last, lambda record: record.truncated_by_domain)


SIGNAL = Signal(
    says="{value:.2f} of the responses end at their limit, not by an end token",
    advice="raise rollout.max_new_tokens (or max_model_len), or look at the end tokens",
    read=_read,
    shown_by=lambda rollout: float(rollout.truncated),
)
