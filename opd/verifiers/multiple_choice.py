"""The letter that a text settles on.

The first of these that the text has decides, and of several such places the last: a letter after the word `answer`,
a letter marked by brackets, a colon or a full stop, a capital letter that stands alone. A text that is nothing but a
letter may be lower case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """Compares letters; `choices` are the letters that count."""

    choices: str = "ABCD"

    def chosen_letter(self, text: str) -> str | None:
        """Return the letter that a text chooses, as a capital; None if it names none."""
        letter = f"[{self.choices}]"
        if re.fullmatch(rf"[\s(]*{letter}[\s).:]*", text, re.IGNORECASE):
            return next(c for c in text if c.isalpha()).upper()
        for pattern in (
            rf"(?i:answer)(?:\s+is)?\s*:?[\s(*\"']*({letter})(?!\w|'\w)",
            rf"(?<!\w)({letter})[).:](?!\w)",
            rf"(?<![\w'])({letter})(?![\w'])",
        ):
            letters = re.findall(pattern, text)
            if letters:
                return str(letters[-1])
        return None

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        return float(self.chosen_letter(text) == self.chosen_letter(answer))

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return "" if self.chosen_letter(answer) else f"answer {answer!r}, none of the letters {self.choices}"
