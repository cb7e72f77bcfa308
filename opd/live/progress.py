"""The reporter of a run: it writes the metrics file and the evaluations, and passes numbers to sinks and the display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opd.interfaces import Sink
from opd.live.interfaces import Display
from opd.monitors.alarms import format_alarm, load_signal
from opd.records.scores import Evaluation
from opd.records.step import StepRecord
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths


class RunReporter:
    """Implements `opd.interfaces.Reporter`. The metrics file comes first, so that a sink never has a step that it lacks."""

    def __init__(self, metrics: MetricsFile, paths: RunPaths, shown: Display, sinks: Sequence[Sink] = ()) -> None:
        self._metrics = metrics
        self._paths = paths
        self._shown = shown
        self._sinks = sinks

    def phase(self, name: str) -> None:
        """Show that this phase of the step begins."""
        self._shown.doing(name)

    def evaluation(self, name: str, result: Evaluation) -> None:
        """Store an evaluation in the run directory. Raises: OSError."""
        self._paths.evaluation.mkdir(exist_ok=True)
        result.save(self._paths.evaluation_file(name))

    def step(self, record: StepRecord) -> None:
        """Store a step's record, pass it to the sinks, and show it."""
        self._metrics.write(record)
        for sink in self._sinks:
            sink.step(record)
        for line in describe_incidents(record):
            self._shown.say(line)
        self._shown.step(record)


def describe_incidents(record: StepRecord) -> Iterator[str]:
    """Yield a sentence for the user about each unusual thing in a step."""
    for domain, episodes in record.episodes.items():
        if episodes.broken:
            yield f"step {record.step}: {episodes.broken} of {episodes.episodes} episodes of domain {domain} broke: {episodes.error}"
        elif episodes.error:
            yield f"step {record.step}: a sub-agent of domain {domain} broke: {episodes.error}"
        if episodes.not_closed:
            yield (
                f"warning: step {record.step}: {episodes.not_closed} of {episodes.episodes} episodes of domain {domain} had an "
                f"environment that could not be closed, and count as they ended: {episodes.close_error}"
            )
        unanswered = episodes.guard.unanswered if episodes.guard else 0
        if unanswered:
            yield (
                f"warning: step {record.step}: the guard's judge did not answer about {unanswered} calls of domain "
                f"{domain}; guard.on_failure decided"
            )
    for domain, judged in record.reward.domains.items() if record.reward else ():
        if judged.failed:
            yield (
                f"step {record.step}: the verifier of {domain} failed on {judged.failed} of {judged.episodes} responses, "
                f"whose reward is 0: {judged.error}"
            )
    for alarm in record.alarms:
        if alarm.since == record.step:
            yield f"warning: step {record.step}: {format_alarm(alarm)}; {load_signal(alarm).advice}"
    for name in record.restarted:
        yield f"{name} died in step {record.step} and was started again; its rows were scored again"
