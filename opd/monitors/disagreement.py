"""The student's mass off its teacher's first choice, by what it samples: what it never writes, reverse KL hardly teaches."""

from __future__ import annotations

from collections.abc import Mapping

from opd.monitors.signal import Signal, SignalHistory, mean_probability, means_of_tokens


def _read_signal(history: SignalHistory) -> Mapping[str, float]:
    return {domain: 1 - top for domain, top in means_of_tokens(history.last, "teacher_top1").items()}


SIGNAL = Signal(
    says="{value:.2f} of the student's tokens are not its teacher's first choice",
    advice="forward_kl also teaches what the student never writes (docs/objectives.md); `opd check` compares the two",
    read=_read_signal,
    shown_by=mean_probability,
)
