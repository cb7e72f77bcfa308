"""The section `domains.NAME.environment.sub_agents.TOOL`: a tool that starts an episode of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Name, Strict

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
TASK, ANSWER = "{task}", "{answer}"
"""Where the task stands in `prompt`, and the answer in `result`."""


class SubAgentConfig(Strict):
    description: str = Field(..., min_length=1)
    """What the student reads of the tool: when to call it, and what it answers."""
    domain: Name | None = None
    """The domain of this pipeline whose experts score what the sub-agent writes; default: that of the agent that calls it."""
    environment: Literal["none", "parent", "domain"] = "none"
    """What the sub-agent acts on. `none`: nothing, its first turn without a call is its answer. `parent`: the environment of the
    agent that calls it, the same object with the same tools, until a turn without a call. `domain`: an object of its own of the
    environment of `domain`, whose `reset` finds the task in `metadata["task"]`."""
    system: str = ""
    """The system message of the sub-agent, in a domain whose prompts are chat messages."""
    prompt: str = TASK
    """What the sub-agent reads first, with the task that the student wrote."""
    result: str = ANSWER
    """What the student reads of the call: the text of the sub-agent's last turn."""
    max_turns: int = Field(16, ge=1)
    """Turns of the sub-agent; each has `rollout.max_new_tokens` at most."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens that the sub-agent may write; default: its share of what is left of the episode's `max_tokens`."""

    @field_validator("prompt", "result")
    @classmethod
    def _has_a_place(cls, value: str, info: ValidationInfo) -> str:
        place = TASK if info.field_name == "prompt" else ANSWER
        if value.count(place) != 1:
            raise PydanticCustomError("place", "a text with {place} in it, once", {"place": place, "found": value})
        return value
