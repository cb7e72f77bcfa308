"""The white box: an environment of ours, called from here, and the policy take turns until the episode ends. (The black box,
somebody else's program that asks over HTTP, is `opd.rollouts.endpoint.episode`.)

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
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import Any, TypeVar

from opd.config.context import PLACEHOLDER
from opd.guard.build import shared_guard
from opd.guard.episode_guard import CheckedTurn, GuardWatch
from opd.interfaces import TokenEngine
from opd.prompts.untrusted_text import escape_specials, special_texts
from opd.records.environments import Action, Outcome, Tool, ToolCall
from opd.records.episodes import EpisodeResult
from opd.records.types import SampledTurn, SegmentOrigin
from opd.rollouts.decoding import TurnTokenizer
from opd.rollouts.endpoint.options import AgentOptions
from opd.rollouts.episodes.chat import ChatAppender
from opd.rollouts.episodes.compaction import CompactionOptions, Compactor
from opd.rollouts.episodes.delegation import Delegation, merge_answers
from opd.rollouts.episodes.dialogue import BadObservation, ChatDialogue, Dialogue, PlainDialogue, check_observation
from opd.rollouts.episodes.spec import EpisodeEnd, EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.threads import hand_over, run_in_reader
from opd.rollouts.episodes.trace import Trace, TraceSegment
from opd.rollouts.episodes.turns import History, Opening, TurnAnswer
from opd.rollouts.episodes.worlds import CallersEnvironment, OwnEnvironment, World
from opd.text import strip_control_characters, to_one_line
from opd.tool_formats.records import BadCall
from opd.tool_formats.thoughts import without_thoughts

T = TypeVar("T")
MAX_ERROR = 500
"""Longest error of an episode that is kept, in characters."""
UNREADABLE = "error: this call cannot be made: "
"""Start of the observation that the policy reads after a call that does not parse."""


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
        """Return a text that the policy wrote without control characters and special tokens, so that it can stand in another
        dialogue."""
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
    """Run all episodes at once, and return their results in the order of the requests.

    `context` is the longest sequence of the engine in tokens, `version` the policy's; `expert` writes the turns that a request's
    guide asks for. Raises: RunError, ModelError.
    """
    shared = _SharedSettings(engine, dialogues, context, version, expert)
    return await _gather_or_cancel(_EpisodeRun(request, shared).run() for request in requests)


async def _gather_or_cancel(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines at once and return their results, in order. If one fails, the others are cancelled. Raises: the error of
    the first one that fails."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
    except ExceptionGroup as errors:
        # Callers catch the errors of an engine or a template, not a group of errors.
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def derive_seed(*parts: object) -> int:
    """Return a seed of 32 bits that depends on every part and on nothing else."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


@dataclass(frozen=True, slots=True)
class _SharedSettings:
    """Engines and settings that all agents of a step share."""

    engine: TokenEngine
    dialogues: Dialogues
    context_tokens: int
    """Longest sequence of the engine, prompt and turns together."""
    version: int
    """The policy's version."""
    expert: TokenEngine | None
    """Writes the turns that a request's guide asks for."""
    handover: asyncio.Lock = field(default_factory=asyncio.Lock)
    """See `opd.rollouts.episodes.threads.hand_over`."""


class _EpisodeRun:
    """The agent of one episode while it runs, or a sub-agent."""

    def __init__(
        self,
        request: EpisodeRequest,
        shared: _SharedSettings,
        caller: _EpisodeRun | None = None,
        shares_environment: bool = False,
    ) -> None:
        """`caller` is the agent that started this one with a tool call, None for an episode's own agent. If `shares_environment`
        is true, this one acts on the caller's environment, under the caller's guard."""
        assert isinstance(request.options, EpisodeOptions)
        self._request = request
        self._options = request.options
        self._shared = shared
        self._shares_environment = shares_environment
        host = caller if shares_environment else None
        self._origin: SegmentOrigin = "main" if caller is None else "sub_agent"
        self._trace = Trace(shared.version, request.masked, "" if caller is None else request.sample.domain)
        self._world: World = _open_world(request, request.options, None if host is None else host._world)
        self._delegation = Delegation(request, request.options, shared.dialogues.clean_text)
        self._environment_lock = asyncio.Lock()
        """Held by the sub-agent that acts on this agent's environment."""
        self._compactor = Compactor(request.options.compaction)
        self._history = History([])
        """The tokens of the trace's newest segment in pieces (head, turns, what follows each turn), so that thoughts can be left
        out and turns be kept after a summary. After each `_continue_history` its `ids` are those of the segment."""
        self._watch: GuardWatch | None = open_guard_watch(request) if host is None else host._watch
        self._turns = 0
        self._invalid = 0
        self._last_text = ""
        """Text of the last turn."""
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
            end = await self._run_until_end(self._play_turns())
            # After a timeout the environment's thread is still busy, so a call of `close` would only run into the next deadline;
            # `leave` has that thread close it once it is back.
            if end.reason != "timeout":
                await self._close()
        finally:
            self._world.leave()
        return end

    async def _run_until_end(self, turns: Coroutine[Any, Any, None]) -> EpisodeEnd:
        """Run `turns`, which always raises, and return the end of the episode that it raised."""
        from jinja2 import TemplateError

        try:
            await turns
        except EpisodeEnd as end:
            return end
        except BadObservation as error:
            return EpisodeEnd("observation", str(error))
        except TemplateError as error:
            return EpisodeEnd("template", str(error))
        raise AssertionError("the turns are over without an EpisodeEnd")

    async def _close(self) -> None:
        """Close the environment. The episode has ended, so an error is only noted: it changes neither the stop reason nor the
        reward."""
        try:
            await self._world.close()
        except EpisodeEnd as error:
            self._close_error = self._close_error or error.error

    def _describe_error(self, error: str) -> str:
        """Return an error as one line with the episode's id in front; empty if there is none."""
        return to_one_line(f"{self._request.sample.sample_id}: {error}", MAX_ERROR) if error else ""

    async def _play_turns(self) -> None:
        """Play the turns. Raises always: EpisodeEnd, or one of the other errors that end an episode (see `_run_until_end`)."""
        opening = await self._begin_episode()
        segment = self._trace.begin_segment(await run_in_reader(opening.encode), self._origin)
        self._history = History(list(segment.ids))
        self._dialogue_lines += [f"environment: {text}" for text in opening.texts if text]
        limit = self._request.cut_after or self._options.max_turns
        for turn in range(limit):
            author, sampled = await self._sample_turn(segment, turn)
            answer = await self._answer_turn(segment, sampled, opening.dialogue, author)
            if turn + 1 < limit:
                segment = await self._continue_history(segment, sampled, answer, opening)
            else:
                # The policy does not read what follows the last turn, so it needs no summary and no room in the context.
                with suppress(BadObservation):
                    self._note_observation(answer)
        raise EpisodeEnd("curriculum" if limit < self._options.max_turns else "turns")

    async def _sample_turn(self, segment: TraceSegment, turn: int) -> tuple[str, SampledTurn]:
        """Sample the next turn; return its author, `policy` or `expert`, and the turn. A guide decides by a coin for each turn of
        each episode. Raises: EpisodeEnd."""
        guide, max_tokens = self._request.guide, self._options.max_turn_tokens
        # A seed has 32 bits and follows from the run's seed and the ids alone, so a resumed run tosses the same coin.
        if guide is None or self._turn_seed("guide", turn) >= guide.probability * 2**32:
            return "policy", await self._sample_policy(segment, max_tokens, "turn", turn)
        assert self._shared.expert is not None
        # An episode whose budget is spent is over, whoever would write next. But an expert's tokens are not taken off the budget,
        # so it does not limit this turn.
        self._refuse_if_no_tokens_left(segment)
        max_tokens = min(self._context_left(segment), max_tokens)
        expert_turn = await self._sample_and_yield(self._shared.expert, segment, max_tokens, "turn", turn)
        segment.append_teacher_turn(expert_turn, train=guide.train)
        return "expert", expert_turn

    async def _sample_policy(self, segment: TraceSegment, max_tokens: int, *seed_parts: object) -> SampledTurn:
        """Have the policy write a turn of at most `max_tokens` after the segment, and append it. Raises: EpisodeEnd if there is no
        room for one token."""
        self._refuse_if_no_tokens_left(segment)
        limits = (max_tokens, self._context_left(segment), self._budget_left())
        max_tokens = min(limit for limit in limits if limit is not None)
        sampled = await self._sample_and_yield(self._shared.engine, segment, max_tokens, *seed_parts)
        segment.append_policy_turn(sampled)
        return sampled

    async def _sample_and_yield(
        self, engine: TokenEngine, segment: TraceSegment, max_tokens: int, *seed_parts: object
    ) -> SampledTurn:
        """Have an engine write after the segment, then let other work of the loop go first; `seed_parts` decide the seed."""
        sampled = await engine.generate(segment.ids, max_tokens=max_tokens, seed=self._turn_seed(*seed_parts))
        await hand_over(self._shared.handover)
        return sampled

    def _turn_seed(self, *seed_parts: object) -> int:
        return derive_seed(self._request.seed, self._request.sample.sample_id, *seed_parts)

    async def _continue_history(
        self, segment: TraceSegment, sampled: SampledTurn, answer: TurnAnswer, opening: Opening
    ) -> TraceSegment:
        """Add a turn and its answer to the history, and return the segment that the next turn follows: this one with what the
        environment answered, one without earlier thoughts, or a compacted one. Raises: EpisodeEnd, BadObservation, and what a chat
        template raises."""
        dialogue = opening.dialogue
        ids = await run_in_reader(answer.encode, dialogue)
        self._note_observation(answer)
        self._history.turns.append((list(sampled.token_ids), ids))
        if dialogue.drops_thoughts(calls=answer.calls):
            self._history = await run_in_reader(self._history.without_thoughts, dialogue)
        compaction = self._compactor.options_if_due(len(self._history.ids))
        if compaction is None:
            return self._trace.continue_segment(segment, self._history.ids)
        return await self._compact_history(segment, answer, opening, compaction)

    async def _compact_history(
        self, segment: TraceSegment, answer: TurnAnswer, opening: Opening, compaction: CompactionOptions
    ) -> TraceSegment:
        """Have the policy write a summary, and return the segment that begins with it. Raises: as `_continue_history`."""
        dialogue = opening.dialogue
        # The same history, but the last observation is followed by the request for a summary.
        summary_history = self._history.replace_end(await run_in_reader(answer.encode, dialogue, compaction.prompt))
        if dialogue.drops_thoughts(calls=answer.calls, noted=True):
            summary_history = await run_in_reader(summary_history.without_thoughts, dialogue)
        segment = self._trace.continue_segment(segment, summary_history.ids)
        number = self._compactor.num_summaries
        summary_turn = await self._sample_policy(segment, compaction.max_tokens, "summary", number)
        summary = strip_control_characters(without_thoughts(await run_in_reader(dialogue.text, summary_turn.token_ids)))
        self._dialogue_lines.append(f"summary: {summary}")
        head = await run_in_reader(opening.encode, compaction.resume.replace(PLACEHOLDER, summary))
        self._history = self._compactor.cut_history(self._history, compaction.keep_last, head)
        return self._trace.begin_segment(self._history.ids, "summary", segment)

    def _note_observation(self, answer: TurnAnswer) -> None:
        """Note the environment's texts in the dialogue that people read. Raises: BadObservation for a text that nobody can read."""
        self._dialogue_lines += [f"environment: {check_observation(text)}" for text in answer.texts]

    async def _begin_episode(self) -> Opening:
        """Begin the environment, and return the prompt and first observation with the dialogue for them. Raises: EpisodeEnd,
        ModelError."""
        request = self._request
        observation = await self._world.begin()
        tools = (*self._world.tools, *self._delegation.tools)
        dialogue = await run_in_reader(self._shared.dialogues.make_dialogue, request, tools)
        return Opening(dialogue, request.prompt.text, observation)

    def _refuse_if_no_tokens_left(self, segment: TraceSegment) -> None:
        """End the episode if the context or the agent's budget has no room for another token. Raises: EpisodeEnd."""
        if self._context_left(segment) < 1:
            raise EpisodeEnd("context")
        budget_left = self._budget_left()
        if budget_left is not None and budget_left < 1:
            raise EpisodeEnd("tokens")

    def _context_left(self, segment: TraceSegment) -> int:
        """Return how many tokens still fit into the context after the segment."""
        return self._shared.context_tokens - len(segment.ids)

    def _budget_left(self) -> int | None:
        """Return how many tokens are left of the agent's budget; None: it has no limit. Sub-agents draw on the same budget: their
        segments are in the trace once they have ended."""
        budget = self._options.max_tokens
        return None if budget is None else budget - self._trace.audit.sampled

    async def _answer_turn(
        self, segment: TraceSegment, sampled: SampledTurn, dialogue: Dialogue, author: str
    ) -> TurnAnswer:
        """Return what environment and sub-agents answer to the turn. Raises: EpisodeEnd."""
        ended = sampled.stop_reason == "stop"
        if not ended and len(sampled.token_ids) < self._options.max_turn_tokens:
            # The budget or the context cut the turn short, so it is not whole, and there is no room for another.
            self._refuse_if_no_tokens_left(segment)
        self._turns += 1
        self._last_text = text = await run_in_reader(dialogue.text, sampled.token_ids)
        self._dialogue_lines.append(f"{author}: {text}")
        try:
            calls = await run_in_reader(dialogue.calls, text)
            delegated = [self._delegation.starts_sub_agent(call) for call in calls]
        except BadCall as error:
            self._invalid += 1
            return TurnAnswer(f"{UNREADABLE}{error}", calls=1, ended=ended, turn=text)
        pairs = list(zip(calls, delegated, strict=True))
        environment_calls = tuple(call for call, is_delegated in pairs if not is_delegated)
        outcome = Outcome()
        if environment_calls or not calls:  # a turn without calls is for the environment, too
            action = Action(text=text, calls=environment_calls)
            outcome = await self._act_in_environment(segment, sampled, action)
        if outcome.done:
            raise EpisodeEnd("done")
        observation = outcome.observation
        if any(delegated):
            answers = await self._run_sub_agents([call for call, is_delegated in pairs if is_delegated], segment)
            observation = merge_answers(delegated, answers, outcome)
        return TurnAnswer(observation, calls=len(calls), ended=ended, turn=text)

    async def _act_in_environment(self, segment: TraceSegment, sampled: SampledTurn, action: Action) -> Outcome:
        """Act on the environment. Calls that the guard blocks do not reach it: the guard answers them in its place. Raises:
        EpisodeEnd."""
        checked_turn = CheckedTurn(calls=action.calls)
        if self._watch is not None:
            text = "" if action.calls else action.text
            checked_turn = await self._watch.check_turn(self._turns - 1, text, action.calls)
            self._watch.record_turn(checked_turn)
            self._dialogue_lines += [event.line for event in checked_turn.stats.events]
            if checked_turn.blocked:
                segment.mark_last_turn(sampled, self._watch.mark)
            if checked_turn.stops:
                return Outcome(observation=checked_turn.instead)
        outcome = await self._world.step(replace(action, calls=checked_turn.allowed))
        return replace(outcome, observation=checked_turn.merge_observations(outcome.observation))

    async def _run_sub_agents(self, calls: Sequence[ToolCall], segment: TraceSegment) -> list[str]:
        """Run the sub-agents that these calls of a turn start, and return their answers, one for each call. Raises: EpisodeEnd if
        they brought the environment to its end."""
        requests = self._delegation.make_requests(calls, self._budget_left())
        agents = [
            _EpisodeRun(request, self._shared, self, self._delegation.shares_environment(call)) if request else None
            for call, request in zip(calls, requests, strict=True)
        ]
        ends = await _gather_or_cancel(self._play_sub_agent(agent) for agent in agents)
        # In the order of the calls, because the trace must not depend on which sub-agent ended first.
        answers = [
            self._delegation.refuse_call()
            if agent is None or end is None
            else self._absorb_sub_agent(call, agent, end, segment)
            for call, agent, end in zip(calls, agents, ends, strict=True)
        ]
        if self._world.over is not None:
            raise self._world.over
        return answers

    async def _play_sub_agent(self, agent: _EpisodeRun | None) -> EpisodeEnd | None:
        """Play a sub-agent's episode and return why it ended; None if it did not begin. Sub-agents that share the environment play
        one after the other, in the order of the calls."""
        if agent is None:
            return None
        if not agent._shares_environment:
            return await agent.play_episode()
        # Tasks start in the order in which they were made, and asyncio's lock serves those that wait in the order they came.
        async with self._environment_lock:
            return None if self._world.over else await agent.play_episode()

    def _absorb_sub_agent(self, call: ToolCall, agent: _EpisodeRun, end: EpisodeEnd, segment: TraceSegment) -> str:
        """Take over the segments and counts of a sub-agent that has ended, and return what its caller reads as its answer."""
        self._trace.adopt_segments(agent._trace, segment)
        if self._watch is not None and agent._watch is not None and agent._watch is not self._watch:
            self._watch.stats += agent._watch.stats
        self._invalid += agent._invalid
        self._close_error = self._close_error or agent._describe_error(agent._close_error)
        self._dialogue_lines += [f"{call.name}: {line}" for line in agent._dialogue_lines]
        described_end = EpisodeEnd(end.reason, agent._describe_error(end.error))
        last_turn = without_thoughts(agent._last_text)
        return self._delegation.render_answer(call, described_end, last_turn, agent._delegation)


def open_guard_watch(request: EpisodeRequest) -> GuardWatch | None:
    """Return the guard's watch over one episode; None if its domain has no guard. Raises: ConfigError for rules or a judge that cannot be used."""
    spec = request.options.guard
    return None if spec is None else GuardWatch(shared_guard(spec), request.sample.sample_id, spec.config.on_hit)


def _open_world(request: EpisodeRequest, options: EpisodeOptions, callers_world: World | None) -> World:
    """Make the world in which the agent of a request acts. `callers_world` is that of the caller, if the two share it."""
    if callers_world is not None:
        return CallersEnvironment(callers_world)
    if not options.environment:
        return World()
    seed = derive_seed(request.seed, request.prompt.id, "environment")
    return OwnEnvironment(options, request.prompt.metadata, seed)
