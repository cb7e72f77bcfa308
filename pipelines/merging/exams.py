"""The two exams that a merge is compared with: the student before training, and each domain's expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from experts.adapter import open_full_model
from opd import loop
from opd.cluster import LOCAL, ray_session
from opd.config import PipelineConfig
from opd.evaluation.evaluator import BEFORE, EXPERT, measure_experts, measure_student
from opd.live.interfaces import Display
from opd.records.scores import Evaluation, combine_evaluations
from opd.records.types import Teacher
from opd.rollouts.worker import can_swap, read_model_shape
from opd.run.paths import RunPaths
from pipelines.evaluation.known_exams import KnownExams
from pipelines.evaluation.models import Subject, evaluate_subjects, make_own_subject, with_room
from pipelines.inputs.own_tokens import find_text_experts
from pipelines.inputs.read import Inputs, as_teacher


def measure_own_exams(
    config: PipelineConfig, inputs: Inputs, paths: RunPaths, display: Display
) -> dict[str, Evaluation]:
    """Return domain -> exam of its expert, of experts that read tokens of their own.

    They cannot take the place of the student in the merge's engine, whose prompts and answers are in the student's tokens. So each has
    an engine of its own, before the merge's workers start. Exams that the run directory has are left out.
    """
    evaluations = {}
    file = paths.evaluation_file("expert")
    stored = Evaluation.load(file) if file.exists() else None
    for domain, exam in inputs.own_exams.items():
        teacher = inputs.teachers[domain]
        if stored is not None and stored.covers(domain, teacher.digest):
            continue
        info, exams = inputs.experts[teacher.name].info, {domain: exam}
        subject = make_own_subject(config, teacher, info, inputs.own_tokenizers[teacher.name], exams)

        def measure(_: Sequence[str], subject: Subject = subject) -> Evaluation:
            display.doing(f"the exam of expert {subject.model.name} in its own tokens")
            return evaluate_subjects(config, [subject], display.say)[subject.model.name]

        # Outside of this machine the cluster's nodes say on which GPUs answers are computed.
        is_local = config.cluster.address == LOCAL
        with nullcontext() if is_local else ray_session(config.cluster, config.rollout.workers):
            exam_store = KnownExams(with_room(config, subject), info, exams, paths.root, display.say)
        evaluations[domain] = exam_store.measure_or_reuse(teacher.digest, [domain], measure)
    return evaluations


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
    own: Mapping[str, Evaluation] = field(default_factory=dict)
    """Result of `measure_own_exams`."""

    def measure_exams(self) -> tuple[Evaluation, Evaluation]:
        """Return the exam of the student before, and that of the experts; the engine holds the student afterwards."""
        inputs = self.inputs
        exam_store, expert_store = (
            KnownExams(self.config, inputs.student, exams, self.paths.root, self.display.say)
            for exams in (inputs.exams, {**inputs.exams, **inputs.expert_exams})
        )
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
            evaluations = [self._expert_exam(expert_store, domain, student_evaluation.accuracy) for domain in domains]
            if not evaluations:
                return Evaluation(model=EXPERT, scores={})
            evaluation = combine_evaluations(evaluations, EXPERT)
            if len(evaluation.cached.keys() | self.own.keys()) < len(domains):  # then the engine has held an expert
                self.parts.engine.load(self.config.student.model)
            return evaluation

        # Exams have the student's prompts: of an expert with a prompt of its own they would measure another model than the teacher.
        prompted, text_experts = self.config.teacher_prompts, find_text_experts(inputs.scoring)
        digests = {
            domain: teacher.digest
            for domain, teacher in inputs.teachers.items()
            if teacher.name not in text_experts and (domain in inputs.expert_exams or teacher.name not in prompted)
        }
        for domain, teacher in inputs.teachers.items():
            if domain in inputs.exams and domain not in digests:
                reason = "only writes text" if teacher.name in text_experts else "reads a prompt of its own"
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
        if domain in self.own:
            return self._announce_reuse(self.own[domain], teacher)

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
