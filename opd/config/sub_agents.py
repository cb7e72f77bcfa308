"""The section `domains.NAME.environment.sub_agents.TOOL`: a tool that starts an episode of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Name, Strict

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TASK, ANSWER = "{task}", "{answer}"
"""Placeholders: the task in `prompt`, and the sub-agent's answer in `result`."""


class SubAgentConfig(Strict):
    description: str = Field(..., min_length=1)
    """Says to the student when to call the tool and what it answers."""
    domain: Name | None = None
    """Domain whose experts score the sub-agent; default: its caller's."""
    environment: Literal["none", "parent", "domain"] = "none"
    """`none`: it answers at once. `parent`: its caller's environment and tools. `domain`: an environment of `domain` of
    its own."""
    system: str = ""
    """System message of the sub-agent, in a domain of chat messages."""
    prompt: str = TASK
    """First message, with the task that the student wrote."""
    result: str = ANSWER
    """Result of the call, with the sub-agent's last turn."""
    max_turns: int = Field(16, ge=1)
    """Turns of the sub-agent, each of `rollout.max_new_tokens` at most."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that it may write; default: its share of the episode's `max_tokens`."""

    @field_validator("prompt", "result")
    @classmethod
    def _check_placeholder(cls, value: str, info: ValidationInfo) -> str:
        placeholder = TASK if info.field_name == "prompt" else ANSWER
        if value.count(placeholder) != 1:
            raise PydanticCustomError(
                "place", "a text with {place} in it, once", {"place": placeholder, "found": value}
            )
        return value
