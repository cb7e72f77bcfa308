"""A verifier that the user wrote: a function, imported before any compute and called once for each answer.

It runs in the driver with all the driver may do: a pipeline that names a function is to be trusted like a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opd.named import users


@dataclass(frozen=True, slots=True)
class Python:
    """Calls `module:function` as function(text, answer, metadata)."""

    function: str

    def __post_init__(self) -> None:
        """Raises: ConfigError if the module cannot be imported or has no such function."""
        load(self.function)

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        score = float(load(self.function)(text, answer, metadata))
        if not 0 <= score <= 1:  # NaN is not
            raise ValueError(f"{self.function} gave {score}, no score in 0..1")
        return score

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return ""


def load(function: str) -> Callable[..., Any]:
    """The function of `module:function`. Raises: ConfigError."""
    found: Callable[..., Any] = users(
        function, f"verifier {function}", "a function(text, answer, metadata) that gives a score in 0..1"
    )
    return found
