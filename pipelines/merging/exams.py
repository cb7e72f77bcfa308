"""The two exams that a merge is compared with: the student before training, and each domain's expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experts.adapter import open_full_model
from opd import loop
from opd.config import PipelineConfig
from opd.evaluation.evaluator import BEFORE, EXPERT, measure_experts, measure_student
from opd.live.interfaces import Display
from opd.records.scores import Evaluation, combine_evaluations
from opd.records.types import Teacher
from opd.rollouts.worker import can_swap, read_model_shape
from opd.run.paths import RunPaths
from pipelines.evaluation.known_exams import KnownExams
from pipelines.inputs.own_tokens import find_unexamined
from pipelines.inputs.read import Inputs, as_teacher


@dataclass(frozen=True, slots=True)
class StartingExams:
    """Takes the two exams of one run, each once.

    Results on disk are used if they were measured on these models. So are results of other runs that asked the same models the same
    questions in the same way.
    """

    parts: loop.Components
    config: PipelineConfig
    inputs: Inputs
    paths: RunPaths
    display: Display

    def measure_exams(self) -> tuple[Evaluation, Evaluation]:
        """Return the exam of the student before, and that of the experts; the engine holds the student afterwards."""
        inputs = self.inputs
        exam_store = KnownExams(self.config, inputs, self.paths.root, self.display.say)
        student = as_teacher(BEFORE, inputs.student, None)

        def run_student_exam(domains: Sequence[str]) -> Evaluation:
            self.display.doing("the exam of the student before the merge")
            return measure_student(self.parts.evaluator, domains, self.display.say)

        def reuse_student(domains: Sequence[str]) -> Evaluation:
            evaluation = self._announce_reuse(
                exam_store.measure_or_reuse(student.digest, domains, run_student_exam), student
            )
            return replace(evaluation, model=BEFORE, step=0, tokens=0)

        student_evaluation = self._measure_once("before", dict.fromkeys(inputs.exams, student.digest), reuse_student)
        if not inputs.teachers:
            return student_evaluation, Evaluation(model=EXPERT, scores={})

        def reuse_experts(domains: Sequence[str]) -> Evaluation:
            evaluations = [self._expert_exam(exam_store, domain, student_evaluation.accuracy) for domain in domains]
            if not evaluations:
                return Evaluation(model=EXPERT, scores={})
            evaluation = combine_evaluations(evaluations, EXPERT)
            if len(evaluation.cached) < len(domains):  # then the engine has held an expert
                self.parts.engine.load(self.config.student.model)
            return evaluation

        # The engine reads and writes the student's tokens, which say nothing to an expert with tokens of its own.
        strangers = find_unexamined(inputs.scoring)
        digests = {d: teacher.digest for d, teacher in inputs.teachers.items() if teacher.name not in strangers}
        for domain in (domain for domain in inputs.teachers if domain in inputs.exams and domain not in digests):
            teacher = inputs.teachers[domain]
            reason = "reads tokens of its own" if teacher.has_model else "only writes text, behind a server"
            self.display.say(f"expert {teacher.name} {reason}: it takes no exam on {domain}")
        return student_evaluation, self._measure_once("expert", digests, reuse_experts)

    def _measure_once(
        self, name: str, weights: Mapping[str, str], measure: Callable[[Sequence[str]], Evaluation]
    ) -> Evaluation:
        """Return the exam in the run directory, after measuring the domains that it lacks. `weights`: domain -> digest of the
        model that answers, for those in which one does."""
        file = self.paths.evaluation_file(name)
        stored = Evaluation.load(file) if file.exists() else None
        asked = [d for d in self.inputs.exams if d in weights]
        missing = [d for d in asked if not (stored and stored.covers(d, weights[d]))]
        if stored and not missing:
            return stored
        evaluation = measure(missing)
        evaluation = replace(evaluation, weights={domain: weights[domain] for domain in evaluation.scores})
        if stored:
            evaluation = combine_evaluations([stored, evaluation], evaluation.model)
        self.parts.reporter.evaluation(name, evaluation)
        return evaluation

    def _expert_exam(self, exam_store: KnownExams, domain: str, student_accuracy: Mapping[str, float]) -> Evaluation:
        """Return the exam of one domain's expert; `student_accuracy` is by domain."""
        teacher, scratch = self.inputs.teachers[domain], self.paths.scratch_path("expert")

        def measure(domains: Sequence[str]) -> Evaluation:
            self.display.doing(f"the exam of expert {teacher.name} on {domain}")
            return measure_experts(
                self._load_expert,
                self.parts.evaluator,
                student_accuracy,
                dict.fromkeys(domains, teacher),
                lambda model: open_full_model(model, scratch),
                self.display.say,
            )

        return self._announce_reuse(exam_store.measure_or_reuse(teacher.digest, [domain], measure), teacher)

    def _load_expert(self, directory: Path) -> None:
        """Have the engines hold an expert's model. They need to reach its files only if they cannot take its weights in place of the
        student's."""
        student = self.config.student.model
        if can_swap(read_model_shape(student), read_model_shape(directory)):
            self.parts.sync.hold(directory, shape_of=student)
        else:
            self.parts.engine.load(directory)

    def _announce_reuse(self, evaluation: Evaluation, teacher: Teacher) -> Evaluation:
        """Tell the user which results come from another run's exam. Returns the same evaluation."""
        for domain, source in evaluation.cached.items():
            self.display.say(
                f"{teacher.name}: {evaluation.scores[domain].accuracy:.3f} on {domain}, cached from {source}"
            )
        return evaluation
