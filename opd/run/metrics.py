"""The file `metrics.jsonl`, with a JSON object in each line, and a stopwatch for the phases of a step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from opd.files import atomic_write_text
from opd.records.step import StepRecord


class MetricsFile:
    """The file to which each step's record is appended. A line is on disk before `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: StepRecord) -> None:
        """Append one record."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.to_json()) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[StepRecord]:
        """Return all whole records. A last line that was cut by a kill is left out.

        Raises: ValueError for a line that is no JSON, TypeError for one that is no record.
        """
        return [StepRecord.from_json(json.loads(line)) for line in self._read_lines()]

    def rewind(self, step: int) -> None:
        """Delete the records of steps after `step`, because a resume takes those steps again."""
        lines = [line for line in self._read_lines() if json.loads(line)["step"] <= step]
        atomic_write_text(self._path, "".join(f"{line}\n" for line in lines))

    def _read_lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8").split("\n")[:-1] if self._path.exists() else []


def count_steps_and_tokens(records: Sequence[StepRecord]) -> tuple[int, int]:
    """Return how many steps a merge has taken, and on how many response tokens it was trained in them."""
    return len(records), sum(map(count_trained_tokens, records))


def count_trained_tokens(record: StepRecord) -> int:
    """Return how many response tokens a step was trained on; 0 for a step that was skipped.

    Of episodes only the tokens with loss count, without those that an environment wrote.
    """
    if record.skipped:
        return 0
    return sum(domain.tokens for domain in record.domains.values()) if record.episodes else record.response_tokens


class PhaseClock:
    """Measures the seconds of each phase since the last `take_seconds`: `with clock("score"): ...`."""

    def __init__(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        """`on_phase` gets the name of each phase that begins."""
        self._seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._on_phase(phase)
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - start

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds by phase, and start again from zero."""
        seconds, self._seconds = self._seconds, {}
        return {phase: round(value, 4) for phase, value in seconds.items()}
