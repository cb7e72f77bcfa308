"""Options of a domain whose agent is a program; plain values that cross process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any, Literal

from opd.config.verifiers import VerifierConfig
from opd.tool_formats import AUTO

if TYPE_CHECKING:
    from opd.guard.build import GuardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Options for the episodes of one domain whose agent is a program."""

    command: tuple[str, ...]
    """The program and its arguments."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the pipeline sets for the program."""
    inherit: tuple[str, ...] = ()
    """Names of environment variables that the program gets from `opd`'s own environment."""
    render: Literal["template", "text"] | None = None
    """Way in which messages become the student's tokens; None: through its chat template if it has one, else as text."""
    metadata: tuple[str, ...] = ()
    """Keys of a prompt's metadata that the program may see."""
    verifier: VerifierConfig | None = None
    """Judges the program's answer; None: the program's own result has the reward."""
    timeout_s: float
    """Deadline of an episode, in seconds."""
    parallel: int
    """Largest number of programs that run side by side for one engine."""
    max_calls: int
    """Largest number of requests of one program."""
    max_tokens: int | None = None
    """Tokens that the policy may sample in an episode; None: no limit."""
    max_turn_tokens: int
    """Tokens that the policy may sample in a turn."""
    max_broken: float
    """Largest share of a step's episodes that may break; one always may."""
    template_date: date | None = None
    """The day for a chat template that asks for a date."""
    tool_call_parser: str = AUTO
    """Form of the student's calls of tools, by a name of `opd.tool_formats`."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the student's chat template."""
    guard: GuardSpec | None = None
    """The guard that checks the policy's calls before the program gets them; None: nothing checks them."""

    def uses_template(self, tokenizer: Any) -> bool:
        """Return True if the student reads messages through its chat template."""
        return self.render == "template" or (self.render is None and tokenizer.chat_template is not None)
