"""The section `domains.NAME.environment.context`: what is done about an episode that outgrows the model's context."""

from __future__ import annotations

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Strict

PLACE = "{summary}"
"""Where the summary stands in `resume`."""


class ContextConfig(Strict):
    compact_at: int = Field(..., ge=1)
    """Tokens of the dialogue from which on the student writes a summary, and goes on with that in place of the old turns. With
    one turn and the summary, which can follow, it has to be within `rollout.max_model_len`."""
    keep_last: int = Field(2, ge=0)
    """Turns, each with what the environment answered, that follow the summary word for word."""
    prompt: str = Field(
        "The dialogue is nearly too long. Write a summary from which the task can be finished without it. "
        "Copy names, numbers, paths and tool calls word for word, and shorten the rest.",
        min_length=1,
    )
    """Asks for the summary, after the last observation."""
    resume: str = "What happened so far:\n{summary}"
    """Follows the first prompt in the new dialogue, before the kept turns."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of a summary; default: `rollout.max_new_tokens`."""
    max_compactions: int = Field(3, ge=1)
    """Summaries in an episode. After the last one it goes on until the context is full."""

    @field_validator("resume")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        if value.count(PLACE) != 1:
            raise PydanticCustomError("resume", "a text with {place} in it, once", {"place": PLACE, "found": value})
        return value
