"""Monitors: signals that a merge goes wrong, and what happens then. This module has only names, so it imports no signal.

    a step's record ──▶ a signal reads it, and those before it ──▶ a limit is reached ──▶ warn: a line and the samples
                                                                                        ──▶ pause, stop: a checkpoint too, and the end

A signal is a function of the records alone. A resume reads the same records, so it continues with the same readings.
"""

SIGNALS = {
    "repetition": "opd.monitors.signals:REPETITION",
    "truncation": "opd.monitors.signals:TRUNCATION",
    "length": "opd.monitors.signals:LENGTH",
    "entropy": "opd.monitors.signals:ENTROPY",
    "disagreement": "opd.monitors.signals:DISAGREEMENT",
    "draft": "opd.monitors.signals:STALE_DRAFT",
    "draft_cost": "opd.monitors.signals:DRAFT_COST",
    "gap": "opd.monitors.signals:GAP",
    "grad_norm": "opd.monitors.signals:GRAD_NORM",
}
"""Key of the section `monitors` -> the `opd.monitors.signals.Signal` that it limits."""
