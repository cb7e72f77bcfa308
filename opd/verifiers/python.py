"""A verifier that the user wrote: a function, imported before any compute and called once for each answer.

It runs in the driver with all the driver may do: a pipeline that names a function is to be trusted like a program.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opd.errors import ConfigError
from opd.settings.user_objects import import_user_object

WANTED = "a function(text, answer, metadata) that gives a score in 0..1"


@dataclass(frozen=True, slots=True)
class Python:
    """Gives the score of the function named by `module:function`, which is called with text, answer and metadata."""

    function: str

    def __post_init__(self) -> None:
        """Check the function. Raises: ConfigError if the module cannot be imported, has no such function, or if it cannot be called
        with three arguments."""
        user_function = load_function(self.function)
        try:
            signature = inspect.signature(user_function)
        except ValueError:  # written in C, without a signature
            return
        try:
            signature.bind("text", "answer", {})
        except TypeError:
            raise ConfigError.at(
                f"verifier {self.function}",
                found=f"{self.function.partition(':')[2]}{signature}",
                wanted=WANTED,
                fix="give it these three parameters, in this order; it may leave some unused",
            ) from None

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        score = float(load_function(self.function)(text, answer, metadata))
        if not 0 <= score <= 1:  # NaN is not
            raise ValueError(f"{self.function} gave {score}, no score in 0..1")
        return score

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return ""


def load_function(function: str) -> Callable[..., Any]:
    """Import the function of `module:function`. Raises: ConfigError."""
    user_function: Callable[..., Any] = import_user_object(function, f"verifier {function}", WANTED)
    return user_function
