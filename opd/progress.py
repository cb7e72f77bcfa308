"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from opd.evaluation.scores import Evaluation
from opd.interfaces import Display, Sink
from opd.metrics import MetricsFile
from opd.monitors.alarms import sentence, signal_of
from opd.run_dir import RunPaths
from opd.step_record import StepRecord
from opd.text import printable


class _Lines:
    """About twenty lines over the whole run, and the last step."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total

    def say(self, line: str) -> None:
        self._console.print(escape(printable(line)), highlight=False, soft_wrap=True)

    def step(self, step: int, summary: str) -> None:
        if step == self._total or step % max(1, self._total // 20) == 0:
            self.say(f"step {step}/{self._total}  {summary}")


class _Bar:
    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total, completed=done)

    def say(self, line: str) -> None:
        self._progress.console.print(escape(printable(line)), highlight=False)

    def step(self, step: int, summary: str) -> None:
        self._progress.update(self._task, completed=step, description=escape(summary))


@contextmanager
def display(total: int, done: int = 0) -> Iterator[Display]:
    """A display on standard error, so that standard output holds only results."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, total, done)


class RunReporter:
    """Implements `opd.interfaces.Reporter`: the metrics file, the evaluations' directory, other sinks and the display."""

    def __init__(self, metrics: MetricsFile, paths: RunPaths, shown: Display, sinks: Sequence[Sink] = ()) -> None:
        self._metrics = metrics
        self._paths = paths
        self._shown = shown
        self._sinks = sinks

    def evaluation(self, name: str, found: Evaluation) -> None:
        """Store an evaluation in the run directory. Raises: OSError."""
        self._paths.evaluation.mkdir(exist_ok=True)
        found.save(self._paths.exam(name))

    def step(self, record: StepRecord) -> None:
        """Store one step's record, then show it."""
        self._metrics.write(record)
        for sink in self._sinks:
            sink.step(record)
        for domain, found in record.episodes.items():
            if found.broken:
                self._shown.say(
                    f"step {record.step}: {found.broken} of {found.episodes} episodes of domain {domain} broke: {found.error}"
                )
            elif found.error:
                self._shown.say(f"step {record.step}: a sub-agent of domain {domain} broke: {found.error}")
        for domain, judged in record.reward.domains.items() if record.reward else ():
            if judged.failed:
                self._shown.say(
                    f"step {record.step}: the verifier of {domain} failed on {judged.failed} of {judged.episodes} responses, "
                    f"whose reward is 0: {judged.error}"
                )
        for alarm in record.alarms:
            if alarm.since == record.step:
                self._shown.say(f"warning: step {record.step}: {sentence(alarm)}; {signal_of(alarm).advice}")
        for name in record.restarted:
            self._shown.say(f"{name} died in step {record.step} and was started again; its rows were scored again")
        self._shown.step(record.step, "  ".join(_summary(record)))


def _summary(record: StepRecord) -> list[str]:
    """The parts of the line that shows a step."""
    parts = [
        f"loss {record.loss:.4f}",
        f"{record.response_tokens / record.seconds:.0f} tok/s",
        f"gap {record.probe_gap:.1e}",
    ]
    if record.accuracy:
        parts.append(f"accuracy {sum(record.accuracy.values()) / len(record.accuracy):.3f}")
    rewards = _rewards(record)
    if rewards:
        parts.append(f"reward {sum(rewards) / len(rewards):.3f}")
    if record.quarantined:
        parts.append(f"quarantined {sum(record.quarantined.values())}")
    return parts


def _rewards(record: StepRecord) -> list[float]:
    """The mean reward of each domain that has one."""
    if record.reward is not None:
        return [found.reward for found in record.reward.domains.values() if found.episodes]
    return [found.reward for found in record.episodes.values() if found.reward is not None]
