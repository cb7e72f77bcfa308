"""reasoning-gym's own scorers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReasoningGym:
    """The task family's own `score_answer`; only its full score counts as right."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        import reasoning_gym as gym

        return float(gym.get_score_answer_fn(metadata["task"])(text.strip(), metadata["entry"]) >= 1.0)

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        missing = [key for key in ("task", "entry") if key not in metadata]
        return f"no metadata.{missing[0]}, which `opd prompts make reasoning` writes" if missing else ""
