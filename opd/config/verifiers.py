"""The verifier that judges answers in an exam: a name, or a mapping with `kind` and options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Strict
from opd.settings.suggestions import find_nearest


class ExactMatchConfig(Strict):
    kind: Literal["exact_match"]
    """The whole answer, without white space around it."""


class LastLineConfig(Strict):
    kind: Literal["last_line"]
    """The last line that is not empty."""


class NumericConfig(Strict):
    kind: Literal["numeric"]
    """The last number, as a number."""
    tolerance: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Largest difference that still counts as equal."""


class RegexConfig(Strict):
    kind: Literal["regex"]
    """The last match of a regular expression."""
    pattern: str = Field(..., min_length=1)
    """In Python's syntax; the first group, or the whole match, is the answer."""

    @model_validator(mode="after")
    def _check_regex(self) -> RegexConfig:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise PydanticCustomError(
                "pattern",
                "a regular expression in Python's syntax ({why})",
                {"why": str(error), "found": repr(self.pattern)},
            ) from None
        return self


class MultipleChoiceConfig(Strict):
    kind: Literal["multiple_choice"]
    """The letter that the text settles on: `B`, `(B)`, `the answer is B`."""
    choices: str = Field("ABCD", pattern=r"^[A-Z]{2,26}$")
    """The letters."""


class ReasoningGymConfig(Strict):
    kind: Literal["reasoning_gym"]
    """Full score by the task's own function."""


class PythonConfig(Strict):
    kind: Literal["python"]
    """Your `function(text, answer, metadata)` gives a score in 0..1."""
    function: str = Field(..., pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`module:function`; looked for where Python finds modules, last in the current directory."""


VerifierName = Literal["exact_match", "last_line", "numeric", "multiple_choice", "reasoning_gym"]
"""The verifiers that work without options, which a name alone can choose."""

VERIFIER_OPTIONS: dict[str, str] = {"regex": "pattern: ...", "python": "function: module:function"}
"""The verifiers that need an option, each with that option."""


def _check_verifier(value: Any) -> Any:
    """Refuse an unknown name, with the nearest known one. pydantic's types then check everything else."""
    kind = value.get("kind") if isinstance(value, Mapping) else value
    if isinstance(value, str) and value in VERIFIER_OPTIONS:
        options = f"{{kind: {value}, {VERIFIER_OPTIONS[value]}}}"
        raise PydanticCustomError("verifier", "options too: {options}", {"options": options, "found": value})
    names = [*get_args(VerifierName), *VERIFIER_OPTIONS]
    if isinstance(value, str | Mapping) and kind not in names:
        near = find_nearest(str(kind), names)
        raise PydanticCustomError(
            "verifier",
            "{hint}one of: {known}",
            {
                "hint": f"did you mean `{near}`? " if near else "",
                "known": ", ".join(names),
                "found": "no `kind`" if kind is None else str(kind),
            },
        )
    return value


def _choose_verifier_kind(value: Any) -> str:
    return f"~{value['kind'] if isinstance(value, Mapping) else getattr(value, 'kind', 'name')}"


VerifierConfig = Annotated[
    Annotated[VerifierName, Tag("~name")]
    | Annotated[ExactMatchConfig, Tag("~exact_match")]
    | Annotated[LastLineConfig, Tag("~last_line")]
    | Annotated[NumericConfig, Tag("~numeric")]
    | Annotated[RegexConfig, Tag("~regex")]
    | Annotated[MultipleChoiceConfig, Tag("~multiple_choice")]
    | Annotated[ReasoningGymConfig, Tag("~reasoning_gym")]
    | Annotated[PythonConfig, Tag("~python")],
    Discriminator(_choose_verifier_kind),
    BeforeValidator(_check_verifier),
]
