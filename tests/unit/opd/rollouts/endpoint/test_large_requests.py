"""A program's requests are read once, beside the loop, and what fits no context is refused before it costs anything."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from opd.records.environments import Tool
from opd.records.types import SampledTurn
from opd.rollouts.endpoint.messages import Call, Message, Reply, Request, split_for_stream
from opd.rollouts.endpoint.server import EndpointServer
from opd.rollouts.endpoint.session import EndpointSession
from opd.rollouts.episodes.trace import Trace, TraceSegment
from tests.unit.opd.rollouts.endpoint.clients import ask_openai, echo, in_a_loop
from tests.unit.opd.rollouts.endpoint.fakes import FakeEngine, Letters, Served, make_limits, serving


class Messages(tuple[Message, ...]):
    """A conversation that counts the messages that are taken out of it."""

    taken = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        Messages.taken += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Any:
        Messages.taken += len(self)
        return super().__iter__()


@pytest.mark.parametrize("known", [False, True])
def test_a_long_conversation_is_gone_through_a_few_times_and_not_once_for_each_message(known: bool) -> None:
    async def work() -> None:
        session = EndpointSession(Trace(), FakeEngine(echo), Letters(), make_limits(max_model_len=60_000))
        chat = [Message(role="user", text="a"), Message(role="assistant", text="b")] * 1000
        asked: list[Message] = [*chat, Message(role="user", text="c")]
        if known:
            first = await session.accept_request(Request(model="m", messages=tuple(asked), identity="0"))
            asked += [(await first.wait_for_reply()).message, Message(role="user", text="d")]
        Messages.taken = 0
        turn = await session.accept_request(Request(model="m", messages=Messages(asked), identity="1"))
        assert Messages.taken <= 8 * len(asked)
        assert turn.number == 1001 if known else 1000

    in_a_loop(work)


def test_more_messages_than_the_context_has_tokens_are_refused_unread() -> None:
    async def work() -> None:
        async with serving(echo) as (served, engine), aiohttp.ClientSession() as raw:
            chat = [{"role": "user", "content": ""}] * 5000
            key = {"x-api-key": served.environ["ANTHROPIC_API_KEY"]}
            url = f"{served.environ['OPENAI_BASE_URL']}/chat/completions"
            async with raw.post(url, json={"model": "m", "messages": chat}, headers=key) as answer:
                found = await answer.json()
            assert answer.status == 400 and found["error"]["code"] == "context_length_exceeded"
            assert "5,000 messages > 4,000 tokens maximum" in found["error"]["message"]
            assert served.session.too_long and not engine.started

    in_a_loop(work)


class Recorded(Letters):
    """Notes the thread in which messages and turns are read."""

    def __init__(self) -> None:
        self.threads = set[str]()

    def _note(self) -> None:
        self.threads.add(threading.current_thread().name.partition("_")[0])

    def encode_conversation(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        self._note()
        return super().encode_conversation(messages, tools)

    def encode_following(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        self._note()
        return super().encode_following(turn, messages, tools)

    def text(self, turn: Sequence[int]) -> str:
        self._note()
        return super().text(turn)

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        self._note()
        return super().calls(text, tools)


def test_nothing_that_a_program_sends_is_read_in_the_thread_of_the_loop() -> None:
    async def work() -> None:
        async with EndpointServer() as endpoint:
            engine, dialogue = FakeEngine(echo), Recorded()
            session = EndpointSession(Trace(), engine, dialogue, make_limits())
            served = Served(session, Trace(), endpoint.open_session(session))
            chat = [{"role": "user", "content": "hello"}]
            reply = await ask_openai(served, chat, stream=False, stop=["never"])
            chat += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "more"}]
            await ask_openai(served, chat, stream=True)
            assert engine.finished == 2 and session.audit.forks == 0
            assert dialogue.threads == {"reader"}

    in_a_loop(work)


def test_a_stream_has_few_parts_however_long_the_reply_is() -> None:
    for length in (0, 1, 63, 64, 65, 5000, 1_000_000):
        text = "x" * length
        assert "".join(split_for_stream(text)) == text and len(list(split_for_stream(text))) <= 65


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_call_with_a_number_that_json_has_not_goes_to_no_program(number: str) -> None:
    """As text it does: that is JSON."""

    def policy(before: str, seed: int) -> str:
        return f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>'

    async def work() -> None:
        async with serving(policy) as (served, engine), aiohttp.ClientSession() as raw:
            tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
            key = {"x-api-key": served.environ["ANTHROPIC_API_KEY"]}
            url = f"{served.environ['OPENAI_BASE_URL']}/chat/completions"
            async with raw.post(url, json=body, headers=key) as answer:
                found = json.loads(await answer.text(), parse_constant=_refuse)
            assert number in found["choices"][0]["message"]["content"] and engine.finished == 1
            async with raw.post(url, data=f'{{"messages": [], "top_p": {number}}}', headers=key) as answer:
                assert answer.status == 400 and "the body is not JSON" in await answer.text()

    in_a_loop(work)


def _refuse(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def test_replies_that_end_together_are_taken_up_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop comes to itself between any two of them."""
    rounds, taken = 0, list[int]()
    sampled = TraceSegment.append_policy_turn

    def took(segment: TraceSegment, turn: SampledTurn) -> None:
        taken.append(rounds)
        sampled(segment, turn)

    monkeypatch.setattr(TraceSegment, "append_policy_turn", took)

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def work() -> None:
        counting, handover, engine = asyncio.create_task(count()), asyncio.Lock(), FakeEngine(lambda before, seed: "x")
        chat = (Message(role="user", text="hello"),)

        async def ask() -> Reply:
            session = EndpointSession(Trace(), engine, Letters(), make_limits(), handover=handover)
            return await (
                await session.accept_request(Request(model="m", messages=chat, tools=(), identity="a"))
            ).wait_for_reply()

        assert [reply.text for reply in await asyncio.gather(*(ask() for _ in range(64)))] == ["x"] * 64
        counting.cancel()

    in_a_loop(work)
    assert len(taken) == len(set(taken)) == 64
