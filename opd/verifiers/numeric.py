"""A verifier that compares the last number in the text with that of the row's answer, as numbers: `The sum is 1,204.50.` is right if the
answer is 1204.5."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

NUMBER = re.compile(
    r"""
    (?: (?<![\w.)]) [-+] )?                                         # `x=-4` ends with -4, `3-4` with 4
    (?: (?: \d{1,3}(?:,\d{3})+(?!\d) | \d+ ) (?:\.\d+)? | \.\d+ )   # 1,204.50 or 1204.5 or .5
    (?: [eE][-+]?\d{1,3}(?!\d) )?                                   # an exponent of three digits at most
    """,
    re.VERBOSE | re.ASCII,
)


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, exact, as decimal digits; commas between thousands are dropped. None if there is no
    number."""
    numbers = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


@dataclass(frozen=True, slots=True)
class Numeric:
    """Judges a text right if its last number is that of the answer, or no further from it than the tolerance."""

    tolerance: float = 0.0
    """Largest difference, in the unit of the numbers themselves."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        number, expected = last_number(text), last_number(answer)
        assert expected is not None, "answers without a number were refused before the merge"
        # By repr, which makes 0.1 the decimal 0.1 and not the binary fraction next to it.
        return float(number is not None and abs(number - expected) <= Decimal(repr(self.tolerance)))

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return "" if last_number(answer) is not None else f"answer {answer!r}, no number"
