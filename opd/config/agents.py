"""The section `agent` of a domain: a program that is the agent of its episodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from opd.config.verifiers import VerifierConfig
from opd.settings.strict import PathOrName, Strict

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
OURS = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "OPD_TASK", "OPD_RESULT")
"""Variables that every program gets from us."""


class AgentConfig(Strict):
    command: list[Annotated[PathOrName, Field(min_length=1)]] = Field(..., min_length=1)
    """The program and its arguments. `python` is the one that runs `opd`; an argument that names a file of the current
    directory is made absolute, because the program runs in a temporary directory."""
    env: dict[Variable, str] = {}
    """Variables of the program. They stand in the run's files: name secrets under `inherit`."""
    inherit: list[Variable] = []
    """Names of variables that the program gets from the environment of `opd`. Without them it gets only PATH, the language
    and the time zone."""
    render: Literal["template", "text"] | None = None
    """How the student reads messages: through its chat template, or as the texts one after the other; default: through its
    chat template, if it has one."""
    metadata: list[str] = []
    """Keys of a prompt's metadata that stand in its task. The rest, and the answer, stay with us."""
    verifier: VerifierConfig | None = None
    """Judges the answer of the program's result, or the student's last reply where the result has none; default: the
    result's own `reward`."""
    timeout_s: float = Field(600, gt=0)
    """Deadline of an episode; then the verifier has as long."""
    parallel: int = Field(16, ge=1)
    """Most programs that run at a time for each rollout worker."""
    max_calls: int = Field(64, ge=1)
    """Requests of a program, retries and refused ones included; the next one ends the episode."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that the student may write in an episode; default: as many as the program asks for."""
    max_broken: float = Field(0.1, ge=0, le=1)
    """The run stops if a larger share of a step's episodes of this domain ends because the program failed; one always may."""

    @field_validator("env")
    @classmethod
    def _not_ours(cls, given: dict[str, str]) -> dict[str, str]:
        taken = [name for name in given if name in OURS]
        if taken:
            raise PydanticCustomError(
                "taken",
                "other names than {ours}, which lead to the student",
                {"ours": ", ".join(OURS), "found": taken[0]},
            )
        return given
