"""Log-probs of the sampled tokens that drift apart between engine and trainer, before `sync.tolerance` ends the run."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from opd.monitors.signal import WHOLE_STEP, History, Signal


def _read(history: History) -> Mapping[str, float]:
    return {WHOLE_STEP: fmean(record.logprob_gap for record in history.last) / history.tolerance}


SIGNAL = Signal(
    says="engine and trainer differ by {value:.2f} of sync.tolerance",
    advice="see docs/troubleshooting.md, `engine and trainer differ`",
    read=_read,
)
