"""The verifier that judges answers in an exam: a name, or a mapping with `kind` and options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from opd.config.endpoint import TextServerConfig
from opd.config.teacher_prompts import RowText, list_row_columns
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


class JudgeConfig(TextServerConfig):
    kind: Literal["judge"]
    """A model on a server gives a number, see docs/judge.md; not for an `agent`."""
    rubric: RowText
    """Criteria of the score, in words. `{{ row.rubric }}`: the row's column `rubric`."""
    range: list[Annotated[float, Field(allow_inf_nan=False)]] = Field([0.0, 10.0], min_length=2, max_length=2)
    """The least and the largest number, which become 0 and 1; default: 0 and 10."""
    controls: Literal["none", "length", "form"] = "none"
    """Properties that no response is rewarded for: its `length`, or `form`: length, lines and punctuation."""
    max_tokens: int = Field(1024, ge=1)
    """Most tokens that the judge writes."""
    max_quarantined: float = Field(0.1, ge=0, le=1)
    """The run stops if more of a step's responses get no score; one always may."""

    @model_validator(mode="after")
    def _check_keys(self) -> JudgeConfig:
        problem = self.find_problem()
        if problem is None and not self.range[0] < self.range[1]:
            problem = ("range", f"{self.range}", "two numbers, the smaller one first")
        if problem is not None:
            key, actual, expected = problem
            raise PydanticCustomError("judge", "{wanted}", {"wanted": expected, "found": f"{key}: {actual}"})
        return self

    @property
    def row_columns(self) -> tuple[str, ...]:
        """Columns of rows that the rubric reads and that are read for no other reason."""
        return tuple(name for name in list_row_columns(self.rubric) if name not in JUDGE_COLUMNS)


JUDGE_COLUMNS = ("answer", "metadata")
"""Columns that a row's question has for every verifier."""

VerifierName = Literal["exact_match", "last_line", "numeric", "multiple_choice", "reasoning_gym"]
"""The verifiers that work without options, which a name alone can choose."""

VERIFIER_OPTIONS: dict[str, str] = {
    "regex": "pattern: ...",
    "python": "function: module:function",
    "judge": "base_url: ..., model: ..., rubric: ...",
}
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
    | Annotated[PythonConfig, Tag("~python")]
    | Annotated[JudgeConfig, Tag("~judge")],
    Discriminator(_choose_verifier_kind),
    BeforeValidator(_check_verifier),
]
