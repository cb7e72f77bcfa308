"""The text itself, or its last line, against the row's answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_ANSWER = "no `answer`"


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """The whole text, apart from white space around it."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        return float(text.strip() == answer.strip())

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return "" if answer.strip() else NO_ANSWER


@dataclass(frozen=True, slots=True)
class LastLine(ExactMatch):
    """The last line that is not empty: for answers that come after some working."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return float(bool(lines) and lines[-1] == answer.strip())

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        if len(answer.strip().splitlines()) > 1:
            return f"answer {answer!r:.60}, more than one line"
        return ExactMatch.problem(self, answer, metadata)
