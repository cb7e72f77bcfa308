"""The white box: the policy and an environment take turns until the episode ends.

    reset ──▶ prompt + observation ──▶ engine ──turn──▶ calls ──▶ environment.step ──observation──▶ engine ──turn──▶ ...
              (first, rendered)        (sampled ids, kept as they are)              (after, appended as tokens)

All episodes of a step run at once, their turns in one batch. Whatever an environment does ends its own episode at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from opd.config.context import PLACE
from opd.environments import find
from opd.environments.records import Action, Outcome, Tool
from opd.interfaces import Environment, TokenEngine, TurnTokenizer
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.compaction import Compactor
from opd.rollouts.episodes.dialogue import BadObservation, ChatDialogue, Dialogue, PlainDialogue, readable
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest, EpisodeResult
from opd.rollouts.episodes.threads import Failed, Overdue, OwnThread
from opd.rollouts.episodes.tools import BadCall
from opd.rollouts.episodes.trace import Segment, Trace
from opd.text import one_line
from opd.types import Sampled, StopReason

if TYPE_CHECKING:
    from opd.prompts.line import Messages

MAX_ERROR = 500
"""Characters that are kept of what broke an episode."""
UNREADABLE = "error: this call cannot be made: "
"""Begins what the policy reads after a call that does not parse."""


class EpisodeEnd(Exception):
    """The episode is over."""

    def __init__(self, reason: StopReason, error: str = "") -> None:
        super().__init__(reason, error)
        self.reason: StopReason = reason
        self.error = error


class Dialogues:
    """Makes the dialogue of an episode. The chat template is proven once, when the first chat prompt comes."""

    def __init__(self, tokenizer: TurnTokenizer, stop_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = frozenset(stop_token_ids)
        self._appenders: dict[date | None, ChatAppender] = {}

    def make(self, request: EpisodeRequest, tools: Sequence[Tool]) -> Dialogue:
        """The dialogue that fits the request's prompt. Raises: ModelError if the template cannot append."""
        if isinstance(request.prompt.text, str):
            return PlainDialogue(self.tokenizer, tools)
        return ChatDialogue(self.appender(request.options.template_date), tools)

    def appender(self, day: date | None) -> ChatAppender:
        """The student's chat template, with this day for one that asks. Raises: ModelError if it cannot append."""
        if day not in self._appenders:
            self._appenders[day] = ChatAppender(self.tokenizer, sorted(self.stops), day)
        return self._appenders[day]


async def run_episodes(
    requests: Sequence[EpisodeRequest],
    engine: TokenEngine,
    dialogues: Dialogues,
    context: int,
    version: int,
    expert: TokenEngine | None = None,
) -> list[EpisodeResult]:
    """Run all episodes at once; `context` is the engine's, `version` the policy's; `expert` writes the turns of guides.

    Raises: RunError, ModelError.
    """
    try:
        async with asyncio.TaskGroup() as group:
            episodes = [_Episode(request, engine, dialogues, context, version, expert) for request in requests]
            tasks = [group.create_task(episode.run()) for episode in episodes]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def seed_of(*parts: object) -> int:
    """32 bits that depend on every part and on nothing else."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


@dataclass(frozen=True, slots=True)
class _Opening:
    """What an episode begins with."""

    dialogue: Dialogue
    prompt: str | Messages
    observation: str | Messages

    def ids(self, note: str = "") -> list[int]:
        """Token ids up to the first turn; `note` stands last."""
        return self.dialogue.first(self.prompt, self.observation, note)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What follows a turn."""

    observation: str | tuple[str, ...]
    calls: int
    """Tool calls of the turn."""
    ended: bool
    """Whether the turn ends with an end token."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.observation,) if isinstance(self.observation, str) else self.observation

    def ids(self, dialogue: Dialogue, note: str = "") -> list[int]:
        """Token ids up to the next turn; `note` stands last. Raises: BadObservation, and what a chat template raises."""
        return dialogue.after(self.observation, calls=self.calls, ended=self.ended, note=note)


class _Episode:
    """One episode while it runs."""

    def __init__(
        self,
        request: EpisodeRequest,
        engine: TokenEngine,
        dialogues: Dialogues,
        context: int,
        version: int,
        expert: TokenEngine | None,
    ) -> None:
        assert isinstance(request.options, EpisodeOptions)
        self._request = request
        self._options = request.options
        self._engine = engine
        self._expert = expert
        self._dialogues = dialogues
        self._context = context
        self._trace = Trace(version, request.masked)
        self._thread = OwnThread(request.options.step_timeout_s)
        self._environment: Environment | None = None
        self._compactor = Compactor(request.options.compaction)
        self._rewards: list[float] = []
        self._invalid = 0
        self._said: list[str] = []

    async def run(self) -> EpisodeResult:
        """Play the episode to its end. Raises: RunError, ModelError, for what is no fault of the environment."""
        try:
            end = await self._ending(self._play)
            if end.reason != "timeout":
                end = await self._ending(lambda: self._closed(end))
        finally:
            self._thread.end(self._close)
        reward = math.fsum(self._rewards) if self._rewards else None
        return EpisodeResult(
            rollouts=tuple(self._trace.rollouts(self._request.sample, end.reason, reward)),
            stop_reason=end.reason,
            reward=reward,
            audit=self._trace.audit,
            invalid_calls=self._invalid,
            error=one_line(f"{self._request.sample.sample_id}: {end.error}", MAX_ERROR) if end.error else "",
            text="\n".join(self._said),
        )

    async def _ending(self, part: Callable[[], Any]) -> EpisodeEnd:
        """How a part of the episode ends it."""
        from jinja2 import TemplateError

        try:
            await part()
        except EpisodeEnd as end:
            return end
        except Overdue as error:
            return EpisodeEnd("timeout", str(error))
        except Failed as error:
            return EpisodeEnd("raised", str(error))
        except BadObservation as error:
            return EpisodeEnd("observation", str(error))
        except TemplateError as error:
            return EpisodeEnd("template", str(error))
        raise AssertionError("a part of an episode that does not end it")

    async def _closed(self, end: EpisodeEnd) -> None:
        await self._thread.call("close", self._close)
        raise end

    def _make(self) -> Environment:
        """In the environment's thread, as `_close`: an environment that comes late is closed all the same."""
        made: Environment = find(self._options.environment, "environment")(**self._options.options)
        self._environment = made
        return made

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    async def _play(self) -> None:
        """Raises: EpisodeEnd, always, or what ends an episode otherwise."""
        opening = await self._begin()
        segment = self._trace.begin(opening.ids())
        limit = self._request.cut_after or self._options.max_turns
        for turn in range(limit):
            who, sampled = await self._turn(segment, turn)
            answer = await self._answer(segment, sampled, opening.dialogue, who)
            segment = await self._go_on(segment, sampled, answer, opening)
        raise EpisodeEnd("curriculum" if limit < self._options.max_turns else "turns")

    async def _turn(self, segment: Segment, turn: int) -> tuple[str, Sampled]:
        """Who writes the next turn, and what: each turn of each episode has a coin of its own. Raises: EpisodeEnd."""
        guide, most = self._request.guide, self._options.max_turn_tokens
        if guide is None or self._seed("guide", turn) >= guide.probability * 2**32:
            return "policy", await self._sample(segment, most, "turn", turn)
        assert self._expert is not None
        written = await self._write(self._expert, segment, most, "turn", turn)
        segment.guided(written, train=guide.train)
        return "expert", written

    async def _sample(self, segment: Segment, max_tokens: int, *what: object) -> Sampled:
        """Let the policy write after the segment. Raises: EpisodeEnd."""
        sampled = await self._write(self._engine, segment, max_tokens, *what)
        segment.sampled(sampled)
        return sampled

    async def _write(self, engine: TokenEngine, segment: Segment, max_tokens: int, *what: object) -> Sampled:
        """What an engine writes after the segment; `what` decides the seed. Raises: EpisodeEnd."""
        most = min(self._room(segment), max_tokens)
        return await engine.generate(segment.ids, max_tokens=most, seed=self._seed(*what))

    def _seed(self, *what: object) -> int:
        return seed_of(self._request.seed, self._request.sample.sample_id, *what)

    async def _go_on(self, segment: Segment, sampled: Sampled, answer: _Answer, opening: _Opening) -> Segment:
        """The segment that the next turn follows: this one with what the environment answered, or a compacted one."""
        ids = answer.ids(opening.dialogue)
        self._said += [f"environment: {text}" for text in answer.texts]
        self._compactor.add(sampled.token_ids, ids)
        compaction = self._compactor.due(len(segment.ids) + len(ids))
        if compaction is None:
            segment.append(ids)
            return segment
        segment.append(answer.ids(opening.dialogue, compaction.prompt))
        said = await self._sample(segment, compaction.max_tokens, "summary", self._compactor.done)
        summary = readable(self._dialogues.tokenizer.decode(said.token_ids, skip_special_tokens=True))
        self._said.append(f"summary: {summary}")
        kept = self._compactor.cut(compaction.keep_last)
        return self._trace.begin([*opening.ids(compaction.resume.replace(PLACE, summary)), *kept], parent=segment)

    async def _begin(self) -> _Opening:
        request, options = self._request, self._options
        find(options.environment, "environment")  # a class that is not there is no fault of one episode
        environment = await self._thread.call("the environment", self._make)
        seed = seed_of(request.seed, request.prompt.id, "environment")
        first: str | Messages = await self._thread.call("reset", environment.reset, request.prompt.metadata, seed)
        if not _is_first_observation(first):
            raise EpisodeEnd("raised", f"reset returned {first!r:.60}, wanted text or messages")
        dialogue = self._dialogues.make(request, environment.tools)
        shown = [first] if isinstance(first, str) else [message["content"] for message in first]
        self._said += [f"environment: {text}" for text in shown if text]
        return _Opening(dialogue, request.prompt.text, first)

    def _room(self, segment: Segment) -> int:
        """Tokens of the next turn at most. Raises: EpisodeEnd if there are none."""
        in_context = self._context - len(segment.ids)
        if in_context < 1:
            raise EpisodeEnd("context")
        left = self._left()
        if left < 1:
            raise EpisodeEnd("tokens")
        return min(in_context, left)

    def _left(self) -> int:
        """What is left of the episode's own tokens."""
        budget = self._options.max_tokens
        return self._context if budget is None else budget - self._trace.audit.sampled

    async def _answer(self, segment: Segment, sampled: Sampled, dialogue: Dialogue, who: str) -> _Answer:
        """What the environment says to the turn. Raises: EpisodeEnd, Failed, Overdue."""
        ended = sampled.stop_reason == "stop"
        if not ended and len(sampled.token_ids) < self._options.max_turn_tokens:
            self._room(segment)  # cut by the episode's budget or by the context: the turn is not whole
        text = self._dialogues.tokenizer.decode(sampled.token_ids, skip_special_tokens=True)
        self._said.append(f"{who}: {text}")
        assert self._environment is not None
        try:
            calls = dialogue.calls(text)
        except BadCall as error:
            self._invalid += 1
            return _Answer(f"{UNREADABLE}{error}", calls=1, ended=ended)
        outcome = await self._thread.call("step", self._environment.step, Action(text=text, calls=calls))
        wrong = _problem(outcome, len(calls))
        if wrong:
            raise EpisodeEnd("raised", f"step returned {wrong}")
        if outcome.reward is not None:
            self._rewards.append(float(outcome.reward))
        if outcome.done:
            raise EpisodeEnd("done")
        return _Answer(outcome.observation, calls=len(calls), ended=ended)


def _is_first_observation(found: Any) -> bool:
    if isinstance(found, str):
        return True
    return isinstance(found, list) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in found
    )


def _problem(outcome: Any, calls: int) -> str:
    """What is wrong with what `step` returned; empty if nothing."""
    if not isinstance(outcome, Outcome):
        return f"{outcome!r:.60}, wanted an Outcome"
    reward, seen = outcome.reward, outcome.observation
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        return f"the reward {reward!r:.60}, wanted a finite number or None"
    if isinstance(seen, str):
        return ""
    if not isinstance(seen, tuple) or not all(isinstance(text, str) for text in seen):
        return f"the observation {seen!r:.60}, wanted a text or a tuple of texts"
    return f"{len(seen)} observations for {calls} calls" if len(seen) != calls and not outcome.done else ""
