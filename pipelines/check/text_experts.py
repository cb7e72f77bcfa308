"""Findings of `opd check` about servers: whether each expert that only writes text answers one prompt, and rightly, and whether each
judge gives a score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from opd.config import PipelineConfig
from opd.text import Tell
from opd.verifiers import find_problem, judge_texts
from pipelines.build import prove_texts
from pipelines.inputs.judges import find_judges, prove_judges
from pipelines.inputs.read import Inputs
from pipelines.routes import text_routes
from teachers.texts.teaching import FirstAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredText:
    """One expert that only writes text, in one domain."""

    expert: str
    first: FirstAnswer
    score: float | None
    """The answer's score by the verifier of the domain; None without an exam, or if the prompt's row has nothing to compare it with."""
    error: str = ""
    """Reason why the verifier gave none, if it failed."""

    def describe(self) -> str:
        """Return the figures as one line."""
        answer = self.first.answer
        tokens = f", {answer.completion_tokens} tokens by its own count" if answer.completion_tokens else ""
        cut = "" if answer.finished else ", cut at rollout.max_new_tokens"
        verdict = "nothing says whether it is right"
        if self.error:
            verdict = f"the verifier failed: {self.error.strip().splitlines()[-1]}"
        elif self.score is not None:
            verdict = f"the verifier's score is {self.score:g}"
        return (
            f"{self.first.domain}: expert {self.expert} answers as {answer.model}: prompt {answer.prompt_id} in {self.first.seconds:.1f} s, "
            f"{len(answer.text)} characters{tokens}{cut}; {verdict}"
        )


def measure_judges(inputs: Inputs, tell: Tell) -> Iterator[str]:
    """Have every judge score one answer, and yield a line about each. Raises: ConfigError for one that gives no score, as a merge does."""
    judges = find_judges(inputs.exams)
    if judges:
        tell(f"asking the judges of {', '.join(judges)}")
    for first in prove_judges(inputs.exams):
        model = judges[first.domain].config.model
        judged = "the row's own answer" if first.prompt.answer else "an empty answer"
        yield f"{first.domain}: judge {model} gives {judged} to {first.prompt.id} {first.score:.2f}, in {first.seconds:.1f} s"


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
    if exam is None or find_problem(exam.verifier, prompt):
        return MeasuredText(expert=expert, first=first, score=None)
    (judgement,) = judge_texts(exam.verifier, [(prompt, first.answer.text)])
    return MeasuredText(expert=expert, first=first, score=judgement.score, error=judgement.problem)
