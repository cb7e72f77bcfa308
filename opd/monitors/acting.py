"""Reads every signal after each step and acts where a limit is reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite

from opd.config.monitors import Limits, MonitorsConfig
from opd.errors import Paused, RunError
from opd.files import storing
from opd.interfaces import Decoder
from opd.monitors import SIGNALS
from opd.monitors.alarms import Alarms, samples_of, sentence, signal_of
from opd.monitors.signal import History, Signal
from opd.records.scores import Evaluation
from opd.records.step import AlarmRecord, StepRecord
from opd.records.types import Rollout
from opd.run.paths import RunPaths
from opd.settings.named import imported
from opd.text import as_typed

Readings = Mapping[str, Mapping[str, float]]
"""Signal -> domain -> reading."""


class RunMonitors:
    """Implements `opd.interfaces.Monitors`. All that it remembers is in the records of the steps."""

    def __init__(self, limits: MonitorsConfig, paths: RunPaths, tokenizer: Decoder, tolerance: float) -> None:
        """`tolerance` is the run's `sync.tolerance`, nats."""
        self._limits: dict[str, Limits] = {name: getattr(limits, name) for name in SIGNALS}
        self._signals: dict[str, Signal] = {name: imported(place) for name, place in SIGNALS.items()}
        self._paths = paths
        self._tokenizer = tokenizer
        self._tolerance = tolerance
        self._expert_tokens: dict[str, float] = {}
        longest = max(one.over for one in self._limits.values())
        self._first: list[StepRecord] = []
        self._recent: deque[StepRecord] = deque(maxlen=longest + 1)
        self._longest = longest
        self._alarms: tuple[AlarmRecord, ...] = ()
        self._error: RunError | None = None

    def begin(self, records: Sequence[StepRecord], expert: Evaluation) -> None:
        """Take up the records of the steps that are done. Raises: RunError if a stop of the last one still holds."""
        self._expert_tokens = {
            domain: score.mean_tokens for domain, score in expert.scores.items() if score.mean_tokens
        }
        for record in records:
            self._remember(record)
        if not records:
            return
        step, self._alarms = records[-1].step, records[-1].alarms
        told = {alarm.key for alarm in self._alarms}
        still = [a for a in self._reached(self._readings(), step) if a.action == "stop" and a.key in told]
        if still:
            raise self._end(still, step)

    def judge(self, record: StepRecord, rollouts: Sequence[Rollout]) -> tuple[AlarmRecord, ...]:
        """The alarms of a step that is done; what those that begin saw is on disk. Raises: StorageError."""
        self._remember(record)
        readings = self._readings()
        self._alarms = self._reached(readings, record.step)
        begun = [alarm for alarm in self._alarms if alarm.since == record.step]
        if begun:
            self._store(begun, record.step, readings, rollouts)
        ending = [alarm for alarm in self._alarms if alarm.ends_after(record.step)]
        self._error = self._end(ending, record.step) if ending else None
        return self._alarms

    def verdict(self) -> RunError | None:
        """Why the run ends after the step that was judged last; None if it goes on."""
        return self._error

    def _remember(self, record: StepRecord) -> None:
        if len(self._first) < self._longest:
            self._first.append(record)
        self._recent.append(record)

    def _readings(self) -> Readings:
        found = {}
        recent = list(self._recent)
        for name, signal in self._signals.items():
            over = self._limits[name].over
            if len(recent) >= over:
                history = History(
                    first=self._first[:over],
                    before=recent[-over - 1 : -1],
                    last=recent[-over:],
                    expert_tokens=self._expert_tokens,
                    tolerance=self._tolerance,
                )
                found[name] = {domain: value for domain, value in signal.read(history).items() if isfinite(value)}
        return found

    def _reached(self, readings: Readings, step: int) -> tuple[AlarmRecord, ...]:
        since = {alarm.key: alarm.since for alarm in self._alarms}
        found = []
        for name, by_domain in readings.items():
            for domain, value in by_domain.items():
                reached = self._limits[name].reached(value)
                if reached:
                    action, limit = reached
                    begun = since.get((name, domain, action), step)
                    found.append(
                        AlarmRecord(signal=name, domain=domain, value=value, limit=limit, action=action, since=begun)
                    )
        return tuple(found)

    def _store(self, begun: Sequence[AlarmRecord], step: int, readings: Readings, rollouts: Sequence[Rollout]) -> None:
        samples = [sample for alarm in begun for sample in samples_of(alarm, rollouts, self._tokenizer)]
        found = Alarms(step=step, alarms=tuple(begun), samples=tuple(samples), readings=readings)
        with storing(self._paths.monitors):
            self._paths.monitors.mkdir(exist_ok=True)
            found.save(self._paths.alarms(step))

    def _end(self, ending: Sequence[AlarmRecord], step: int) -> RunError:
        """What the run ends with: the hardest of the alarms decide how."""
        stops = [alarm for alarm in ending if alarm.action == "stop"]
        changes = " ".join(
            f"--set monitors.{alarm.signal}.stop=null" for alarm in {a.signal: a for a in stops}.values()
        )
        lines = [
            f"step {step}: " + "; ".join(f"monitor {sentence(alarm)}" for alarm in ending),
            f"  saw:    {self._paths.alarms(max(alarm.since for alarm in ending))}, and the samples in {self._paths.page}",
            f"  intact: checkpoint of step {step}",
            "  fix:    " + "; ".join(dict.fromkeys(signal_of(alarm).advice for alarm in ending)),
            "  go on:  " + " ".join(["opd merge --resume", as_typed(self._paths.whole), changes]).strip(),
        ]
        return (RunError if stops else Paused)("\n".join(lines))
