"""The two exams that a merge is compared with: the student before training, and each domain's expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experts.adapter import whole_model
from opd import loop
from opd.config import PipelineConfig
from opd.evaluation.evaluator import BEFORE, EXPERT, measure_before, measure_experts
from opd.live.interfaces import Display
from opd.records.scores import Evaluation, combine_evaluations
from opd.records.types import Teacher
from opd.rollouts.worker import can_swap, model_shape
from opd.run.paths import RunPaths
from pipelines.evaluation.known import KnownExams
from pipelines.inputs.read import Inputs, as_teacher


@dataclass(frozen=True, slots=True)
class StartingExams:
    """The two exams of one run.

    Each is taken once: results on disk are used if they were measured on these models, and so are results of other runs that asked
    the same models the same questions in the same way.
    """

    parts: loop.Parts
    config: PipelineConfig
    inputs: Inputs
    paths: RunPaths
    shown: Display

    def measure_exams(self) -> tuple[Evaluation, Evaluation]:
        """Return the exam of the student before, and that of the experts; the engine holds the student afterwards."""
        inputs = self.inputs
        known = KnownExams(self.config, inputs, self.paths.root, self.shown.say)
        student = as_teacher(BEFORE, inputs.student, None)

        def now(domains: Sequence[str]) -> Evaluation:
            self.shown.doing("the exam of the student before the merge")
            return measure_before(self.parts.evaluator, domains, self.shown.say)

        def start(domains: Sequence[str]) -> Evaluation:
            found = self._announce_reuse(known.measure_or_reuse(student.digest, domains, now), student)
            return replace(found, model=BEFORE, step=0, tokens=0)

        before = self._measure_once("before", dict.fromkeys(inputs.exams, student.digest), start)
        if not inputs.teachers:
            return before, Evaluation(model=EXPERT, scores={})

        def experts(domains: Sequence[str]) -> Evaluation:
            one = [self._expert_exam(known, domain, before.accuracy) for domain in domains]
            found = combine_evaluations(one, EXPERT)
            if len(found.cached) < len(domains):
                self.parts.engine.load(self.config.student.model)
            return found

        digests = {domain: teacher.digest for domain, teacher in inputs.teachers.items()}
        return before, self._measure_once("expert", digests, experts)

    def _measure_once(
        self, name: str, weights: Mapping[str, str], measure: Callable[[Sequence[str]], Evaluation]
    ) -> Evaluation:
        """Return the exam in the run directory, after measuring the domains that it lacks. `weights`: domain -> digest of the
        model that answers."""
        file = self.paths.evaluation_file(name)
        known = Evaluation.load(file) if file.exists() else None
        missing = [d for d in self.inputs.exams if not (known and known.is_of(d, weights[d]))]
        if known and not missing:
            return known
        found = measure(missing)
        found = replace(found, weights={domain: weights[domain] for domain in found.scores})
        if known:
            found = combine_evaluations([known, found], found.model)
        self.parts.reporter.evaluation(name, found)
        return found

    def _expert_exam(self, known: KnownExams, domain: str, before: Mapping[str, float]) -> Evaluation:
        """Return the exam of one domain's expert; `student_accuracy` is by domain."""
        teacher, scratch = self.inputs.teachers[domain], self.paths.scratch_path("expert")

        def measure(domains: Sequence[str]) -> Evaluation:
            self.shown.doing(f"the exam of expert {teacher.name} on {domain}")
            return measure_experts(
                self._load_expert,
                self.parts.evaluator,
                before,
                dict.fromkeys(domains, teacher),
                lambda model: whole_model(model, scratch),
                self.shown.say,
            )

        return self._announce_reuse(known.measure_or_reuse(teacher.digest, [domain], measure), teacher)

    def _load_expert(self, directory: Path) -> None:
        """Have the engines hold an expert's model. They need to reach its files only if they cannot take its weights in place of the
        student's."""
        student = self.config.student.model
        if can_swap(model_shape(student), model_shape(directory)):
            self.parts.sync.hold(directory, like=student)
        else:
            self.parts.engine.load(directory)

    def _announce_reuse(self, found: Evaluation, who: Teacher) -> Evaluation:
        """Tell the user which results come from another run's exam. Returns the same evaluation."""
        for domain, source in found.cached.items():
            self.shown.say(f"{who.name}: {found.scores[domain].accuracy:.3f} on {domain}, cached from {source}")
        return found
