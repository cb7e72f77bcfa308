"""One episode as its agent sees it: requests come in, turns of the policy go out, and every turn is kept in the trace.

A request that continues what was sent keeps the sampled tokens: the messages up to the last reply are checked up, and only
those after it are rendered and appended. Any other request begins a new segment, a fork.

    request   system  user   assistant  tool              assistant is checked up by what it says, however it is written
    tokens    ─── segment up to the end of that reply ───┤ new: tool ├─→ the engine samples what follows

With a guard, a turn of which nothing may happen does not go to the agent: the session answers its calls with the errors that they
would naturally give, and has the engine write another turn. Of a turn with some blocked calls the agent sees the other calls; the
session puts the errors of the blocked ones between the agent's results.

    engine   turn: blocked call    ┌─→ turn: call, blocked call            ┌─→ turn
    session  └─→ tool: its error ──┘   │    (the agent's) tool, its error ─┘
    agent                              └─→ reply: call ─→ request: tool
"""

from __future__ import annotations

import asyncio
import secrets
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from opd.errors import RunError
from opd.guard.episode_guard import CheckedTurn, GuardWatch
from opd.interfaces import TokenEngine
from opd.records.environments import ToolCall
from opd.records.episodes import Audit
from opd.records.types import SampledTurn
from opd.rollouts.endpoint.budget import Budget
from opd.rollouts.endpoint.dialogue import ClientDialogue, UnreadableMessages
from opd.rollouts.endpoint.messages import (
    ApiError,
    Call,
    Message,
    Reply,
    Request,
    conversation_digests,
    make_request_error,
)
from opd.rollouts.endpoint.turn_seeds import Draws
from opd.rollouts.episodes.dialogue import MAX_OBSERVATION
from opd.rollouts.episodes.runner import UNREADABLE, derive_seed
from opd.rollouts.episodes.threads import hand_over, run_in_reader
from opd.rollouts.episodes.trace import Trace, TraceSegment
from opd.rollouts.episodes.turns import History
from opd.tool_formats.records import BadCall
from opd.tool_formats.thoughts import without_thoughts

End = Literal["closed", "turns", "tokens", "foreign", "engine"]
"""Reason why a session takes no more requests: its episode is over; it had as many requests, or sampled as many tokens, as it may;
its agent asked in the name of another session; the engine failed."""

QUOTED = 32
"""Length in characters from which a reply that stands in another dialogue's messages counts as quoted, not as there by accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of a session, whatever its requests say."""

    max_new_tokens: int
    """Longest turn; a request may ask for a shorter one."""
    max_model_len: int
    """Longest sequence, prompt and turn together."""
    max_calls: int
    """Most requests of the session, retries included."""
    max_tokens: int | None = None
    """Most tokens that are sampled for the session; None: as many as there are."""
    seed: str
    """Decides what is sampled, together with the number of the turn."""


@dataclass(frozen=True, slots=True)
class _ReplyEnd:
    """The place of a reply in the trace."""

    segment: TraceSegment
    begin: int
    """Index in the segment's `ids` at which the reply's tokens begin."""
    end: int
    """Index after the reply's last token."""
    turns: int
    """Number of turns of the policy up to and with the reply; turns that no agent saw count, too."""
    dummies: tuple[str | None, ...] = ()
    """For each call that the policy wrote in the reply, the result that the session gives in the agent's place; None: the agent gives
    it."""

    @property
    def is_last(self) -> bool:
        """True if nothing follows the reply in its segment."""
        return self.end == len(self.segment.ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request that was accepted, and the reply that it gets."""

    session: EndpointSession
    request: Request
    ids: Sequence[int]
    """Tokens of everything that comes before the reply."""
    max_tokens: int
    """Limit of the reply in tokens; it gets a lower one if the session's budget has fewer left."""
    number: int = 0
    """Number of turns of the policy before this one."""
    reply_id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    recorded: Reply | None = None
    """The reply to the same request, if it was answered before."""

    async def wait_for_reply(self) -> Reply:
        """Return the policy's answer. Raises: ApiError if the engine fails or the session ends meanwhile."""
        return self.recorded or await self.session.sample_turn(self)


@dataclass(frozen=True, slots=True)
class _ReadTurn:
    """A turn that was sampled, with its text and calls."""

    sampled: SampledTurn
    stopped_by: str | None
    """The client's stop string at which the turn was cut; None: it was not cut."""
    full_text: str
    """All text of the turn, calls and stop string included."""
    text: str
    """The text around the calls, up to the stop string."""
    calls: tuple[Call, ...] = ()
    unread: str = ""
    """Reason why a call in the turn cannot be read; empty if all can."""
    checked: CheckedTurn = field(default_factory=lambda: CheckedTurn(calls=()))
    """The guard's verdicts on the turn; none without a guard."""


class EndpointSession:
    """The requests of one episode's agent."""

    def __init__(
        self,
        trace: Trace,
        engine: TokenEngine,
        dialogue: ClientDialogue,
        limits: SessionLimits,
        watch: GuardWatch | None = None,
        handover: asyncio.Lock | None = None,
    ) -> None:
        """`handover` is shared by all sessions of a loop: see `opd.rollouts.episodes.threads.hand_over`."""
        self.secret = secrets.token_urlsafe(24)
        """The key by which the endpoint tells this session's requests from those of others."""
        self.ended = asyncio.Event()
        """Set when the session takes no more requests; `end_reason` says why."""
        self.end_reason: End | None = None
        self.failure: Exception | None = None
        """Error that the engine raised."""
        self.calls = 0
        """Number of requests so far, those that could not be read and turns that were answered here included."""
        self.overridden: Counter[str] = Counter()
        """Setting -> requests that gave it although the training decides it."""
        self.last_text = ""
        """Text of the newest turn."""
        self.dialogue_lines: list[str] = []
        """The dialogue for people: for each turn the message before it and the turn."""
        self.invalid_calls = 0
        """Number of turns with a call that could not be read; the agent gets the text of such a turn as it is."""
        self.too_long = False
        """True once a request was refused because it left no room in the context."""
        self._trace, self._engine, self._dialogue, self._limits = trace, engine, dialogue, limits
        self._watch = watch
        self._handover = handover or asyncio.Lock()
        self._budget = Budget(limits.max_tokens, lambda: trace.audit.sampled)
        self._reply_ends: dict[str, list[_ReplyEnd]] = {}
        """Digest of a conversation up to a reply -> where such replies end."""
        self._answered: dict[str, Reply] = {}
        """Identity of a request -> the reply that it got."""
        self._unseen_histories: dict[str, tuple[Sequence[int], int]] = {}
        """Identity of a request whose newest turns went to no agent -> tokens and number of turns from which its reply goes on."""
        self._draws = Draws()
        self._running: set[asyncio.Task[SampledTurn]] = set()
        self._turns_begun = self._turns_in_trace = 0
        """Number of turns that were asked of the engine, and of those that got into the trace; the others are lost."""

    @property
    def audit(self) -> Audit:
        """The trace's counts, with the turns that were lost. They are final once the session is closed."""
        return self._trace.audit + Audit(lost_turns=self._turns_begun - self._turns_in_trace)

    def end_session(self, reason: End) -> None:
        """Take no more requests. If the session had ended already, its first reason stays."""
        self.end_reason = self.end_reason or reason
        self.ended.set()

    def close(self) -> None:
        """End the session and whatever it is still waiting for."""
        self.end_session("closed")
        for task in self._running:
            task.cancel()

    async def accept_request(self, request: Request) -> Turn:
        """Check a request that was counted, and make its turn. Everything that can be wrong with a request is found here, before a
        stream of its reply begins. Raises: ApiError."""
        self.overridden.update(request.overridden)
        recorded = self._answered.get(request.identity)
        if recorded is not None:
            return Turn(self, request, (), 0, reply_id=recorded.id, created=recorded.created, recorded=recorded)
        ids, number = self._unseen_histories.get(request.identity) or await self._encode_request(request)
        return Turn(self, request, ids, self._token_limit(ids, request), number)

    async def sample_turn(self, turn: Turn) -> Reply:
        """Have the engine write turns until one may go to the agent, and return that one. Only complete turns get into the trace.

        Raises: ApiError.
        """
        while True:
            share = await self._budget.reserve_tokens(turn.max_tokens)
            try:
                if not share:
                    self.end_session("tokens")
                self._refuse_if_ended()
                written, segment = await self._sample_one_turn(replace(turn, max_tokens=share))
            finally:
                # Given back only now that the turn is in the trace: from there on the budget counts its tokens as sampled.
                self._budget.give_back(share)
            if not written.checked.stops:
                return self._make_reply(turn, written, segment)
            turn = await self._answer_unseen_turn(turn, written)

    async def _sample_one_turn(self, turn: Turn) -> tuple[_ReadTurn, TraceSegment]:
        """Sample one turn of the policy and put it into the trace; return it with its segment. Raises: ApiError."""
        self._turns_begun += 1
        draw = self._draws.draw_for_turn(turn.number, turn.request.identity)
        try:
            written = await self._sample_and_check(turn, self._turn_seed(turn.number, draw))
            # The session may have ended while the engine wrote; then the turn gets into no rollout.
            self._refuse_if_ended()
            return written, self._commit_turn(turn, written)
        except asyncio.CancelledError:  # the client has gone, or the episode is over
            self._draws.give_up_draw(turn.number, turn.request.identity, draw)
            raise
        except RunError as error:
            self.failure = error
            self.end_session("engine")
            raise ApiError(500, "engine", "the engine failed, and with it this episode") from None

    async def _sample_and_check(self, turn: Turn, seed: int) -> _ReadTurn:
        """Have the engine write a turn, and the guard judge it. Raises: RunError if the engine fails."""
        request = turn.request
        task = asyncio.ensure_future(self._engine.generate(turn.ids, max_tokens=turn.max_tokens, seed=seed))
        self._running.add(task)
        try:
            written = await task
        finally:
            self._running.discard(task)
        read = await run_in_reader(self._read_turn, written, request)
        if self._watch is not None:
            tool_calls = tuple(ToolCall(name=call.name, arguments=call.arguments) for call in read.calls)
            read = replace(read, checked=await self._watch.check_turn(turn.number, read.text, tool_calls))
        # Many turns end in one step of the engine; between two of them the loop gets to other work.
        await hand_over(self._handover)
        return read

    async def _answer_unseen_turn(self, turn: Turn, written: _ReadTurn) -> Turn:
        """Answer, in the agent's place, a turn of which nothing may happen, and return the turn to sample next. Raises: ApiError."""
        request, checked = turn.request, written.checked
        if written.unread:
            new = [Message(role="tool", text=f"{UNREADABLE}{written.unread}")]
        elif written.calls:
            pairs = zip(written.calls, checked.instead, strict=True)
            new = [Message(role="tool", text=text, answers=call.id) for call, text in pairs]
        else:
            new = [Message(role="user", text=str(checked.instead))]
        self.dialogue_lines += [f"{message.role}: {message.text}" for message in new]
        try:
            following = await run_in_reader(
                self._dialogue.encode_following, written.sampled.token_ids, new, request.tools
            )
        except UnreadableMessages as error:
            raise make_request_error(f"messages: the model's chat template refuses them: {error!s:.200}") from None
        ids = [*turn.ids, *written.sampled.token_ids, *following]
        self._unseen_histories[request.identity] = ids, turn.number + 1
        self.count_request()
        return replace(turn, ids=ids, max_tokens=self._token_limit(ids, request), number=turn.number + 1)

    def count_request(self) -> None:
        """Count a request (before it is read, so that unreadable ones count) or a turn that is answered here. Raises: ApiError if the
        session takes no more of them."""
        self._refuse_if_ended()
        if self.calls == self._limits.max_calls:
            self.end_session("turns")
            self._refuse_if_ended()
        self.calls += 1

    def _refuse_if_ended(self) -> None:
        if self.end_reason is not None:
            raise ApiError(403, "permission", f"this episode takes no more requests ({self.end_reason})")

    async def _encode_request(self, request: Request) -> tuple[Sequence[int], int]:
        """Return the tokens of everything that comes before the reply, and the number of turns of the policy among them. Raises:
        ApiError."""
        messages = request.messages
        if not messages or messages[-1].role not in ("user", "tool"):
            raise make_request_error("messages: expected the last one to be of the user or of a tool")
        self._refuse_more_than_the_context(messages)
        number = max((position for position, m in enumerate(messages, start=1) if m.role == "assistant"), default=0)
        digest = await run_in_reader(_digest_conversation, request.context, messages[:number])
        if number and (reply_ends := self._reply_ends.get(digest)):
            # Of several equal conversations one that nothing follows yet is taken, because its segment can go on.
            reply_end = next((reply_end for reply_end in reply_ends if reply_end.is_last), reply_ends[-1])
            history = _turns_before(reply_end.segment, reply_end.end)
            turn = reply_end.segment.ids[reply_end.begin : reply_end.end]
            results = _order_results(messages[number:], messages[number - 1].calls)
            new_messages = _merge_dummies(results, reply_end.dummies)
            # If the template refuses these messages alone, the whole conversation is rendered below, which the trace counts as a fork.
            with suppress(UnreadableMessages):
                history_ids = await run_in_reader(self._dialogue.encode_history, history, new_messages)
                following_ids = await run_in_reader(self._dialogue.encode_following, turn, new_messages, request.tools)
                return [*history_ids, *following_ids], reply_end.turns
        try:
            ids = await run_in_reader(self._dialogue.encode_conversation, messages, request.tools)
        except UnreadableMessages as error:
            raise make_request_error(f"messages: the model's chat template refuses them: {error!s:.200}") from None
        if not ids:
            raise make_request_error("messages: expected some text, found none")
        return ids, sum(message.role == "assistant" for message in messages)

    def _refuse_more_than_the_context(self, messages: Sequence[Message]) -> None:
        """Refuse messages if one is too long for any context, or if there are more of them than tokens in it: to tokenise them would
        only cost time. Raises: ApiError."""
        # No token is taken to have more than 32 characters.
        longest, most = max(len(m.text) for m in messages), max(MAX_OBSERVATION, 32 * self._limits.max_model_len)
        room, problem = self._limits.max_model_len, ""
        if longest > most:
            problem = f"a message of {longest:,} characters > {most:,} maximum"
        elif len(messages) > room:  # each has a token at least
            problem = f"{len(messages):,} messages > {room:,} tokens maximum"
        if problem:
            self.too_long = True
            raise ApiError(400, "context", f"prompt is too long: {problem}")

    def _token_limit(self, ids: Sequence[int], request: Request) -> int:
        """Return how many tokens the next turn may have at most for this request. Raises: ApiError if none is left."""
        return min(self._tokens_left(ids), request.max_tokens or self._limits.max_new_tokens)

    def _tokens_left(self, ids: Sequence[int]) -> int:
        """Return how many tokens the next turn may have at most for any request. Raises: ApiError if none is left."""
        room = self._limits.max_model_len - len(ids)
        if room < 1:
            self.too_long = True
            limit = self._limits.max_model_len - 1
            raise ApiError(400, "context", f"prompt is too long: {len(ids)} tokens > {limit} maximum")
        if self._budget.spent:
            self.end_session("tokens")
            self._refuse_if_ended()
        return min(room, self._limits.max_new_tokens)

    def _turn_seed(self, number: int, draw: int) -> int:
        """Return the seed of a turn. The first draw of a turn number has the seed that the white box would give to the turn; parallel
        conversations get further draws."""
        return derive_seed(self._limits.seed, "turn", number, *((draw,) if draw > 1 else ()))

    def _commit_turn(self, turn: Turn, written: _ReadTurn) -> TraceSegment:
        """Put a turn into the trace, and return its segment. Nothing is awaited from here until its reply is made, so no other turn comes
        between."""
        segment = self._trace.continue_or_fork(turn.ids, is_new_dialogue=self._begins_dialogue(turn))
        segment.append_policy_turn(written.sampled)
        self._turns_in_trace += 1
        # After a turn that no agent saw, `_answer_unseen_turn` has noted the messages, which it made itself.
        new_messages = [] if turn.request.identity in self._unseen_histories else [turn.request.messages[-1]]
        self.dialogue_lines += [f"{message.role}: {message.text}" for message in new_messages]
        self.dialogue_lines.append(f"policy: {written.full_text}")
        if self._watch is not None:
            self._watch.record_turn(written.checked)
            self.dialogue_lines += [event.line for event in written.checked.stats.events]
            if written.checked.blocked:
                segment.mark_last_turn(written.sampled, self._watch.mark)
        return segment

    def _begins_dialogue(self, turn: Turn) -> bool:
        """Return True if a request begins a dialogue of its own: it has no turn of the policy, and does not quote the last one, as a
        request after a summary does."""
        last_reply = without_thoughts(self.last_text).strip()
        quoted = len(last_reply) >= QUOTED and any(last_reply in message.text for message in turn.request.messages)
        return turn.number == 0 and not quoted

    def _make_reply(self, turn: Turn, written: _ReadTurn, segment: TraceSegment) -> Reply:
        """Make the reply to the agent, without the calls that the guard blocked, and record it for requests that repeat or continue
        it."""
        request, sampled, checked = turn.request, written.sampled, written.checked
        dummies = checked.dummies or (None,) * len(written.calls)
        calls = tuple(call for call, dummy in zip(written.calls, dummies, strict=True) if dummy is None)
        reply = Reply(
            id=turn.reply_id,
            text=written.text,
            calls=calls,
            finish="tool_calls" if calls else sampled.stop_reason,
            stopped_by=written.stopped_by,
            prompt_tokens=len(turn.ids),
            completion_tokens=len(sampled.token_ids),
            created=turn.created,
        )
        digest = _digest_conversation(request.context, (*request.messages, reply.message))
        end = len(segment.ids)
        reply_end = _ReplyEnd(segment, end - len(sampled.token_ids), end, turn.number + 1, dummies)
        self._reply_ends.setdefault(digest, []).append(reply_end)
        self._answered[request.identity] = reply
        # The agent has a reply now, so what it sends next goes on from there.
        self._unseen_histories.pop(request.identity, None)
        self.last_text = reply.text
        return reply

    def _read_turn(self, written: SampledTurn, request: Request) -> _ReadTurn:
        """Read the text and calls of a turn up to the client's stop string. If a call cannot be read, all of the turn is text."""
        sampled, stopped_by = self._cut_at_stop(written, request)
        full_text = self._dialogue.text(sampled.token_ids)
        reply_text = full_text if stopped_by is None else full_text.partition(stopped_by)[0]
        try:
            text, calls = self._dialogue.calls(reply_text, request.tools)
        except BadCall as error:
            self.invalid_calls += 1
            return _ReadTurn(sampled, stopped_by, full_text, reply_text, unread=str(error))
        return _ReadTurn(sampled, stopped_by, full_text, text, calls)

    def _cut_at_stop(self, sampled: SampledTurn, request: Request) -> tuple[SampledTurn, str | None]:
        """Cut a turn after the token that completes the first of the client's stop strings; return the turn and that string, or the
        turn as it is and None.

        The tokens after the cut are in no segment. Where a turn is cut depends on the tokens before the cut alone, so those that are
        left are still a sample of the policy.
        """
        ids = sampled.token_ids

        def find_stops(count: int) -> list[str]:
            """Return the stop strings in the text of so many tokens, the first one first."""
            text = self._dialogue.text(ids[:count])
            return sorted((stop for stop in request.stop if stop in text), key=text.index)

        if not request.stop or not find_stops(len(ids)):
            return sampled, None
        # More tokens do not take a stop string away, so the first count that has one can be found by bisection.
        count = 1 + bisect_left(range(1, len(ids)), True, key=lambda number: bool(find_stops(number)))
        cut = replace(sampled, token_ids=ids[:count], logprobs=sampled.logprobs[:count], stop_reason="stop")
        return cut, find_stops(count)[0]


def _digest_conversation(context: str, messages: Sequence[Message]) -> str:
    """Return the digest of a whole conversation; empty for one without messages."""
    return deque(conversation_digests(context, messages), maxlen=1).pop() if messages else ""


def _turns_before(segment: TraceSegment, end: int) -> History:
    """Return the history in a segment up to the index `end`, turn by turn. A turn may have several spans, with masked tokens between; an
    observation of the environment ends it, even an empty one."""
    history, start, turn_ended = History(segment.ids[: segment.prompt_len]), segment.prompt_len, True
    for span in segment.spans:
        if start >= end:
            break
        part = segment.ids[start : start + span.length]
        start += span.length
        if span.origin == "environment":
            (history.turns[-1][1] if history.turns else history.head).extend(part)
        elif turn_ended:
            history.turns.append((part, []))
        else:
            history.turns[-1][0].extend(part)
        turn_ended = span.origin == "environment"
    return history


def _order_results(new: Sequence[Message], calls: Sequence[Call]) -> Sequence[Message]:
    """Return the messages after a reply, with the results of its calls in the order of the calls: chat templates tell results apart by
    their place alone."""
    order = {call.id: index for index, call in enumerate(calls)}
    results = (message for message in new if message.role == "tool")
    ordered = iter(sorted(results, key=lambda message: order.get(message.answers, len(order))))
    return [next(ordered) if message.role == "tool" else message for message in new]


def _merge_dummies(new: Sequence[Message], dummies: Sequence[str | None]) -> Sequence[Message]:
    """Return the messages after a reply, with the session's results of the calls that the agent did not see. They are put in at the
    places of these calls."""
    if all(text is None for text in dummies):
        return new
    agent_results = [message for message in new if message.role == "tool"]
    merged = []
    for number, text in enumerate(dummies):
        if text is not None:
            merged.append(Message(role="tool", text=text, answers=f"blocked{number:02d}"))
        elif agent_results:
            merged.append(agent_results.pop(0))
    return [*merged, *agent_results, *(message for message in new if message.role != "tool")]
