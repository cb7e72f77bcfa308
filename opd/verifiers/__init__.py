"""Verifiers judge the answers of models: 1.0 is right, 0.0 is wrong. One small file per family, behind one dictionary."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from opd.config.verifiers import JudgeConfig, VerifierConfig
from opd.interfaces import Verifier
from opd.records.types import Prompt
from opd.verifiers.exact import ExactMatch, LastLine
from opd.verifiers.judge import RubricJudge, ScoredText
from opd.verifiers.multiple_choice import MultipleChoice
from opd.verifiers.numeric import Numeric
from opd.verifiers.python import Python
from opd.verifiers.reasoning_gym import ReasoningGym
from opd.verifiers.regex import Regex

VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "exact_match": ExactMatch,
    "last_line": LastLine,
    "numeric": Numeric,
    "regex": Regex,
    "multiple_choice": MultipleChoice,
    "reasoning_gym": ReasoningGym,
    "python": Python,
    "judge": RubricJudge,
}


def build_verifier(config: VerifierConfig, domain: str = "") -> Verifier:
    """Build the verifier that a pipeline names for a domain. Raises: ConfigError for a `python` function that cannot be imported or
    called."""
    if isinstance(config, JudgeConfig):
        return RubricJudge(config, domain)
    options: dict[str, Any] = {"kind": config} if isinstance(config, str) else config.model_dump()
    return VERIFIERS[options.pop("kind")](**options)


def find_problem(verifier: Verifier, prompt: Prompt) -> str:
    """Return the reason why answers to this prompt cannot be judged, or must not be; empty if they can."""
    if isinstance(verifier, RubricJudge):
        return verifier.find_row_problem(prompt)
    return verifier.problem(prompt.answer, prompt.metadata)


def judge_texts(verifier: Verifier, answers: Sequence[tuple[Prompt, str]]) -> list[ScoredText]:
    """Return what the verifier says of each text as the answer to its prompt; of one on which it raises, the traceback.

    Raises: RunError if a judge refuses every question, or where its budget ends.
    """
    if isinstance(verifier, RubricJudge):
        return verifier.judge_answers(answers)
    judgements = []
    for prompt, text in answers:
        try:
            judgements.append(ScoredText(verifier(text, prompt.answer, prompt.metadata)))
        except Exception:  # noqa: BLE001 a verifier may be anybody's code; its traceback is kept
            judgements.append(ScoredText(None, traceback.format_exc()))
    return judgements
