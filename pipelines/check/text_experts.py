"""What `opd check` finds out about experts that only write text: whether each answers one prompt, and whether that answer is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from opd.config import PipelineConfig
from opd.evaluation.evaluator import judge_text
from opd.text import Tell
from pipelines.build import prove_texts
from pipelines.inputs.read import Inputs
from pipelines.routes import text_routes
from teachers.texts.teaching import FirstAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredText:
    """One expert that only writes text, in one domain."""

    expert: str
    first: FirstAnswer
    score: float | None
    """Of the answer by the domain's verifier; None without an exam, or if the prompt's row has nothing to compare it with."""
    error: str = ""
    """The traceback if the verifier raised."""

    def describe(self) -> str:
        """Return the figures as one line."""
        answer = self.first.answer
        tokens = f", {answer.completion_tokens} tokens by its own count" if answer.completion_tokens else ""
        cut = "" if answer.finished else ", cut at rollout.max_new_tokens"
        verdict = "nothing says whether it is right"
        if self.error:
            verdict = f"the verifier raised: {self.error.strip().splitlines()[-1]}"
        elif self.score is not None:
            verdict = f"the verifier's score is {self.score:g}"
        return (
            f"{self.first.domain}: expert {self.expert} answers as {answer.model}: prompt {answer.prompt_id} in {self.first.seconds:.1f} s, "
            f"{len(answer.text)} characters{tokens}{cut}; {verdict}"
        )


def measure_texts(config: PipelineConfig, inputs: Inputs, tell: Tell) -> Sequence[MeasuredText]:
    """Have every expert that only writes text answer one prompt. Raises: ConfigError for one that does not, as a merge does."""
    texts = text_routes(config, inputs.routes)
    if not texts:
        return ()
    tell(f"asking experts that only write text: {', '.join(sorted({expert for expert, _ in texts.values()}))}")
    with TemporaryDirectory(prefix="opd-check-") as scratch:
        answers = prove_texts(config, inputs, Path(scratch) / "texts.jsonl")
    return tuple(_judge_answer(inputs, texts[first.domain][0], first) for first in answers)


def _judge_answer(inputs: Inputs, expert: str, first: FirstAnswer) -> MeasuredText:
    exam, prompt = inputs.exams.get(first.domain), first.prompt
    if exam is None or exam.verifier.problem(prompt.answer, prompt.metadata):
        return MeasuredText(expert=expert, first=first, score=None)
    score, error = judge_text(exam.verifier, first.answer.text, prompt)
    return MeasuredText(expert=expert, first=first, score=score, error=error)
