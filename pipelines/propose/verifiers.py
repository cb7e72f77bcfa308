"""Propose how the answers of a domain are judged, from the answers alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from opd.prompts import Messages, PromptLine
from opd.verifiers.numeric import NUMBER
from opd.verifiers.reasoning_gym import ReasoningGym

LONGEST = 100
"""Characters of an answer that a model may be expected to write letter by letter."""
MARK = "####"
"""Marker before the number in data sets that show their working."""


def propose_verifier(lines: Sequence[PromptLine]) -> tuple[Any, str]:
    """A verifier as a pipeline spells it, and why; None if no verifier can judge such answers."""
    answers = [line.answer.strip() for line in lines]
    if not any(answers):
        return None, "the prompts have no answers"
    gym = ReasoningGym()
    if all(line.metadata and not gym.problem(line.answer, line.metadata) for line in lines):
        return "reasoning_gym", "the task's own scoring function, from `metadata`"
    if not all(answers):
        return None, f"{answers.count('')} of {len(answers)} prompts that were looked at have no answer"
    if all(_is_number(answer) for answer in answers):
        return "numeric", "the last number of the response counts"
    letters = [match[1] if (match := re.fullmatch(r"\(?([A-J])[).]?", answer)) else "" for answer in answers]
    if all(letters) and len(set(letters)) > 1:
        return _choice_verifier(max(letters)), "the letter that the response settles on"
    if any("\n" in answer or len(answer) > LONGEST for answer in answers):
        return None, "the answers are free text, which nothing here can judge"
    if any(_shows_working(line) for line in lines):
        return "last_line", "the last line of the response is the answer"
    return "exact_match", "the whole response is the answer; `last_line` if the experts show their working first"


def _is_number(answer: str) -> bool:
    return bool(NUMBER.fullmatch(answer.rpartition(MARK)[2].strip().strip("$€£%")))


def _choice_verifier(last: str) -> Any:
    """The verifier for letters from A to the last one."""
    if last <= "D":
        return "multiple_choice"
    return {"kind": "multiple_choice", "choices": "".join(chr(c) for c in range(ord("A"), ord(last) + 1))}


def _shows_working(line: PromptLine) -> bool:
    """True if the completion has more lines than the answer, which is its last one."""
    lines = text_of(line.completion).strip().splitlines()
    return len(lines) > 1 and lines[-1].strip() == line.answer.strip()


def text_of(completion: str | Messages | None) -> str:
    """The text of a completion."""
    return completion or "" if isinstance(completion, str | None) else "".join(message["content"] for message in completion)
