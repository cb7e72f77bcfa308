"""Evaluation over a rollout engine, and the two accuracies that every merge is measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from opd.evaluation.verifiers import VERIFIERS
from opd.interfaces import Evaluator, RolloutEngine
from opd.types import Prompt, Teacher


@dataclass(frozen=True, slots=True)
class DomainExam:
    """Held-out prompts of one domain and the name of what judges the answers."""

    prompts: tuple[Prompt, ...]
    verifier: str


class EngineEvaluator:
    """Implements `opd.interfaces.Evaluator` for whatever weights the engine holds."""

    def __init__(self, engine: RolloutEngine, exams: Mapping[str, DomainExam]) -> None:
        self._engine = engine
        self._exams = dict(exams)

    def evaluate(self, domains: Sequence[str] | None = None) -> dict[str, float]:
        """Accuracy in 0..1 of the named domains (default: all that have an exam), in one batch."""
        chosen = {d: self._exams[d] for d in (domains if domains is not None else self._exams) if d in self._exams}
        prompts = [p for exam in chosen.values() for p in exam.prompts]
        scores: dict[str, list[float]] = {domain: [] for domain in chosen}
        for completion in self._engine.answer(prompts) if prompts else ():
            prompt = completion.prompt
            judge = VERIFIERS[chosen[prompt.domain].verifier]
            scores[prompt.domain].append(judge(completion.text, prompt.answer, prompt.metadata))
        return {domain: fmean(values) for domain, values in scores.items()}


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the merge starts from and aims at, per domain."""

    before: dict[str, float]
    expert: dict[str, float]


def measure_baseline(
    engine: RolloutEngine,
    evaluator: Evaluator,
    student_dir: Path,
    teachers: Mapping[str, Teacher],
    whole: Callable[[Teacher], AbstractContextManager[Path]],
    tell: Callable[[str], None],
) -> Baseline:
    """The student on every domain and each expert on its own; the engine holds the student again afterwards.

    `whole` gives the directory of a full model of a teacher while the engine reads it.
    """
    before = evaluator.evaluate()
    tell(
        f"before the merge: mean accuracy {fmean(before.values()):.3f} over {len(before)} domains"
        if before
        else "no domain has an exam"
    )
    expert: dict[str, float] = {}
    for domain, teacher in teachers.items():
        if domain in before:
            with whole(teacher) as directory:
                engine.load(directory)
            expert |= evaluator.evaluate([domain])
            tell(f"expert {teacher.name}: {expert[domain]:.3f} on {domain}, the student {before[domain]:.3f}")
    engine.load(student_dir)
    return Baseline(before, expert)
