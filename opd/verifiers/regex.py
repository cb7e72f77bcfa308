"""A verifier that takes the last match of a regular expression in the text, or that match's first group if the expression has one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opd.verifiers.exact import NO_ANSWER


@dataclass(frozen=True, slots=True)
class Regex:
    """Judges a text right if the last match equals the row's answer, apart from white space around both."""

    pattern: str

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        match = None
        for match in re.finditer(self.pattern, text):  # noqa: B007 the last one is what is wanted
            pass
        if match is None:
            return 0.0
        matched_text = match.group(1 if match.re.groups else 0)  # a group that took no part in the match is None
        return float(matched_text is not None and matched_text.strip() == answer.strip())

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return "" if answer.strip() else NO_ANSWER
