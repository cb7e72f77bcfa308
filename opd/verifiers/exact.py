"""Verifiers that compare the model's text, or its last line, with the row's reference answer, character by character.

`text` is what the model wrote; `answer` is the reference answer of the row, as `opd.interfaces.Verifier` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_ANSWER = "no `answer`"
"""Problem of a row without a reference answer."""


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """Judges a text right (1.0) if the whole of it equals the answer, apart from white space around both; else wrong (0.0)."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        return float(text.strip() == answer.strip())

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return "" if answer.strip() else NO_ANSWER


@dataclass(frozen=True, slots=True)
class LastLine(ExactMatch):
    """Judges a text right (1.0) if its last line that is not empty equals the answer: for answers that come after some working."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return float(bool(lines) and lines[-1] == answer.strip())

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        if len(answer.strip().splitlines()) > 1:
            return f"answer {answer!r:.60}, more than one line"
        # Not super(): `slots=True` makes a second class, and super() would look for the first one and raise TypeError.
        return ExactMatch.problem(self, answer, metadata)
