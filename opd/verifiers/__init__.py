"""Verifiers judge the answers of models: 1.0 is right, 0.0 is wrong. One small file per family, behind one dictionary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opd.config.verifiers import VerifierConfig
from opd.interfaces import Verifier
from opd.verifiers.exact import ExactMatch, LastLine
from opd.verifiers.multiple_choice import MultipleChoice
from opd.verifiers.numeric import Numeric
from opd.verifiers.python import Python
from opd.verifiers.reasoning_gym import ReasoningGym
from opd.verifiers.regex import Regex

VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "exact_match": ExactMatch,
    "last_line": LastLine,
    "numeric": Numeric,
    "regex": Regex,
    "multiple_choice": MultipleChoice,
    "reasoning_gym": ReasoningGym,
    "python": Python,
}


def build_verifier(config: VerifierConfig) -> Verifier:
    """Build the verifier that a pipeline names. Raises: ConfigError for a `python` function that cannot be imported or called."""
    options: dict[str, Any] = {"kind": config} if isinstance(config, str) else config.model_dump()
    return VERIFIERS[options.pop("kind")](**options)
