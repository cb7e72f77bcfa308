"""Things that an agent of an episode acts on: an environment of its own, that of the agent that called it, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from opd.environments import find_environment
from opd.interfaces import Environment
from opd.records.environments import Action, Outcome, Tool
from opd.records.types import StopReason
from opd.rollouts.episodes.spec import EpisodeEnd, EpisodeOptions, is_reward
from opd.rollouts.episodes.threads import CallFailed, CallOverdue, OwnThread
from opd.rollouts.episodes.tools import problem_with_tools

if TYPE_CHECKING:
    from opd.prompts.conversation import Messages

T = TypeVar("T")


class World(Protocol):
    """An environment as one agent sees it, or the lack of one."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools that the agent can call, once it has begun."""
        ...

    @property
    def over(self) -> EpisodeEnd | None:
        """End of the environment, after which nobody can act on it; None before."""
        ...

    @property
    def rewards(self) -> Sequence[float]:
        """Rewards that were earned there, if it is the agent's own."""
        ...

    async def begin(self) -> str | Messages:
        """Begin, and return the first observation. Raises: EpisodeEnd."""
        ...

    async def step(self, action: Action) -> Outcome:
        """Do what the agent's turn asks for, and return the outcome. Raises: EpisodeEnd."""
        ...

    async def close(self) -> None:
        """Free what is the agent's alone. Raises: EpisodeEnd."""
        ...

    def leave(self) -> None:
        """Let go of it without waiting; called last, also after an error."""
        ...


class OwnEnvironment:
    """An environment in a thread of its own."""

    def __init__(self, options: EpisodeOptions, metadata: Mapping[str, Any], seed: int) -> None:
        self._options, self._metadata, self._seed = options, metadata, seed
        self._thread = OwnThread(options.step_timeout_s)
        self._environment: Environment | None = None
        self.tools: tuple[Tool, ...] = ()
        self.over: EpisodeEnd | None = None
        self.rewards: list[float] = []

    async def begin(self) -> str | Messages:
        find_environment(
            self._options.environment, "environment"
        )  # a class that is not there is no fault of one episode
        await self._call("the environment", self._make_environment)
        observation, self.tools, wrong = await self._call("reset", self._reset)
        if wrong:
            raise self._make_episode_end("raised", wrong)
        return observation

    async def step(self, action: Action) -> Outcome:
        outcome, wrong = await self._call("step", self._step, action)
        if wrong:
            raise self._make_episode_end("raised", f"step returned {wrong}")
        if outcome.reward is not None:
            self.rewards.append(float(outcome.reward))
        if outcome.done:
            self._make_episode_end("done")
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

    def _make_episode_end(self, reason: StopReason, error: str = "") -> EpisodeEnd:
        self.over = EpisodeEnd(reason, error)
        return self.over

    # What follows runs in the environment's thread: whatever its class and its objects do ends its own episode at most, and an
    # environment that comes late is closed all the same.

    def _make_environment(self) -> None:
        self._environment = find_environment(self._options.environment, "environment")(**self._options.options)
        if hasattr(self._environment, "set_step_timeout"):
            self._environment.set_step_timeout(self._options.step_timeout_s)

    def _reset(self) -> tuple[str | Messages, tuple[Tool, ...], str]:
        """Reset the environment; return the first observation, the tools, and what is wrong with them, empty if nothing."""
        assert self._environment is not None
        observation = self._environment.reset(self._metadata, self._seed)
        tools = self._environment.tools
        wrong = (
            "" if _is_first_observation(observation) else f"reset returned {observation!r:.60}, wanted text or messages"
        )
        return observation, tools, wrong or problem_with_tools(tools)

    def _step(self, action: Action) -> tuple[Outcome, str]:
        """Step the environment; return the outcome, and what is wrong with it, empty if nothing."""
        assert self._environment is not None
        outcome = self._environment.step(action)
        return outcome, _explain_bad_outcome(outcome, len(action.calls))

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()


class CallersEnvironment:
    """The environment of the agent that called this one. A turn without a call is the agent's answer and does not reach it."""

    rewards: Sequence[float] = ()

    def __init__(self, caller: World) -> None:
        self._caller = caller
        self.tools = caller.tools

    @property
    def over(self) -> EpisodeEnd | None:
        return self._caller.over

    async def begin(self) -> str:
        return ""

    async def step(self, action: Action) -> Outcome:
        return await self._caller.step(action) if action.calls else Outcome(done=True)

    async def close(self) -> None:
        """Do nothing: the environment is the caller's."""

    def leave(self) -> None:
        """Do nothing: the environment is the caller's."""


class NoEnvironment:
    """Nothing: the first turn that is no call of a sub-agent is the agent's answer."""

    tools: tuple[Tool, ...] = ()
    over: EpisodeEnd | None = None
    rewards: Sequence[float] = ()

    async def begin(self) -> str:
        return ""

    async def step(self, action: Action) -> Outcome:
        return Outcome(done=True)

    async def close(self) -> None:
        """Do nothing: there is no environment."""

    def leave(self) -> None:
        """Do nothing: there is no environment."""


def _is_first_observation(observation: Any) -> bool:
    if isinstance(observation, str):
        return True
    return isinstance(observation, list) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in observation
    )


def _explain_bad_outcome(outcome: Any, calls: int) -> str:
    """Return what is wrong with what `step` returned; empty if nothing."""
    if not isinstance(outcome, Outcome):
        return f"{outcome!r:.60}, wanted an Outcome"
    reward, observation = outcome.reward, outcome.observation
    if reward is not None and not is_reward(reward):
        return f"the reward {reward!r:.60}, wanted a finite number or None"
    if isinstance(observation, str):
        return ""
    if not isinstance(observation, tuple) or not all(isinstance(text, str) for text in observation):
        return f"the observation {observation!r:.60}, wanted a text or a tuple of texts"
    return (
        f"{len(observation)} observations for {calls} calls" if len(observation) != calls and not outcome.done else ""
    )
