"""The stock clients of both APIs, unchanged: whole replies and streams, tools, retries, forks, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import anthropic
import openai
import pytest

from opd.rollouts.endpoint.server import Endpoint
from tests.unit.opd.rollouts.endpoint.fakes import END, FakeEngine, Served, decode, serve, serving

Chat = list[dict[str, Any]]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": [1, {"y": 2, "x": 1}]}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPENAI_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}


def echo(before: str, seed: int) -> str:
    """Says the last thing that was said to it."""
    return "you said " + before.rsplit("user\n", 1)[-1].removesuffix("assistant\n")


def calls_then_answers(before: str, seed: int) -> str:
    """Calls the tool once, then says what it gave."""
    return f" The sum is {before.rsplit('tool', 1)[-1][1:-10]}. " if "5" in before else f"I add. {CALL}"


async def ask_openai(served: Served, messages: Chat, *, stream: bool, **more: Any) -> dict[str, Any]:
    """The reply as the assistant's message of OpenAI's form, with `finish`."""
    async with openai.AsyncOpenAI(**served.openai, max_retries=0) as client:
        asked: Any = client.chat.completions.create(model="m", messages=messages, stream=stream, **more)  # type: ignore[arg-type]
        if not stream:
            choice = (await asked).choices[0]
            return choice.message.model_dump(exclude_none=True) | {"finish": choice.finish_reason}
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: dict[int, dict[str, Any]] = {}
        async for chunk in await asked:
            delta = chunk.choices[0].delta
            message["content"] += delta.content or ""
            for call in delta.tool_calls or ():
                made = calls.setdefault(
                    call.index, {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                made["function"]["name"] += call.function.name or ""
                made["function"]["arguments"] += call.function.arguments or ""
            message["finish"] = chunk.choices[0].finish_reason
        return message | ({"tool_calls": list(calls.values())} if calls else {})


async def ask_anthropic(served: Served, messages: Chat, *, stream: bool, **more: Any) -> Any:
    """The reply as the client's own `Message`."""
    async with anthropic.AsyncAnthropic(**served.anthropic, max_retries=0) as client:
        given: Any = {"model": "m", "messages": messages, "max_tokens": 150, **more}
        if not stream:
            return await client.messages.create(**given)
        async with client.messages.stream(**given) as events:
            return await events.get_final_message()


def test(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


test.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_a_dialogue_of_the_openai_client_is_one_segment(stream: bool) -> None:
    async def work() -> None:
        async with serving(echo) as (served, engine):
            chat: Chat = [{"role": "system", "content": "Echo."}, {"role": "user", "content": "one"}]
            for said in ("two", "three"):
                reply = await ask_openai(served, chat, stream=stream)
                assert reply.pop("finish") == "stop"
                chat += [reply, {"role": "user", "content": said}]
            assert [m["content"] for m in chat] == ["Echo.", "one", "you said one", "two", "you said two", "three"]
            assert [s.turns for s in served.trace.segments] == [2]
            (segment,) = served.trace.segments
            sampled = [t for t, p in zip(segment.ids[segment.prompt_len :], segment.logprobs, strict=True) if p]
            assert decode(sampled) == "you said oneyou said two" and sampled.count(END) == 2
            assert {s.policy_version for s in segment.spans} == {engine.version}

    test(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dialogue_of_the_anthropic_client_is_one_segment(stream: bool) -> None:
    async def work() -> None:
        async with serving(echo) as (served, _):
            chat: Chat = [{"role": "user", "content": "one"}]
            for said in ("two", "three"):
                reply = await ask_anthropic(served, chat, stream=stream, system="Echo.")
                assert reply.stop_reason == "end_turn" and reply.usage.output_tokens == len("you said one") + 1
                assert reply.usage.input_tokens > 10
                chat += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": said}]
            assert chat[3]["content"][0].text == "you said two"
            assert [s.turns for s in served.trace.segments] == [2] and not served.session.audit.forks

    test(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_the_openai_client(stream: bool) -> None:
    async def work() -> None:
        async with serving(calls_then_answers) as (served, _):
            chat: Chat = [{"role": "user", "content": "2+3?"}]
            reply = await ask_openai(served, chat, stream=stream, tools=[OPENAI_TOOL])
            assert reply.pop("finish") == "tool_calls" and reply["content"] == "I add. "
            (call,) = reply["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {"a": 2, "b": [1, {"y": 2, "x": 1}]}
            # The client writes the call anew: other order of keys, no white space, and it strips the text.
            call["function"]["arguments"] = '{"b":[1,{"x":1,"y":2}],"a":2}'
            reply["content"] = reply["content"].strip()
            chat += [reply, {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
            reply = await ask_openai(served, chat, stream=stream, tools=[OPENAI_TOOL])
            assert reply["content"] == " The sum is 5. " and reply["finish"] == "stop"
            assert served.session.last_text == " The sum is 5. "
            (segment,) = served.trace.segments
            assert segment.turns == 2 and CALL in decode(segment.ids)

    test(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_the_anthropic_client(stream: bool) -> None:
    async def work() -> None:
        async with serving(calls_then_answers) as (served, _):
            chat: Chat = [{"role": "user", "content": "2+3?"}]
            reply = await ask_anthropic(served, chat, stream=stream, tools=[ANTHROPIC_TOOL])
            assert reply.stop_reason == "tool_use"
            text, call = reply.content
            assert call.input == {"a": 2, "b": [1, {"x": 1, "y": 2}]} and text.text == "I add. "
            said = [
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": call.id, "name": "add", "input": {"b": [1, {"x": 1, "y": 2}], "a": 2}},
            ]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
            reply = await ask_anthropic(served, chat, stream=stream, tools=[ANTHROPIC_TOOL])
            assert reply.content[0].text == " The sum is 5. "
            assert [s.turns for s in served.trace.segments] == [2]

    test(work)


def test_the_training_decides_how_is_sampled() -> None:
    async def work() -> None:
        async with serving(echo, max_new_tokens=30) as (served, engine):
            chat: Chat = [{"role": "user", "content": "a long word and another"}]
            wishes = {"temperature": 0.0, "top_p": 0.1, "n": 3, "logprobs": True, "seed": 1, "max_tokens": 9999}
            reply = await ask_openai(served, chat, stream=False, **wishes)
            assert reply["finish"] == "length" and len(reply["content"]) == 30 and engine.limits == [30]
            assert engine.started == 1, "one choice, whatever n says"
            reply = await ask_openai(served, chat, stream=False, max_completion_tokens=4)
            assert reply["content"] == "you " and engine.limits[-1] == 4
            assert served.session.overridden == dict.fromkeys(["temperature", "top_p", "n", "logprobs", "seed"], 1)

    test(work)


def test_a_turn_never_outgrows_the_context() -> None:
    async def work() -> None:
        async with serving(echo, max_model_len=60) as (served, engine):
            await ask_openai(served, [{"role": "user", "content": "x" * 30}], stream=False)
            assert engine.limits == [60 - len("1user\n1" + 30 * "x" + "1assistant\n")]
            with pytest.raises(openai.BadRequestError) as refused:
                await ask_openai(served, [{"role": "user", "content": "x" * 60}], stream=True)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 78 tokens > 59 maximum"):
                await ask_anthropic(served, [{"role": "user", "content": "x" * 60}], stream=False)

    test(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_is_answered_from_the_record(stream: bool) -> None:
    async def work() -> None:
        async with serving(lambda before, seed: f"draw {seed}") as (served, engine):
            chat: Chat = [{"role": "user", "content": "draw"}]
            first = await ask_openai(served, chat, stream=False)
            again = await ask_openai(served, chat, stream=stream)
            assert first["content"] == again["content"] and engine.started == 1
            assert [s.turns for s in served.trace.segments] == [1]
            other = await ask_openai(served, chat, stream=stream, seed=2)
            assert other["content"] != first["content"], "a request that differs is another one"
            assert served.session.audit.forks == 1 and served.session.audit.turns == 2

    test(work)


def test_parallel_calls_fork_and_are_sampled_on_their_own() -> None:
    async def work() -> None:
        async with serving(lambda before, seed: f"draw {seed}", step_s=0.03) as (served, engine):
            chat: Chat = [{"role": "user", "content": "draw"}]
            replies = await asyncio.gather(*(ask_openai(served, chat, stream=False) for _ in range(5)))
            assert len({r["content"] for r in replies}) == 5 and engine.most == 5
            assert [s.turns for s in served.trace.segments] == [1] * 5
            # each of them can be continued, and none gets the words of another
            for reply in replies:
                reply.pop("finish")
                await ask_openai(served, [*chat, reply, {"role": "user", "content": "again"}], stream=False)
            assert [s.turns for s in served.trace.segments] == [2] * 5
            for segment, reply in zip(
                sorted(served.trace.segments, key=lambda s: decode(s.ids)),
                sorted(replies, key=lambda r: str(r["content"])),
                strict=True,
            ):
                assert reply["content"] in decode(segment.ids)

    test(work)


def test_a_history_that_was_rewritten_forks() -> None:
    async def work() -> None:
        async with serving(echo) as (served, _):
            chat: Chat = [{"role": "user", "content": "one"}]
            await ask_openai(served, chat, stream=False)
            chat += [{"role": "assistant", "content": "I said nothing"}, {"role": "user", "content": "two"}]
            await ask_openai(served, chat, stream=False)
            first, second = served.trace.segments
            assert served.session.audit.forks == 1 and second.parent == first.number
            assert "I said nothing" in decode(second.ids[: second.prompt_len]), "what it did not write is prompt"
            assert second.num_trained == len("you said two") + 1

    test(work)


def test_a_conversation_that_goes_back_forks_with_the_sampled_tokens() -> None:
    async def work() -> None:
        async with serving(echo) as (served, _):
            chat: Chat = [{"role": "user", "content": "one"}]
            await ask_openai(served, chat, stream=False)
            chat.append({"role": "assistant", "content": "you said one"})
            await ask_openai(served, [*chat, {"role": "user", "content": "left"}], stream=False)
            await ask_openai(served, [*chat, {"role": "user", "content": "right"}], stream=False)
            left, right = served.trace.segments
            assert left.turns == 2 and right.turns == 1
            assert right.ids[: left.prompt_len + 13] == left.ids[: left.prompt_len + 13]
            assert right.num_trained == len("you said right") + 1, "the copy of the first turn carries no loss again"

    test(work)


def test_a_stop_string_cuts_what_is_trained_too() -> None:
    async def work() -> None:
        async with serving(
            lambda before, seed: "a thought\nObservation: made up" if "tool" not in before else "ok"
        ) as (
            served,
            _,
        ):
            chat: Chat = [{"role": "user", "content": "think"}]
            reply = await ask_anthropic(served, chat, stream=True, stop_sequences=["tion", "Observa"])
            assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Observa")
            assert reply.content[0].text == "a thought\n"
            (segment,) = served.trace.segments
            assert decode(segment.ids[segment.prompt_len :]) == "a thought\nObserva"
            chat += [{"role": "assistant", "content": "a thought"}, {"role": "user", "content": "tool says 4"}]
            await ask_anthropic(served, chat, stream=False, stop_sequences=["tion", "Observa"])
            assert segment.turns == 2, "the client's history is still that of the segment"
            environment = [s for s in segment.spans if s.origin == "environment"]
            assert environment[0].length == len("1user\ntool says 41assistant\n") + 2, (
                "the end that was not sampled is masked"
            )

    test(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request_and_its_turn(stream: bool) -> None:
    async def work() -> None:
        async with serving(lambda before, seed: "x" * 100, step_s=0.05) as (served, engine):
            chat: Chat = [{"role": "user", "content": "write"}]
            asking = asyncio.ensure_future(ask_openai(served, chat, stream=stream))
            while not engine.started:
                await asyncio.sleep(0.01)
            asking.cancel()
            async with asyncio.timeout(5):
                while not served.session.audit.lost_turns:
                    await asyncio.sleep(0.01)
            assert not served.trace.segments and engine.cancelled == 1
            engine.step_s = 0.0
            assert (await ask_openai(served, chat, stream=stream))["content"] == "x" * 100
            assert (engine.started, engine.finished) == (2, 1), "it was never answered, so it is sampled"
            assert served.session.audit.turns == 1

    test(work)


def test_sixty_four_sessions_at_once() -> None:
    async def one(endpoint: Endpoint, engine: FakeEngine, number: int) -> Served:
        served = serve(endpoint, engine)
        chat: Chat = [{"role": "user", "content": f"session {number}"}]
        for turn in range(2):
            if number % 2:
                reply = await ask_openai(served, chat, stream=number % 4 == 1)
                said = reply["content"]
            else:
                found = await ask_anthropic(served, chat, stream=number % 4 == 0)
                said = found.content[0].text
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": f"turn {turn} of {number}"}]
        return served

    async def work() -> None:
        engine = FakeEngine(echo, step_s=0.01)
        async with Endpoint() as endpoint:
            every = await asyncio.gather(*(one(endpoint, engine, number) for number in range(64)))
        assert engine.most > 8 and engine.finished == 2 * 64
        for number, served in enumerate(every):
            (segment,) = served.trace.segments
            text = decode(segment.ids)
            assert segment.turns == 2
            assert text.count(f"session {number}") == 2 and text.count(f"turn 0 of {number}") == 2
            assert not any(f" {other}user" in text for other in range(64) if other != number)

    test(work)


async def refusal(served: Served, client: str, **changed: Any) -> Any:
    """The error that a client raises with another key or address."""
    at = served.openai if client == "openai" else served.anthropic
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as found:
        made: Any = Served(served.session, served.trace, served.environ)
        made = type("At", (), {"openai": at | changed, "anthropic": at | changed})
        ask = ask_openai if client == "openai" else ask_anthropic
        await ask(made, [{"role": "user", "content": "hello"}], stream=False)
    return found.value


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_who_may_not_ask(client: str) -> None:
    async def work() -> None:
        async with serving(echo) as (served, engine):
            wrong = await refusal(served, client, api_key="guess")
            assert wrong.status_code == 401 and "not that of this session" in str(wrong)
            base = (served.openai if client == "openai" else served.anthropic)["base_url"]
            there = base.replace(base.split("/")[4], "another")
            unknown = await refusal(served, client, base_url=there)
            assert unknown.status_code == 404 and "no such session" in str(unknown)
            nowhere = await refusal(served, client, base_url=base + "/elsewhere")
            assert nowhere.status_code == 404
            assert not engine.started and not served.session.calls and served.session.why is None

    test(work)


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_an_agent_that_asks_in_another_sessions_name_ends_its_own_episode(client: str) -> None:
    async def work() -> None:
        async with Endpoint() as endpoint:
            engine = FakeEngine(echo)
            thief, victim = serve(endpoint, engine), serve(endpoint, engine)
            key = thief.environ["OPENAI_API_KEY"]
            assert (await refusal(victim, client, api_key=key)).status_code == 401
            assert thief.session.why == "foreign" and thief.session.ended.is_set()
            assert (await refusal(thief, client)).status_code == 403
            assert victim.session.why is None and not engine.started
            await ask_openai(victim, [{"role": "user", "content": "hello"}], stream=False)

    test(work)


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_a_body_that_is_too_large(client: str) -> None:
    async def work() -> None:
        async with Endpoint(max_body_bytes=2 << 20) as endpoint:
            served = serve(endpoint, FakeEngine(echo))
            ask = ask_openai if client == "openai" else ask_anthropic
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as found:
                await ask(served, [{"role": "user", "content": "x" * (3 << 20)}], stream=False)
            assert found.value.status_code == 413 and "more than 2 MiB" in str(found.value)

    test(work)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": 3}, r"messages\[0\].content: expected a list, found 3"),
        ({"role": "judge", "content": "x"}, r"messages\[0\].role: expected one of system, developer"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\]: expected a part of type text"),
        ({"role": "assistant", "content": "x"}, "expected the last one to be of the user or of a tool"),
        ({"role": "tool", "content": "x"}, r"messages\[0\].tool_call_id: expected text, found nothing"),
        ("hello", r"messages\[0\]: expected an object, found a text"),
    ],
)
def test_a_request_that_is_no_conversation(message: Any, said: str) -> None:
    async def work() -> None:
        async with serving(echo) as (served, engine):
            with pytest.raises(openai.BadRequestError, match=said):
                await ask_openai(served, [message], stream=False)
            assert not engine.started

    test(work)


def test_the_list_of_models() -> None:
    async def work() -> None:
        async with serving(echo) as (served, _):
            async with openai.AsyncOpenAI(**served.openai) as one:
                assert [model.id async for model in one.models.list()] == ["policy"]
            async with anthropic.AsyncAnthropic(**served.anthropic) as two:
                assert [model.id async for model in two.models.list()] == ["policy"]

    test(work)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_ends_the_session_and_no_token_is_kept(stream: bool) -> None:
    async def work() -> None:
        async with serving(echo) as (served, engine):
            engine.broken = True
            with pytest.raises((openai.APIError, anthropic.APIError), match="the engine failed"):
                await ask_openai(served, [{"role": "user", "content": "x"}], stream=stream)
            with pytest.raises(openai.PermissionDeniedError):
                await ask_openai(served, [{"role": "user", "content": "y"}], stream=stream)
            assert "NaN" in str(served.session.failure) and not served.trace.segments

    test(work)


def test_more_requests_than_a_session_may_have() -> None:
    async def work() -> None:
        async with serving(echo, max_calls=2) as (served, engine):
            for said in ("one", "two"):
                await ask_openai(served, [{"role": "user", "content": said}], stream=False)
            with pytest.raises(openai.PermissionDeniedError, match="takes no more requests"):
                await ask_openai(served, [{"role": "user", "content": "three"}], stream=False)
            assert served.session.why == "turns" and engine.started == 2

    test(work)
