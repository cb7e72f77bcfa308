"""A verifier that calls reasoning-gym's own scoring functions, except those that would run an answer as code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TASKS = frozenset(
    {
        *("aiw", "base_conversion", "basic_arithmetic", "caesar_cipher", "calendar_arithmetic", "chain_sum"),
        *("complex_arithmetic", "count_bits", "decimal_chain_sum", "family_relationships", "fraction_simplification"),
        *("gcd", "isomorphic_strings", "lcm", "letter_counting", "manipulate_matrix", "needle_haystack"),
        *("number_filtering", "number_sorting", "products", "rotate_matrix", "simple_equations", "spell_backward"),
        *("word_sequence_reversal", "word_sorting"),
    }
)
"""Task families whose scoring functions run no code: we have read them. Those of other families pass a model's answer, or an answer of
the prompts file, to Python's `eval`."""


@dataclass(frozen=True, slots=True)
class ReasoningGym:
    """Judges a text right if the `score_answer` of its task's family gives it the full score."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        import reasoning_gym as gym

        return float(gym.get_score_answer_fn(metadata["task"])(text.strip(), metadata["entry"]) >= 1.0)

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        missing = [key for key in ("task", "entry") if key not in metadata]
        if missing:
            return f"no metadata.{missing[0]}, which `opd prompts make reasoning` writes"
        if str(metadata["task"]) not in TASKS:
            safe = ", ".join(sorted(TASKS))
            return f"metadata.task {str(metadata['task'])[:60]!r}; scoring functions that run no code have: {safe}"
        if metadata["task"] == "number_sorting" and not _is_json(metadata["entry"]):
            return "a metadata.entry.answer that is no JSON list: reasoning-gym would evaluate it as Python"
        return ""


def _is_json(entry: Any) -> bool:
    try:
        json.loads(entry["answer"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return True
