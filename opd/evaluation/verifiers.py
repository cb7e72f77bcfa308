"""Verifiers: is this answer right? One function each, behind one dictionary. 1.0 is right, 0.0 is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Verifier = Callable[[str, str, Mapping[str, Any]], float]


def exact_match(text: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """The whole answer, apart from white space around it."""
    return float(text.strip() == answer.strip())


def last_line(text: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """The last line that is not empty: for answers that come after some working."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return float(bool(lines) and lines[-1] == answer.strip())


def reasoning_gym(text: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """The task family's own `score_answer`; only its full score counts as right."""
    import reasoning_gym as gym

    return float(gym.get_score_answer_fn(metadata["task"])(text.strip(), metadata["entry"]) >= 1.0)


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "last_line": last_line, "reasoning_gym": reasoning_gym}
