"""The stock clients of both APIs, unchanged: whole replies and streams, tools, retries, forks, and many at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from opd.rollouts.endpoint.server import EndpointServer
from tests.unit.opd.rollouts.endpoint.clients import Chat, ask_anthropic, ask_openai, echo, in_a_loop
from tests.unit.opd.rollouts.endpoint.fakes import END, FakeEngine, Served, decode, serve, serving

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": [1, {"y": 2, "x": 1}]}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPENAI_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}


def calls_then_answers(before: str, seed: int) -> str:
    """Calls the tool once, then says what it gave."""
    return f" The sum is {before.rsplit('tool', 1)[-1][1:-10]}. " if "5" in before else f"I add. {CALL}"


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

    in_a_loop(work)


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

    in_a_loop(work)


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

    in_a_loop(work)


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

    in_a_loop(work)


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

    in_a_loop(work)


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

    in_a_loop(work)


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

    in_a_loop(work)


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

    in_a_loop(work)


async def eight_at_once(served: Served) -> list[str]:
    """Return the end of each of eight parallel requests."""

    async def one(number: int) -> str:
        try:
            return str((await ask_openai(served, [{"role": "user", "content": str(number)}], stream=False))["finish"])
        except openai.PermissionDeniedError:
            return "refused"

    return sorted(await asyncio.gather(*map(one, range(8))))


def test_parallel_calls_share_the_tokens_of_their_episode() -> None:
    async def work() -> None:
        async with serving(lambda before, seed: "x" * 29, 0.001, max_tokens=100, max_new_tokens=40) as (served, engine):
            assert await eight_at_once(served) == ["length", *["refused"] * 4, *["stop"] * 3]
            assert (served.session.audit.sampled, served.session.audit.lost_turns) == (100, 0)
            assert served.session.end_reason == "tokens" and engine.limits == [40, 40, 40, 10] and engine.most == 2

    in_a_loop(work)


def test_no_parallel_call_is_cut_while_the_others_may_leave_enough() -> None:
    async def work() -> None:
        async with serving(echo, 0.001, max_tokens=120, max_new_tokens=200) as (served, engine):
            assert await eight_at_once(served) == ["stop"] * 8
            assert served.session.end_reason is None and served.session.audit.sampled == 8 * len("you said 1 ")
            assert engine.most == 1, "each may need all that is left"

    in_a_loop(work)


@pytest.mark.parametrize("gone", [True, False])
def test_a_call_that_waits_for_tokens_goes_on_when_another_ends_without_any(gone: bool) -> None:
    async def work() -> None:
        async with serving(echo, 0.02, max_tokens=60) as (served, engine):
            first, second = (
                asyncio.ensure_future(ask_openai(served, [{"role": "user", "content": word}], stream=False))
                for word in ("one", "two")
            )
            while not engine.started:
                await asyncio.sleep(0.01)
            if gone:
                first.cancel()
                assert (await second)["content"] == "you said two" and engine.cancelled == 1
                assert served.session.audit.sampled == len("you said two ")
                return
            served.session.end_session("foreign")
            for refused in (first, second):
                with pytest.raises(openai.PermissionDeniedError):
                    await refused
            assert engine.started == 1

    in_a_loop(work)


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

    in_a_loop(work)


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

    in_a_loop(work)


def test_two_replies_that_read_alike_are_continued_one_each() -> None:
    said = iter(["same", "sa\x01me", "to the left", "to the right"])  # token 1 is not seen in the text

    async def work() -> None:
        async with serving(lambda before, seed: next(said)) as (served, _):
            chat: Chat = [{"role": "user", "content": "one"}]
            first, second = [await ask_openai(served, chat, stream=False, seed=seed) for seed in (1, 2)]
            assert first == second and served.session.audit.forks == 1
            chat.append({"role": "assistant", "content": "same"})
            for more in ("left", "right"):
                await ask_openai(served, [*chat, {"role": "user", "content": more}], stream=False)
            assert [s.turns for s in served.trace.segments] == [2, 2] and served.session.audit.forks == 1

    in_a_loop(work)


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

    in_a_loop(work)


def test_a_request_that_comes_again_beside_a_like_one_has_its_own_seed_again() -> None:
    async def work() -> None:
        async with serving(lambda before, seed: f"draw {seed}", step_s=0.03) as (served, engine):
            chat: Chat = [{"role": "user", "content": "draw"}]
            left = asyncio.ensure_future(ask_openai(served, chat, stream=False, seed=1))
            while engine.started < 1:
                await asyncio.sleep(0.01)
            stays = asyncio.ensure_future(ask_openai(served, chat, stream=False, seed=2))
            while engine.started < 2:
                await asyncio.sleep(0.01)
            left.cancel()
            async with asyncio.timeout(5):
                while not engine.cancelled:
                    await asyncio.sleep(0.01)
            again, other = await ask_openai(served, chat, stream=False, seed=1), await stays
            assert engine.seeds[2] == engine.seeds[0] != engine.seeds[1]
            assert again["content"] != other["content"]

    in_a_loop(work)


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
                while not engine.cancelled:
                    await asyncio.sleep(0.01)
            assert not served.trace.segments and served.session.audit.lost_turns == 1
            engine.step_s = 0.0
            assert (await ask_openai(served, chat, stream=stream))["content"] == "x" * 100
            assert (engine.started, engine.finished) == (2, 1), "it was never answered, so it is sampled"
            assert served.session.audit.turns == 1

    in_a_loop(work)


def test_a_client_that_goes_away_while_it_reads_finds_its_reply_again() -> None:
    async def work() -> None:
        async with serving(lambda before, seed: f"a long answer {seed} " * 9) as (served, engine):
            chat: Any = [{"role": "user", "content": "write"}]
            async with openai.AsyncOpenAI(**served.openai, max_retries=0) as client:
                stream = await client.chat.completions.create(model="m", messages=chat, stream=True)
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break
                await stream.close()
            again = await ask_openai(served, chat, stream=False)
            assert again["content"].startswith(str(chunk.choices[0].delta.content)) and engine.started == 1
            assert served.session.audit.turns == 1 and not served.session.audit.lost_turns

    in_a_loop(work)


def test_a_call_that_cannot_be_read_stays_text() -> None:
    async def work() -> None:
        async with serving(lambda before, seed: "<tool_call>{oops</tool_call>") as (served, _):
            reply = await ask_openai(served, [{"role": "user", "content": "x"}], stream=False, tools=[OPENAI_TOOL])
            assert reply["content"] == "<tool_call>{oops</tool_call>" and reply["finish"] == "stop"
            assert served.session.invalid_calls == 1

    in_a_loop(work)


def test_results_are_put_in_the_order_of_their_calls() -> None:
    async def work() -> None:
        asked: list[str] = []

        def policy(before: str, seed: int) -> str:
            asked.append(before)
            return "Done." if "second" in before else CALL + CALL

        async with serving(policy) as (served, _):
            chat: Chat = [{"role": "user", "content": "2+3?"}]
            reply = await ask_openai(served, chat, stream=False, tools=[OPENAI_TOOL])
            reply.pop("finish")
            one, two = (call["id"] for call in reply["tool_calls"])
            results = [("second", two), ("first", one), ("another", "unknown")]
            chat += [reply, *({"role": "tool", "tool_call_id": name, "content": text} for text, name in results)]
            await ask_openai(served, chat, stream=False, tools=[OPENAI_TOOL])
            places = [asked[-1].index(text) for text in ("first", "second", "another")]
            assert places == sorted(places) and not served.session.audit.forks

    in_a_loop(work)


def test_other_tools_are_another_conversation() -> None:
    async def work() -> None:
        async with serving(echo) as (served, _):
            chat: Chat = [{"role": "user", "content": "one"}]
            await ask_openai(served, chat, stream=False, tools=[OPENAI_TOOL])
            chat += [{"role": "assistant", "content": "you said one"}, {"role": "user", "content": "two"}]
            await ask_openai(served, chat, stream=False)
            assert served.session.audit.forks == 1
            assert "tools: add" not in decode(served.trace.segments[1].ids)

    in_a_loop(work)


def test_sixty_four_sessions_at_once() -> None:
    async def one(endpoint: EndpointServer, engine: FakeEngine, number: int) -> Served:
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
        async with EndpointServer() as endpoint:
            every = await asyncio.gather(*(one(endpoint, engine, number) for number in range(64)))
        assert engine.most > 8 and engine.finished == 2 * 64
        for number, served in enumerate(every):
            (segment,) = served.trace.segments
            text = decode(segment.ids)
            assert segment.turns == 2
            assert text.count(f"session {number}") == 2 and text.count(f"turn 0 of {number}") == 2
            assert not any(f" {other}user" in text for other in range(64) if other != number)

    in_a_loop(work)
