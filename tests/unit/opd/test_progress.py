"""What a step's record becomes on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opd.metrics import MetricsFile
from opd.progress import RunReporter


class Heard:
    """A display that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def step(self, step: int, summary: str) -> None:
        self.lines.append(f"{step}: {summary}")


def record(**changes: Any) -> dict[str, Any]:
    plain = {"step": 3, "loss": 0.5, "response_tokens": 20, "probe_gap": 1e-3, "quarantined": {}, "phase_s": {"a": 4.0}}
    return plain | changes


def test_a_step_is_stored_and_shown(tmp_path: Path) -> None:
    metrics, heard = MetricsFile(tmp_path / "metrics.jsonl"), Heard()
    RunReporter(metrics, heard).step(record(accuracy={"x": 0.25, "y": 0.75}, quarantined={"x": 2}))
    assert heard.lines == ["3: loss 0.5000  5 tok/s  gap 1.0e-03  accuracy 0.500  quarantined 2"]
    assert [r["step"] for r in metrics.read()] == [3]


def test_a_worker_that_was_started_again_is_told(tmp_path: Path) -> None:
    heard = Heard()
    RunReporter(MetricsFile(tmp_path / "metrics.jsonl"), heard).step(record(restarted=["teacher worker 1"]))
    assert heard.lines[0] == "teacher worker 1 died in step 3 and was started again; its rows were scored again"
    assert len(heard.lines) == 2


def test_other_sinks_get_every_record(tmp_path: Path) -> None:
    got: list[Any] = []

    class Sink:
        def step(self, taken: Mapping[str, Any]) -> None:
            assert [r["step"] for r in MetricsFile(tmp_path / "metrics.jsonl").read()] == [3], "the file comes first"
            got.append(taken)

    RunReporter(MetricsFile(tmp_path / "metrics.jsonl"), Heard(), [Sink()]).step(record())
    assert got == [record()]
