"""The section `agent` of a domain: a program that is the agent of its episodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from opd.config.verifiers import JudgeConfig, VerifierConfig
from opd.settings.strict import PathOrName, Strict

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
RESERVED_VARIABLES = (
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
    "OPD_TASK",
    "OPD_RESULT",
)
"""Variables that every program gets from us. They lead it to the student and to its task."""


class AgentConfig(Strict):
    """A program as the agent of a domain. Its result is the file whose path is OPD_RESULT, or else the last line that it prints."""

    command: list[Annotated[PathOrName, Field(min_length=1)]] = Field(..., min_length=1)
    """Program and arguments. `python` is the one that runs `opd`; files of the current directory become absolute
    paths."""
    env: dict[Variable, str] = {}
    """Variables of the program, written into the run's files: put secrets under `inherit`."""
    inherit: list[Variable] = []
    """Names of variables to hand on from `opd`'s environment, beside PATH, language and time zone."""
    render: Literal["template", "text"] | None = None
    """Messages through the chat template, or their texts one after the other; default: the template, if there is
    one."""
    metadata: list[str] = []
    """Keys of the prompt's metadata that the program gets. It never gets the answer."""
    verifier: VerifierConfig | None = None
    """Judges the `answer` in the program's result, or else the student's last reply; default: the `reward` in the result counts."""
    timeout_s: float = Field(600, gt=0)
    """Seconds until an episode must end; its verifier has as long again."""
    parallel: int = Field(16, ge=1)
    """Programs that run at a time for each rollout worker, at most."""
    max_calls: int = Field(64, ge=1)
    """Requests that a program may make, retries and refused ones included."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that the student may write in an episode; default: no limit."""
    max_broken: float = Field(0.1, ge=0, le=1)
    """The run stops if more of a step's episodes of this domain break; one always may."""

    @field_validator("verifier")
    @classmethod
    def _refuse_judge(cls, verifier: VerifierConfig | None) -> VerifierConfig | None:
        if isinstance(verifier, JudgeConfig):
            raise PydanticCustomError(
                "verifier",
                "a verifier that asks no server, or the `reward` of the program's result, for which the program may ask one",
                {"found": "judge"},
            )
        return verifier

    @field_validator("env")
    @classmethod
    def _refuse_reserved_variables(cls, variables: dict[str, str]) -> dict[str, str]:
        # `inherit` needs no such check, since our variables are set after those that a program inherits.
        reserved = [name for name in variables if name in RESERVED_VARIABLES]
        if reserved:
            # Shown as what is wanted; `found` is shown as what was found instead.
            raise PydanticCustomError(
                "taken",
                "other names than {ours}, which lead to the student",
                {"ours": ", ".join(RESERVED_VARIABLES), "found": reserved[0]},
            )
        return variables
