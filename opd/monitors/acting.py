"""After each step, read every signal, and act if a limit is reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite

from opd.config.monitors import MonitorsConfig, SignalLimits
from opd.errors import Paused, RunError
from opd.files import raise_storage_errors
from opd.interfaces import Decoder
from opd.monitors import SIGNALS
from opd.monitors.alarms import Alarms, format_alarm, load_signal, select_samples
from opd.monitors.signals import Signal, SignalHistory
from opd.records.scores import Evaluation
from opd.records.step import AlarmRecord, StepRecord
from opd.records.types import Rollout
from opd.run.paths import RunPaths
from opd.settings.user_objects import import_object
from opd.text import quote_for_shell

Readings = Mapping[str, Mapping[str, float]]
"""Signal -> domain -> reading."""


class RunMonitors:
    """Implements `opd.interfaces.Monitors`. Its whole state follows from the records of the steps."""

    def __init__(self, limits: MonitorsConfig, paths: RunPaths, tokenizer: Decoder, tolerance: float) -> None:
        """`tolerance` is the run's `sync.tolerance`, nats."""
        self._limits: dict[str, SignalLimits] = {name: getattr(limits, name) for name in SIGNALS}
        self._signals: dict[str, Signal] = {name: import_object(path) for name, path in SIGNALS.items()}
        self._paths = paths
        self._tokenizer = tokenizer
        self._tolerance = tolerance
        self._expert_tokens: dict[str, float] = {}
        self._longest = max(signal_limits.over for signal_limits in self._limits.values())
        self._first_records: list[StepRecord] = []
        self._recent: deque[StepRecord] = deque(maxlen=self._longest + 1)
        self._alarms: tuple[AlarmRecord, ...] = ()
        self._error: RunError | None = None

    def begin(self, records: Sequence[StepRecord], expert: Evaluation) -> None:
        """Read the records of the steps that are done. Raises: RunError if the last one stopped the run and its limit is still
        reached."""
        tokens = {domain: score.mean_tokens for domain, score in expert.scores.items()}
        self._expert_tokens = {domain: mean for domain, mean in tokens.items() if mean}
        for record in records:
            self._append_record(record)
        if not records:
            return
        step, self._alarms = records[-1].step, records[-1].alarms
        stopping_keys = {alarm.key for alarm in self._alarms if alarm.action == "stop"}
        standing = [alarm for alarm in self._find_alarms(self._read_signals(), step) if alarm.key in stopping_keys]
        if standing:
            raise self._build_end_error(standing, step)

    def judge(self, record: StepRecord, rollouts: Sequence[Rollout]) -> tuple[AlarmRecord, ...]:
        """Return the alarms of a step that is done. If any of them begin in it, their file is written. Raises: StorageError."""
        self._append_record(record)
        readings = self._read_signals()
        self._alarms = self._find_alarms(readings, record.step)
        begun = [alarm for alarm in self._alarms if alarm.since == record.step]
        if begun:
            self._save_alarms(begun, record.step, readings, rollouts)
        ending = [alarm for alarm in self._alarms if alarm.ends_after(record.step)]
        self._error = self._build_end_error(ending, record.step) if ending else None
        return self._alarms

    def end_error(self) -> RunError | None:
        """Return the error that ends the run after the last judged step; None if the run goes on."""
        return self._error

    def _append_record(self, record: StepRecord) -> None:
        if len(self._first_records) < self._longest:
            self._first_records.append(record)
        self._recent.append(record)

    def _read_signals(self) -> Readings:
        readings = {}
        recent = list(self._recent)
        for name, signal in self._signals.items():
            over = self._limits[name].over
            if len(recent) >= over:
                history = SignalHistory(
                    first=self._first_records[:over],
                    before=recent[-over - 1 : -1],
                    last=recent[-over:],
                    expert_tokens=self._expert_tokens,
                    tolerance=self._tolerance,
                )
                readings[name] = {domain: value for domain, value in signal.read(history).items() if isfinite(value)}
        return readings

    def _find_alarms(self, readings: Readings, step: int) -> tuple[AlarmRecord, ...]:
        since = {alarm.key: alarm.since for alarm in self._alarms}
        alarms = []
        for name, by_domain in readings.items():
            for domain, value in by_domain.items():
                reached = self._limits[name].find_reached(value)
                if reached:
                    action, limit = reached
                    begun = since.get((name, domain, action), step)
                    alarms.append(
                        AlarmRecord(signal=name, domain=domain, value=value, limit=limit, action=action, since=begun)
                    )
        return tuple(alarms)

    def _save_alarms(
        self, begun: Sequence[AlarmRecord], step: int, readings: Readings, rollouts: Sequence[Rollout]
    ) -> None:
        samples = [sample for alarm in begun for sample in select_samples(alarm, rollouts, self._tokenizer)]
        alarms = Alarms(step=step, alarms=tuple(begun), samples=tuple(samples), readings=readings)
        with raise_storage_errors(self._paths.monitors):
            self._paths.monitors.mkdir(exist_ok=True)
            alarms.save(self._paths.alarms_file(step))

    def _build_end_error(self, ending: Sequence[AlarmRecord], step: int) -> RunError:
        """Build the error that ends the run: RunError if any alarm is a stop, else Paused."""
        stops = [alarm for alarm in ending if alarm.action == "stop"]
        signals = dict.fromkeys(alarm.signal for alarm in stops)
        changes = " ".join(f"--set monitors.{signal}.stop=null" for signal in signals)
        lines = [
            f"step {step}: " + "; ".join(f"monitor {format_alarm(alarm)}" for alarm in ending),
            f"  saw:    {self._paths.alarms_file(max(alarm.since for alarm in ending))}, and the samples in {self._paths.report_page}",
            f"  intact: checkpoint of step {step}",
            "  fix:    " + "; ".join(dict.fromkeys(load_signal(alarm).advice for alarm in ending)),
            "  go on:  " + " ".join(["opd merge --resume", quote_for_shell(self._paths.merge_root), changes]).strip(),
        ]
        return (RunError if stops else Paused)("\n".join(lines))
