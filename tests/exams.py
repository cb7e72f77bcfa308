"""Stand-in for the engine, the evaluator and the reporter of a merge where its exams are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.live.interfaces import Display
from opd.live.progress import RunReporter
from opd.records.scores import DomainScore, Evaluation
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths


class Measuring:
    """An engine, an evaluator and a reporter that write down what they are asked for."""

    def __init__(self, paths: RunPaths, shown: Display) -> None:
        self.reporter = RunReporter(MetricsFile(paths.metrics), paths, shown)
        self.engine = self.evaluator = self.sync = self
        self.asked: list[str] = []
        """Models in the order in which they were loaded, held and examined."""
        self.exams: list[str] = []
        """Each exam's model and domains."""

    def load(self, model_dir: Path) -> None:
        self.asked.append(f"load {model_dir.name}")

    def hold(self, model_dir: Path, *, shape_of: Path) -> None:
        assert shape_of.name == "base", "the student's files are those that engines can reach"
        self.asked.append(f"hold {model_dir.name}")

    def evaluate(self, domains: Any, *, model: str, as_expert: bool = False) -> Evaluation:
        self.asked.append(model)
        self.exams.append(f"{model}: {', '.join(domains)}")
        score = DomainScore(accuracy=len(model) / 30, stderr=0.1, low=0.3, high=1 / 3, questions=6)
        return Evaluation(model=model, scores=dict.fromkeys(domains, score))
