"""Alarms of a merge's monitors: a row for each alarm, from the step in which it began to the last one that had it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from opd.monitors.alarms import format_alarm, load_signal
from opd.monitors.signals import WHOLE_STEP
from opd.records.step import AlarmRecord
from opd.report.run import RunFiles


def alarm_rows(run: RunFiles) -> list[dict[str, Any]]:
    """Return a row for each alarm, in the order in which they began.

    A row has signal, domain (empty for all), action, limit, first and last step, the worst reading (`worst`, and in words
    `says`), `advice`, samples of the step in which it began, and `ended`, whether it ended the merge.
    """
    alarms: dict[tuple[str, str, str, int], list[tuple[int, AlarmRecord]]] = {}
    for record in run.records:
        for alarm in record.alarms:
            alarms.setdefault((*alarm.key, alarm.since), []).append((record.step, alarm))
    return [_alarm_row(history, run) for history in alarms.values()]


def _alarm_row(history: list[tuple[int, AlarmRecord]], run: RunFiles) -> dict[str, Any]:
    last_step = history[-1][0]
    worst = max((alarm for _, alarm in history), key=lambda alarm: alarm.value)
    file = run.alarms.get(worst.since)
    samples = (
        [s for s in file.samples if s.signal == worst.signal and worst.domain in (WHOLE_STEP, s.domain)] if file else []
    )
    return {
        "signal": worst.signal,
        "domain": worst.domain,
        "action": worst.action,
        "limit": worst.limit,
        "from_step": worst.since,
        "to_step": last_step,
        "worst": worst.value,
        "says": format_alarm(worst),
        "advice": load_signal(worst).advice,
        "ended": last_step == run.records[-1].step and history[-1][1].ends_after(last_step),
        "samples": [asdict(sample) for sample in samples],
    }
