"""A gradient far above those of the steps before it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from opd.monitors.signal import WHOLE_STEP, Signal, SignalHistory


def _read(history: SignalHistory) -> Mapping[str, float]:
    norms = [record.grad_norm for record in history.earlier_records if not record.skipped]
    usual = median(norms) if len(history.earlier_records) == len(history.last) and norms else 0.0
    return {WHOLE_STEP: history.last[-1].grad_norm / usual} if usual else {}


SIGNAL = Signal(
    says="the gradient's norm is {value:.1f} times the median of the steps before",
    advice="lower trainer.lr or trainer.max_grad_norm if it happens again",
    read=_read,
)
