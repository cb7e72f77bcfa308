"""The white box: the policy and an environment take turns until the episode ends.

    reset ──▶ prompt + observation ──▶ engine ──turn──▶ calls ──▶ environment.step ──observation──▶ engine ──turn──▶ ...
              (first, rendered)        (sampled ids, kept as they are)              (after, appended as tokens)
                                                      guard: what it blocks is answered here

All episodes of a step run at once, their turns in one batch. Whatever an environment does ends its own episode at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import Any, TypeVar

from opd.config.context import PLACEHOLDER
from opd.guard.build import shared_guard
from opd.guard.watch import CheckedTurn, GuardWatch
from opd.interfaces import TokenEngine
from opd.prompts.harmless import escape_specials, special_texts
from opd.records.environments import Action, Outcome, Tool, ToolCall
from opd.records.episodes import EpisodeResult
from opd.records.types import SampledTurn, SegmentOrigin
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.compaction import Compactor
from opd.rollouts.episodes.delegation import Delegation, merge_answers
from opd.rollouts.episodes.dialogue import BadObservation, ChatDialogue, Dialogue, PlainDialogue, check_observation
from opd.rollouts.episodes.spec import EpisodeEnd, EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.threads import hand_over, run_in_reader
from opd.rollouts.episodes.tokenizer import TurnTokenizer
from opd.rollouts.episodes.trace import Trace, TraceSegment
from opd.rollouts.episodes.turns import EncodedAnswer, History, Opening
from opd.rollouts.episodes.worlds import CallersEnvironment, NoEnvironment, OwnEnvironment, World
from opd.text import to_one_line, strip_control_characters
from opd.tool_formats.records import BadCall
from opd.tool_formats.thoughts import without_thoughts

T = TypeVar("T")
MAX_ERROR = 500
"""Characters that are kept of what broke an episode."""
UNREADABLE = "error: this call cannot be made: "
"""Begins what the policy reads after a call that does not parse."""


class Dialogues:
    """Makes the dialogue of an episode. The chat template is proven once, when the first chat prompt comes."""

    def __init__(self, tokenizer: TurnTokenizer, stop_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = frozenset(stop_token_ids)
        self._appenders: dict[tuple[date | None, str, str], ChatAppender] = {}

    def make_dialogue(self, request: EpisodeRequest, tools: Sequence[Tool]) -> Dialogue:
        """Make the dialogue that fits the request's prompt. Raises: ModelError if the template cannot append."""
        if isinstance(request.prompt.text, str):
            return PlainDialogue(self.tokenizer, tools, self.stops)
        return ChatDialogue(self.make_appender(request.options), tools)

    def make_appender(self, options: EpisodeOptions | AgentOptions) -> ChatAppender:
        """Return the appender for the student's chat template, as these options want it. Raises: ModelError if it cannot
        append."""
        day, parser, variables = options.template_date, options.tool_call_parser, options.chat_template_kwargs
        # The variables as JSON, because a mapping cannot be part of a key.
        key = day, parser, json.dumps(variables, sort_keys=True)
        if key not in self._appenders:
            self._appenders[key] = ChatAppender(self.tokenizer, sorted(self.stops), day, parser, variables)
        return self._appenders[key]

    def clean_text(self, text: str) -> str:
        """Return what the policy wrote, as text that another dialogue can begin with."""
        return escape_specials(strip_control_characters(text), self._special)

    @cached_property
    def _special(self) -> Sequence[str]:
        return special_texts(self.tokenizer)


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
    site = _StepContext(engine, dialogues, context, version, expert)
    return await _gather_or_cancel(_EpisodeRun(request, site).run() for request in requests)


async def _gather_or_cancel(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines at once and return their results, in order. Raises: what the first that fails raises; the others are
    cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except ExceptionGroup as errors:
        # Callers know the errors of an engine or a template, and no group around them.
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def seed_of(*parts: object) -> int:
    """Return a seed of 32 bits that depends on every part and on nothing else."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


@dataclass(frozen=True, slots=True)
class _StepContext:
    """Engines and settings that all agents of a step share."""

    engine: TokenEngine
    dialogues: Dialogues
    context: int
    """The engine's."""
    version: int
    """The policy's."""
    expert: TokenEngine | None
    """Writes the turns of a request's guide."""
    handover: asyncio.Lock = field(default_factory=asyncio.Lock)
    """See `opd.rollouts.episodes.threads.hand_over`."""


class _EpisodeRun:
    """The agent of one episode while it runs, or a sub-agent."""

    def __init__(
        self, request: EpisodeRequest, site: _StepContext, caller: _EpisodeRun | None = None, shares: bool = False
    ) -> None:
        """`caller` started it with a tool call, and `shares` its environment or not."""
        assert isinstance(request.options, EpisodeOptions)
        self._request = request
        self._options = request.options
        self._site = site
        self._shares = shares
        self._origin: SegmentOrigin = "main" if caller is None else "sub_agent"
        self._trace = Trace(site.version, request.masked, "" if caller is None else request.sample.domain)
        self._world: World = _open_world(request, request.options, caller._world if caller and shares else None)
        self._delegation = Delegation(request, request.options, site.dialogues.clean_text)
        self._environment_lock = asyncio.Lock()
        """Held by the sub-agent that acts on this agent's environment."""
        self._compactor = Compactor(request.options.compaction)
        self._history = History([])
        """The segment that grows."""
        self._watch: GuardWatch | None = caller._watch if caller and shares else watch_of(request)
        self._turns = 0
        self._invalid = 0
        self._text = ""
        """The last turn."""
        self._close_error = ""
        self._dialogue_lines: list[str] = []

    async def run(self) -> EpisodeResult:
        """Play the episode to its end. Raises: RunError, ModelError, for what is no fault of the environment."""
        end = await self.play_episode()
        rewards = self._world.rewards
        reward = math.fsum(rewards) if rewards else None
        return EpisodeResult(
            rollouts=tuple(self._trace.to_rollouts(self._request.sample, end.reason, reward)),
            stop_reason=end.reason,
            reward=reward,
            audit=self._trace.audit,
            invalid_calls=self._invalid,
            error=self._describe_error(end.error),
            close_error=self._describe_error(self._close_error),
            text="\n".join(self._dialogue_lines),
            guard=None if self._watch is None else self._watch.stats,
            sub_agents=dict(self._delegation.ends),
            sub_agent_error=self._delegation.error,
        )

    async def play_episode(self) -> EpisodeEnd:
        """Play all turns, close the environment, and return why the episode ended. Raises: as `run`."""
        try:
            end = await self._end_of_part(self._play_turns)
            # After a timeout the environment's thread is still busy, so a call of `close` would only run into the next deadline;
            # `leave` has that thread close it once it is back.
            if end.reason != "timeout":
                await self._close()
        finally:
            self._world.leave()
        return end

    async def _end_of_part(self, part: Callable[[], Any]) -> EpisodeEnd:
        """Run a part of the episode that ends it, and return why it ended."""
        from jinja2 import TemplateError

        try:
            await part()
        except EpisodeEnd as end:
            return end
        except BadObservation as error:
            return EpisodeEnd("observation", str(error))
        except TemplateError as error:
            return EpisodeEnd("template", str(error))
        raise AssertionError("a part of an episode that does not end it")

    async def _close(self) -> None:
        """Close the environment. The episode has ended, so an error is noted and changes neither why nor what was earned."""
        try:
            await self._world.close()
        except EpisodeEnd as error:
            self._close_error = self._close_error or error.error

    def _describe_error(self, error: str) -> str:
        """Return an error as one line with the episode's id in front; empty if there is none."""
        return to_one_line(f"{self._request.sample.sample_id}: {error}", MAX_ERROR) if error else ""

    async def _play_turns(self) -> None:
        """Play the turns. Raises: EpisodeEnd, always, or what ends an episode otherwise."""
        opening = await self._begin_episode()
        segment = self._trace.begin_segment(await run_in_reader(opening.ids), self._origin)
        self._history = History(list(segment.ids))
        self._dialogue_lines += [f"environment: {text}" for text in opening.texts if text]
        limit = self._request.cut_after or self._options.max_turns
        for turn in range(limit):
            author, sampled = await self._sample_turn(segment, turn)
            answer = await self._answer_turn(segment, sampled, opening.dialogue, author)
            if turn + 1 < limit:
                segment = await self._continue_history(segment, sampled, answer, opening)
            else:  # the policy does not read what follows the last turn, so it needs no summary and no room
                with suppress(BadObservation):
                    self._note_observation(answer)
        raise EpisodeEnd("curriculum" if limit < self._options.max_turns else "turns")

    async def _sample_turn(self, segment: TraceSegment, turn: int) -> tuple[str, SampledTurn]:
        """Sample the next turn; return its author, policy or expert, and the turn. Each turn of each episode has a coin of its
        own. Raises: EpisodeEnd."""
        guide, most = self._request.guide, self._options.max_turn_tokens
        # A seed has 32 bits and follows from the run's seed and the ids alone, so a resumed run throws the same coin.
        if guide is None or self._turn_seed("guide", turn) >= guide.probability * 2**32:
            return "policy", await self._sample_policy(segment, most, "turn", turn)
        assert self._site.expert is not None
        self._tokens_left_in_context(segment)  # an episode whose budget is spent is over, whoever would write next
        expert_turn = await self._sample_and_yield(self._site.expert, segment, min(self._context_left(segment), most), "turn", turn)
        segment.append_teacher_turn(expert_turn, train=guide.train)
        return "expert", expert_turn

    async def _sample_policy(self, segment: TraceSegment, max_tokens: int, *what: object) -> SampledTurn:
        """Let the policy write after the segment. Raises: EpisodeEnd."""
        most = min(self._tokens_left_in_context(segment), max_tokens)
        sampled = await self._sample_and_yield(self._site.engine, segment, most, *seed_parts)
        segment.append_policy_turn(sampled)
        return sampled

    async def _sample_and_yield(self, engine: TokenEngine, segment: TraceSegment, max_tokens: int, *what: object) -> SampledTurn:
        """Have an engine write after the segment; `seed_parts` decides the seed."""
        sampled = await engine.generate(segment.ids, max_tokens=max_tokens, seed=self._turn_seed(*seed_parts))
        await hand_over(self._site.handover)
        return sampled

    def _turn_seed(self, *what: object) -> int:
        return seed_of(self._request.seed, self._request.sample.sample_id, *seed_parts)

    async def _continue_history(
        self, segment: TraceSegment, sampled: SampledTurn, answer: EncodedAnswer, opening: Opening
    ) -> TraceSegment:
        """Return the segment that the next turn follows: this one with what the environment answered, one without earlier
        thoughts, or a compacted one."""
        dialogue = opening.dialogue
        ids = await run_in_reader(answer.ids, dialogue)
        self._note_observation(answer)
        self._history.turns.append((list(sampled.token_ids), ids))
        if dialogue.drops_thoughts(calls=answer.calls):
            self._history = await run_in_reader(self._history.without_thoughts, dialogue)
        compaction = self._compactor.options_if_due(len(self._history.ids))
        if compaction is None:
            return self._trace.continue_segment(segment, self._history.ids)
        summary_history = self._history.with_last(await run_in_reader(answer.ids, dialogue, compaction.prompt))
        if dialogue.drops_thoughts(calls=answer.calls, noted=True):
            summary_history = await run_in_reader(summary_history.without_thoughts, dialogue)
        segment = self._trace.continue_segment(segment, summary_history.ids)
        summary_turn = await self._sample_policy(segment, compaction.max_tokens, "summary", self._compactor.num_summaries)
        summary = strip_control_characters(without_thoughts(await run_in_reader(dialogue.text, summary_turn.token_ids)))
        self._dialogue_lines.append(f"summary: {summary}")
        head = await run_in_reader(opening.ids, compaction.resume.replace(PLACEHOLDER, summary))
        self._history = self._compactor.cut_history(self._history, compaction.keep_last, head)
        return self._trace.begin_segment(self._history.ids, "summary", segment)

    def _note_observation(self, answer: EncodedAnswer) -> None:
        """Note the environment's texts in the dialogue that people read. Raises: BadObservation for what nobody can read."""
        self._dialogue_lines += [f"environment: {check_observation(text)}" for text in answer.texts]

    async def _begin_episode(self) -> Opening:
        request = self._request
        observation = await self._world.begin()
        dialogue = await run_in_reader(
            self._site.dialogues.make_dialogue, request, (*self._world.tools, *self._delegation.tools)
        )
        return Opening(dialogue, request.prompt.text, observation)

    def _tokens_left_in_context(self, segment: TraceSegment) -> int:
        """Return the number of tokens that the policy may write next. Raises: EpisodeEnd if there are none."""
        in_context = self._context_left(segment)
        if in_context < 1:
            raise EpisodeEnd("context")
        budget_left = self._own_tokens_left()
        if budget_left is not None and budget_left < 1:
            raise EpisodeEnd("tokens")
        return in_context if budget_left is None else min(in_context, budget_left)

    def _context_left(self, segment: TraceSegment) -> int:
        """Return the number of tokens that the context has left."""
        return self._site.context - len(segment.ids)

    def _own_tokens_left(self) -> int | None:
        """Return what is left of the agent's budget of tokens, those of its sub-agents taken off; None: it has no limit."""
        budget = self._options.max_tokens
        return None if budget is None else budget - self._trace.audit.sampled

    async def _answer_turn(
        self, segment: TraceSegment, sampled: SampledTurn, dialogue: Dialogue, author: str
    ) -> EncodedAnswer:
        """Return what environment and sub-agents answer to the turn. Raises: EpisodeEnd."""
        ended = sampled.stop_reason == "stop"
        if not ended and len(sampled.token_ids) < self._options.max_turn_tokens:
            self._tokens_left_in_context(
                segment
            )  # cut by the episode's budget or by the context: the turn is not whole
        self._turns += 1
        self._text = text = await run_in_reader(dialogue.text, sampled.token_ids)
        self._dialogue_lines.append(f"{author}: {text}")
        try:
            calls = await run_in_reader(dialogue.calls, text)
            delegated = [self._delegation.starts_sub_agent(call) for call in calls]
        except BadCall as error:
            self._invalid += 1
            return EncodedAnswer(f"{UNREADABLE}{error}", calls=1, ended=ended)
        environment_calls = tuple(call for call, is_delegated in zip(calls, delegated, strict=True) if not is_delegated)
        outcome = (
            await self._act_in_environment(segment, sampled, Action(text=text, calls=environment_calls))
            if environment_calls or not calls
            else Outcome()
        )
        if outcome.done:
            raise EpisodeEnd("done")
        if len(environment_calls) == len(calls):
            return EncodedAnswer(outcome.observation, calls=len(calls), ended=ended)
        answers = await self._run_sub_agents([c for c, is_delegated in zip(calls, delegated, strict=True) if is_delegated], segment)
        return EncodedAnswer(merge_answers(delegated, answers, outcome), calls=len(calls), ended=ended)

    async def _act_in_environment(self, segment: TraceSegment, sampled: SampledTurn, action: Action) -> Outcome:
        """Act on the environment, but for calls that the guard blocks, which it answers in the environment's place. Raises:
        EpisodeEnd."""
        looked = CheckedTurn(calls=action.calls)
        if self._watch is not None:
            looked = await self._watch.check_turn(self._turns - 1, "" if action.calls else action.text, action.calls)
            self._watch.record_turn(looked)
            self._dialogue_lines += [event.line for event in looked.stats.events]
            if looked.blocked:
                segment.mark_last_turn(sampled, self._watch.mark)
            if looked.stops:
                return Outcome(observation=looked.instead)
        outcome = await self._world.step(replace(action, calls=looked.allowed))
        return replace(outcome, observation=looked.merge_observations(outcome.observation))

    async def _run_sub_agents(self, calls: Sequence[ToolCall], segment: TraceSegment) -> list[str]:
        """Run the sub-agents that these calls of a turn start, and return their answers. Raises: EpisodeEnd if the environment
        is over then."""
        agents = [
            None
            if request is None
            else _EpisodeRun(request, self._site, self, self._delegation.shares_environment(call))
            for call, request in zip(calls, self._delegation.make_requests(calls, self._own_tokens_left()), strict=True)
        ]
        ends = await _gather_or_cancel(self._play_sub_agent(agent) for agent in agents)
        # In the order of the calls, whichever sub-agent ended first: the trace must not depend on that.
        answers = [
            self._delegation.refusal_text()
            if agent is None or end is None
            else self._absorb_sub_agent(call, agent, end, segment)
            for call, agent, end in zip(calls, agents, ends, strict=True)
        ]
        if self._world.over is not None:
            raise self._world.over
        return answers

    async def _play_sub_agent(self, agent: _EpisodeRun | None) -> EpisodeEnd | None:
        """Play a sub-agent's episode and return why it ended; None if it did not begin. Those that share the environment take
        turns, in the calls' order."""
        if agent is None:
            return None
        if not agent._shares:
            return await agent.play_episode()
        async with self._environment_lock:
            return None if self._world.over else await agent.play_episode()

    def _absorb_sub_agent(self, call: ToolCall, agent: _EpisodeRun, end: EpisodeEnd, segment: TraceSegment) -> str:
        """Take over the tokens and counts of a sub-agent that has ended, and return what the policy reads of it."""
        self._trace.adopt_segments(agent._trace, segment)
        if self._watch is not None and agent._watch is not None and agent._watch is not self._watch:
            self._watch.stats += agent._watch.stats
        self._invalid += agent._invalid
        self._close_error = self._close_error or agent._describe_error(agent._close_error)
        self._dialogue_lines += [f"{call.name}: {line}" for line in agent._dialogue_lines]
        inner = agent._delegation
        return self._delegation.render_answer(
            call, EpisodeEnd(end.reason, agent._describe_error(end.error)), without_thoughts(agent._text), inner
        )


def watch_of(request: EpisodeRequest) -> GuardWatch | None:
    """Return the guard of one episode, if its domain has one. Raises: ConfigError for rules or a judge that cannot be used."""
    spec = request.options.guard
    return None if spec is None else GuardWatch(shared_guard(spec), request.sample.sample_id, spec.config.on_hit)


def _open_world(request: EpisodeRequest, options: EpisodeOptions, lent: World | None) -> World:
    """Make what the agent of a request acts on; `lent` is its caller's environment."""
    if lent is not None:
        return CallersEnvironment(lent)
    if not options.environment:
        return NoEnvironment()
    seed = seed_of(request.seed, request.prompt.id, "environment")
    return OwnEnvironment(options, request.prompt.metadata, seed)
