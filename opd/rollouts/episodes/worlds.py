"""The worlds in which an agent may act: an environment of its own, the environment of the agent that called it, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from opd.environments import find_environment
from opd.interfaces import Environment
from opd.records.environments import Action, Outcome, Tool
from opd.records.types import StopReason
from opd.rollouts.episodes.spec import EpisodeEnd, EpisodeOptions, is_reward
from opd.rollouts.episodes.threads import CallFailed, CallOverdue, OwnThread
from opd.rollouts.episodes.tools import explain_bad_tools

if TYPE_CHECKING:
    from opd.prompts.conversation import Messages

T = TypeVar("T")


class World:
    """An environment as one agent sees it. Without one, as here, the first turn that does not call a sub-agent is the agent's answer."""

    tools: tuple[Tool, ...] = ()
    """Tools that the agent can call; an environment has them once `begin` has returned."""
    rewards: Sequence[float] = ()
    """Rewards that the agent earned; none if the environment is not its own."""

    @property
    def over(self) -> EpisodeEnd | None:
        """Reason why nobody can act in this world any more; None as long as one can."""
        return None

    async def begin(self) -> str | Messages:
        """Begin, and return the first observation. Raises: EpisodeEnd."""
        return ""

    async def step(self, action: Action) -> Outcome:
        """Carry out the agent's turn, and return the outcome. Raises: EpisodeEnd."""
        return Outcome(done=True)

    async def close(self) -> None:
        """Close the environment if it is the agent's own. Raises: EpisodeEnd."""

    def leave(self) -> None:
        """Let go of the world without waiting. Called last, also after an error."""


class OwnEnvironment(World):
    """The agent's own environment, which runs in a thread of its own."""

    over: EpisodeEnd | None = None

    def __init__(self, options: EpisodeOptions, metadata: Mapping[str, Any], seed: int) -> None:
        self._options, self._metadata, self._seed = options, metadata, seed
        self._thread = OwnThread(options.step_timeout_s)
        self._environment: Environment | None = None
        self.rewards: list[float] = []

    async def begin(self) -> str | Messages:
        # Here, outside of the environment's thread, a missing class raises its own error: it is no fault of one episode.
        find_environment(self._options.environment, "environment")
        await self._call("the environment", self._make_environment)
        observation, self.tools, problem = await self._call("reset", self._reset)
        if problem:
            raise self._make_episode_end("raised", problem)
        return observation

    async def step(self, action: Action) -> Outcome:
        outcome, problem = await self._call("step", self._step, action)
        if problem:
            raise self._make_episode_end("raised", f"step returned {problem}")
        if outcome.reward is not None:
            self.rewards.append(float(outcome.reward))
        if outcome.done:
            self.over = EpisodeEnd("done")
        return outcome

    async def close(self) -> None:
        await self._call("close", self._close)

    def leave(self) -> None:
        self._thread.end_when_idle(self._close)

    async def _call(self, label: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return await self._thread.call(label, function, *arguments)
        except CallOverdue as error:
            raise self._make_episode_end("timeout", str(error)) from None
        except CallFailed as error:
            raise self._make_episode_end("raised", str(error)) from None

    def _make_episode_end(self, reason: StopReason, error: str) -> EpisodeEnd:
        """Note that the environment is over, and return the end for the caller to raise."""
        self.over = EpisodeEnd(reason, error)
        return self.over

    # The methods below run in the environment's thread. So whatever its class and its objects do ends its own episode at most, and an
    # environment that is made only after its deadline is closed all the same.

    def _make_environment(self) -> None:
        self._environment = find_environment(self._options.environment, "environment")(**self._options.options)
        if hasattr(self._environment, "set_step_timeout"):
            self._environment.set_step_timeout(self._options.step_timeout_s)

    def _reset(self) -> tuple[str | Messages, tuple[Tool, ...], str]:
        """Reset the environment, and return the first observation, the tools, and the problem with them, empty if there is none."""
        assert self._environment is not None
        observation = self._environment.reset(self._metadata, self._seed)
        tools = self._environment.tools
        if not _is_first_observation(observation):
            return observation, tools, f"reset returned {observation!r:.60}, wanted text or messages"
        return observation, tools, explain_bad_tools(tools)

    def _step(self, action: Action) -> tuple[Outcome, str]:
        """Step the environment, and return the outcome and the problem with it, empty if there is none."""
        assert self._environment is not None
        outcome = self._environment.step(action)
        return outcome, _explain_bad_outcome(outcome, len(action.calls))

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()


class CallersEnvironment(World):
    """The environment of the agent that called this one. A turn without a call is this agent's answer, and does not reach the
    environment."""

    def __init__(self, caller: World) -> None:
        self._caller = caller
        self.tools = caller.tools

    @property
    def over(self) -> EpisodeEnd | None:
        return self._caller.over

    async def step(self, action: Action) -> Outcome:
        return await self._caller.step(action) if action.calls else Outcome(done=True)


def _is_first_observation(observation: Any) -> bool:
    """Return True for a text, or a list of messages with role and content."""
    if isinstance(observation, str):
        return True
    return isinstance(observation, list) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in observation
    )


def _explain_bad_outcome(outcome: Any, calls: int) -> str:
    """Return the problem with an outcome of `step` after a turn with so many calls; empty if there is none."""
    if not isinstance(outcome, Outcome):
        return f"{outcome!r:.60}, wanted an Outcome"
    reward, observation = outcome.reward, outcome.observation
    if reward is not None and not is_reward(reward):
        return f"the reward {reward!r:.60}, wanted a finite number or None"
    if isinstance(observation, str):
        return ""
    if not isinstance(observation, tuple) or not all(isinstance(text, str) for text in observation):
        return f"the observation {observation!r:.60}, wanted a text or a tuple of texts"
    # Nobody reads the observations of a last turn, so their number does not matter there.
    if len(observation) != calls and not outcome.done:
        return f"{len(observation)} observations for {calls} calls"
    return ""
