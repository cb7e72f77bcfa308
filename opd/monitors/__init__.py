"""Signals that say that a merge goes wrong, and what is done about it. Names only: what only reads them imports no signal.

    a step's record ──▶ a signal reads it, and those before it ──▶ a limit is reached ──▶ warn: a line and the samples
                                                                                        ──▶ pause, stop: a checkpoint too, and the end

A signal is a function of the records alone, so a resume, which reads them again, goes on with the very same readings.
"""

SIGNALS = {
    "repetition": "opd.monitors.repetition:SIGNAL",
    "truncation": "opd.monitors.truncation:SIGNAL",
    "length": "opd.monitors.length:SIGNAL",
    "entropy": "opd.monitors.entropy:SIGNAL",
    "disagreement": "opd.monitors.disagreement:SIGNAL",
    "gap": "opd.monitors.gap:SIGNAL",
    "grad_norm": "opd.monitors.grad_norm:SIGNAL",
}
"""Key of the section `monitors` -> the `opd.monitors.signal.Signal` that it limits."""
