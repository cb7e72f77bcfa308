"""The base class of environments that ask a question. The policy has a few tries, and reads feedback after each that is wrong."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from opd.errors import ConfigError
from opd.records.environments import Action, Outcome, Tool, ToolCall
from opd.settings.strict import Strict
from opd.text import strip_control_characters


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement on an answer."""

    right: bool
    feedback: str
    """The observation if it was wrong and may try again."""


class Asking(ABC):
    """An environment that ends with the right answer, or after the last try. A turn without a call is an answer."""

    name: ClassVar[str]
    Options: ClassVar[type[Strict]]
    tools: tuple[Tool, ...] = ()

    def __init__(self, tries: int = 3) -> None:
        """`tries` is the number of answers that may be given. Raises: ConfigError."""
        if not isinstance(tries, int) or not 1 <= tries <= 1000:
            raise ConfigError.at(
                f"environment {self.name}: tries",
                found=repr(tries),
                wanted="a number from 1 to 1000",
                fix="set it to 3",
            )
        self._tries = self._tries_left = tries

    @abstractmethod
    def judge(self, text: str) -> Judgement:
        """Judge an answer."""

    def step(self, action: Action) -> Outcome:
        """Carry out the calls, or judge the answer if there are none. Control characters are taken out of results, for a tool may repeat
        what a call holds."""
        if not action.calls:
            return self._judge_turn(action.text)
        return Outcome(observation=tuple(strip_control_characters(self.called(call)) for call in action.calls))

    def called(self, call: ToolCall) -> str:
        """Return the result of a call. An environment with tools overrides it; a call of a tool that it does not have never comes here."""
        raise NotImplementedError(f"environment {self.name} has no tool {call.name}")

    def close(self) -> None:  # noqa: B027 those that hold something have their own
        """Do nothing, since nothing is held."""

    def _begin(self) -> str:
        """Set all tries back. Return the first observation, which is empty, since the prompt has asked the question."""
        self._tries_left = self._tries
        return ""

    def _judge_turn(self, text: str) -> Outcome:
        """Return the outcome of an answer, which costs a try: the reward 1 or 0 at the end, else feedback."""
        judged, self._tries_left = self.judge(text), self._tries_left - 1
        info = {"tries": self._tries - self._tries_left}
        if judged.right or not self._tries_left:
            return Outcome(reward=float(judged.right), done=True, info=info)
        return Outcome(observation=judged.feedback, info=info)

    @abstractmethod
    def solve(self) -> Action:
        """Return the action of an expert in the present state."""


def format_hermes_call(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a tool call in the format of Hermes, which many models with a chat template write."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': dict(arguments)})}\n</tool_call>"


def format_turn_with_call(tool: str, arguments: Mapping[str, Any]) -> Action:
    """Return a turn that makes this one call."""
    return Action(text=format_hermes_call(tool, arguments), calls=(ToolCall(name=tool, arguments=arguments),))
