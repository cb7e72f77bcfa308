"""What a person sees while a run goes on: a bar on a terminal, plain lines where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from opd.evaluation.scores import Evaluation
from opd.metrics import MetricsFile


class Display(Protocol):
    def say(self, line: str) -> None: ...

    def step(self, step: int, summary: str) -> None: ...


class _Lines:
    """About twenty lines over the whole run, and the last step."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total

    def say(self, line: str) -> None:
        self._console.print(escape(line), highlight=False, soft_wrap=True)

    def step(self, step: int, summary: str) -> None:
        if step == self._total or step % max(1, self._total // 20) == 0:
            self.say(f"step {step}/{self._total}  {summary}")


class _Bar:
    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total, completed=done)

    def say(self, line: str) -> None:
        self._progress.console.print(escape(line), highlight=False)

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
    """Implements `opd.interfaces.Reporter`: the metrics file, the evaluations' directory and the display."""

    def __init__(self, metrics: MetricsFile, evaluations: Path, shown: Display) -> None:
        self._metrics = metrics
        self._evaluations = evaluations
        self._shown = shown

    def evaluation(self, name: str, found: Evaluation) -> None:
        """Store an evaluation as NAME.json. Raises: OSError."""
        self._evaluations.mkdir(exist_ok=True)
        found.save(self._evaluations / f"{name}.json")

    def step(self, record: Mapping[str, Any]) -> None:
        """Store one step's record, then show it."""
        self._metrics.write(record)
        seconds = sum(record["phase_s"].values())
        parts = [
            f"loss {record['loss']:.4f}",
            f"{record['response_tokens'] / seconds:.0f} tok/s",
            f"gap {record['probe_gap']:.1e}",
        ]
        if "accuracy" in record:
            parts.append(f"accuracy {sum(record['accuracy'].values()) / len(record['accuracy']):.3f}")
        if record["quarantined"]:
            parts.append(f"quarantined {sum(record['quarantined'].values())}")
        for name in record.get("restarted", ()):
            self._shown.say(f"{name} died in step {record['step']} and was started again; its rows were scored again")
        self._shown.step(record["step"], "  ".join(parts))
