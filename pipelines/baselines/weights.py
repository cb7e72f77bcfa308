"""Merges of weights: methods that make one model from the experts' tensors, without data and without training.

A method with a strength is tried with several strengths, and the best on validation prompts is reported, as a user of the
method would do. The validation prompts are the last of each domain's training prompts, never those of the exam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experts.model_dir import ModelInfo
from experts.weight_files import weight_tensors
from opd.config import PipelineConfig
from opd.errors import ModelError, PromptError
from opd.evaluation.evaluator import DomainExam
from opd.records.types import Prompt
from pipelines.baselines.mergekit import Recipe
from pipelines.inputs.prompts import refuse_unjudgeable
from pipelines.inputs.read import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMethod:
    label: str
    kind: str
    """mergekit's name of the method."""
    grid: tuple[float, ...] = ()
    """Strengths to try: the factor on the merged differences from the student. Empty: the method has none."""
    density: float | None = None
    """Share of each difference's numbers that is kept."""
    random: bool = False
    """True if the result depends on the seed."""

    def list_strengths(self) -> tuple[float | None, ...]:
        """Return the strengths to try; None stands for a method without strengths."""
        return self.grid or (None,)

    def mergekit_recipe(self, student: ModelInfo, experts: Sequence[Path], strength: float | None) -> Recipe:
        """Return mergekit's document: every expert counts the same; computed in float32, stored as the student is."""
        models = [{"model": str(path), "parameters": {"weight": 1.0}} for path in experts]
        recipe: Recipe = {"merge_method": self.kind, "models": models, "dtype": "float32", "out_dtype": student.dtype}
        if strength is not None:
            density = {} if self.density is None else {"density": self.density}
            recipe |= {"base_model": student.path, "parameters": {"lambda": strength, **density}}
        return recipe


WEIGHT_METHODS: dict[str, WeightMethod] = {
    "linear": WeightMethod(label="Linear", kind="linear"),
    "task_arithmetic": WeightMethod(
        label="Task arithmetic", kind="task_arithmetic", grid=(0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
    ),
    # The difference of each number is averaged over the experts that agree on its sign, so strengths begin higher.
    "ties": WeightMethod(label="TIES", kind="ties", grid=(0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0), density=0.2),
    "dare_ties": WeightMethod(
        label="DARE-TIES", kind="dare_ties", grid=(0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0), density=0.5, random=True
    ),
    # mergekit's `slerp` takes two models only; this method does the same for any number of them.
    "slerp": WeightMethod(label="SLERP", kind="multislerp"),
}


def check_one_architecture(method: str, inputs: Inputs) -> None:
    """Refuse experts whose tensors have other names or shapes than the student's. Raises: ModelError naming them."""
    student_shapes = _tensor_shapes(Path(inputs.student.path))
    misfits = {
        name: f"{name} ({e.info.architecture}, {e.info.parameters:,} parameters)"
        for name, e in inputs.experts.items()
        if (e.info.architecture, _tensor_shapes(Path(e.info.path))) != (inputs.student.architecture, student_shapes)
    }
    if misfits:
        raise ModelError.at(
            f"--method {method}",
            found=f"experts whose tensors are not the student's: {', '.join(misfits.values())}",
            wanted=f"one architecture: {inputs.student.architecture}, {inputs.student.parameters:,} parameters",
            fix="leave these experts out, or compare with off_policy or mixed_sft, which take any",
        )


def validation_exams(config: PipelineConfig, inputs: Inputs) -> dict[str, DomainExam]:
    """Return a validation exam for each domain with an exam, of as many questions, from the end of its training prompts.

    Raises: PromptError if a prompt has no answer that a verifier could use, or one that it may not judge.
    """
    exams = {}
    for domain, exam in inputs.exams.items():
        prompts = inputs.prompts[domain][-config.evaluate.samples :]
        if any(question.answer for question in exam.prompts):  # some verifiers need no answer
            _refuse_without_answer(domain, prompts)
        exams[domain] = DomainExam(tuple(prompts), exam.verifier)
        settings = config.domains[domain].eval
        assert settings is not None, "the domain has an exam"
        refuse_unjudgeable(f"domains.{domain}.prompts", exams[domain], settings)
    return exams


def _tensor_shapes(model_dir: Path) -> dict[str, list[int]]:
    return {name: tensor.shape for name, tensor in weight_tensors(model_dir).items()}


def _refuse_without_answer(domain: str, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        if not prompt.answer:
            raise PromptError.at(
                f"domains.{domain}.prompts: prompt {prompt.id}",
                found="no answer",
                wanted="an answer in each of the last training prompts, by which the strength is chosen",
                fix="add the column `answer`, or compare with linear or slerp, which have no strength",
            )
