"""The section `domains.NAME.environment.context`: how an episode goes on that outgrows the model's context."""

from __future__ import annotations

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Strict

PLACEHOLDER = "{summary}"
"""Placeholder for the summary in `resume`."""


class ContextConfig(Strict):
    compact_at: int = Field(..., ge=1)
    """Tokens of the dialogue at which the student writes a summary. One turn and the summary more have to fit
    `rollout.max_model_len`."""
    keep_last: int = Field(2, ge=0)
    """Last turns, with their answers, that follow the summary word for word."""
    prompt: str = Field(
        "The dialogue is nearly too long. Write a summary from which the task can be finished without it. "
        "Copy names, numbers, paths and tool calls word for word, and shorten the rest.",
        min_length=1,
    )
    """Asks for the summary."""
    resume: str = "What happened so far:\n{summary}"
    """Brings the summary, after the first prompt and before the last turns."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of a summary; default: `rollout.max_new_tokens`."""
    max_compactions: int = Field(3, ge=1)
    """Most summaries in an episode."""

    @field_validator("resume")
    @classmethod
    def _check_placeholder(cls, value: str) -> str:
        if value.count(PLACEHOLDER) != 1:
            raise PydanticCustomError(
                "resume", "a text with {place} in it, once", {"place": PLACEHOLDER, "found": value}
            )
        return value
