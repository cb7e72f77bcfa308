"""The letter that a text settles on.

A text that is nothing but a letter, `b` or `(B).`, chooses that one; only there it may be lower case. In any other text three
patterns are tried in this order: a letter after the word `answer`; a letter that `)`, `.` or `:` follows; a letter that stands
alone. The first pattern that occurs decides, and if it occurs several times, its last place does. Nothing more is understood:
`A dog runs` chooses A.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MultipleChoice:
    """Compares the letters that two texts choose. `choices` are the letters that count, as capitals."""

    choices: str = "ABCD"

    def find_chosen_letter(self, text: str) -> str | None:
        """Return the letter that a text chooses, as a capital; None if it names none."""
        letter = f"[{self.choices}]"
        if re.fullmatch(rf"[\s(]*{letter}[\s).:]*", text, re.IGNORECASE):
            return next(c for c in text if c.isalpha()).upper()
        for pattern in (
            rf"(?i:answer)(?:\s+is)?\s*:?[\s(*\"']*({letter})(?!\w|'\w)",  # Answer: B, the answer is (B)
            rf"(?<!\w)({letter})[).:](?!\w)",  # B) because, (B), B.
            rf"(?<![\w'])({letter})(?![\w'])",  # I take B
        ):
            letters = re.findall(pattern, text)
            if letters:
                return str(letters[-1])
        return None

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        """Return 1.0 if the text chooses the letter of `answer`, else 0.0; `problem` has refused an answer without a letter."""
        return float(self.find_chosen_letter(text) == self.find_chosen_letter(answer))

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        """Describe why no text can be compared with this answer; empty if it has a letter."""
        return "" if self.find_chosen_letter(answer) else f"answer {answer!r}, none of the letters {self.choices}"
