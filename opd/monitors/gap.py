"""Log-probs of the sampled tokens that drift apart between engine and trainer, before `sync.tolerance` ends the run."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from opd.monitors.signal import WHOLE_STEP, Signal, SignalHistory
from opd.records.step import StepRecord


def _read(history: SignalHistory) -> Mapping[str, float]:
    gaps = [record.logprob_gap for record in history.last if _has_fresh_tokens(record)]
    return {WHOLE_STEP: fmean(gaps) / history.tolerance} if gaps else {}


def _has_fresh_tokens(record: StepRecord) -> bool:
    """Return True if the step trained on tokens of the weights that it began with: others tell nothing, and their gap stands as 0."""
    return not record.skipped and (not record.token_ages or "0" in record.token_ages)


SIGNAL = Signal(
    says="engine and trainer differ by {value:.2f} of sync.tolerance",
    advice="see docs/troubleshooting.md, `engine and trainer differ`",
    read=_read,
)
