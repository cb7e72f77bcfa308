"""The interface of all verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Verifier(Protocol):
    """Says how right an answer is."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        """Score in 0..1 of `text`, given the row's `answer` and `metadata`. Whatever it raises counts as a failed answer."""
        ...

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        """Why a row with this answer and metadata cannot be judged, before anything is computed; empty if it can."""
        ...
