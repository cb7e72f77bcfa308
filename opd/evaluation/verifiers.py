"""Verifiers: is this answer right? One function each, behind one dictionary. 1.0 is right, 0.0 is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Verifier = Callable[[str, str, Mapping[str, Any]], float]

GYM_TASKS = frozenset(
    {
        *("base_conversion", "basic_arithmetic", "caesar_cipher", "calendar_arithmetic", "chain_sum", "count_bits"),
        *("family_relationships", "fraction_simplification", "gcd", "isomorphic_strings", "lcm", "letter_counting"),
        *("needle_haystack", "number_filtering", "number_sorting", "products", "simple_equations", "spell_backward"),
        *("word_sequence_reversal", "word_sorting"),
    }
)
"""reasoning-gym tasks whose scoring function was read and runs nothing. Others hand a model's answer, or the prompts
file's, to Python's `eval`."""


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


def gym_problem(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with metadata for `reasoning_gym`, and what is wanted; None if it can be scored safely."""
    missing = [key for key in ("task", "entry") if key not in metadata]
    if missing:
        return f"no metadata.{missing[0]}", "reasoning-gym's task name and entry, which its verifier reads"
    if str(metadata["task"]) not in GYM_TASKS:
        return (
            f"metadata.task {str(metadata['task'])[:60]!r}",
            f"a task whose scoring function runs no code: {', '.join(sorted(GYM_TASKS))}",
        )
    if metadata["task"] == "number_sorting" and not _is_json(metadata["entry"]):
        return "a metadata.entry.answer that is no JSON", "a JSON list: reasoning-gym would evaluate it as Python"
    return None


def _is_json(entry: Any) -> bool:
    try:
        json.loads(entry["answer"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return True


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "last_line": last_line, "reasoning_gym": reasoning_gym}
