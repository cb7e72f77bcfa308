"""Askers and questions that are refused, each in the words of the API that was asked."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from opd.rollouts.endpoint.server import EndpointServer
from tests.unit.opd.rollouts.endpoint.clients import ask_anthropic, ask_openai, echo, in_a_loop
from tests.unit.opd.rollouts.endpoint.fakes import FakeEngine, Served, serve, serving


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
            assert not engine.started and not served.session.calls and served.session.end_reason is None

    in_a_loop(work)


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_an_agent_that_asks_in_another_sessions_name_ends_its_own_episode(client: str) -> None:
    async def work() -> None:
        async with EndpointServer() as endpoint:
            engine = FakeEngine(echo)
            thief, victim = serve(endpoint, engine), serve(endpoint, engine)
            key = thief.environ["OPENAI_API_KEY"]
            assert (await refusal(victim, client, api_key=key)).status_code == 401
            assert thief.session.end_reason == "foreign" and thief.session.ended.is_set()
            assert (await refusal(thief, client)).status_code == 403
            assert victim.session.end_reason is None and not engine.started
            await ask_openai(victim, [{"role": "user", "content": "hello"}], stream=False)

    in_a_loop(work)


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_a_body_that_is_too_large(client: str) -> None:
    async def work() -> None:
        async with EndpointServer(max_body_bytes=2 << 20) as endpoint:
            served = serve(endpoint, FakeEngine(echo))
            ask = ask_openai if client == "openai" else ask_anthropic
            with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as found:
                await ask(served, [{"role": "user", "content": "x" * (3 << 20)}], stream=False)
            assert found.value.status_code == 413 and "more than 2 MiB" in str(found.value)

    in_a_loop(work)


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

    in_a_loop(work)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the body is not JSON"),
        (b"\xff{}", "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        (b'{"max_tokens": 5, "messages": ' + b"[" * 100_000, "the body is not JSON"),
        (
            b'{"max_tokens": 5, "messages": ' + b"[" * 900 + b"]" * 900 + b"}",
            "messages[0]: expected an object, found a list",
        ),
        (b'{"max_tokens": 5}', "expected the last one to be of the user or of a tool"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens: expected a whole number"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tools": [{}]}', "tools[0]"),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_body_that_is_no_request(body: bytes, said: str, path: str) -> None:
    async def work() -> None:
        async with serving(echo) as (served, engine), aiohttp.ClientSession() as raw:
            key = {"x-api-key": served.environ["ANTHROPIC_API_KEY"]}
            async with raw.post(f"{served.environ['OPENAI_BASE_URL']}/{path}", data=body, headers=key) as answer:
                found = await answer.json()
            assert answer.status == 400 and said in found["error"]["message"], found
            assert ("param" in found["error"]) == (path == "chat/completions")
            assert not engine.started

    in_a_loop(work)


def test_the_list_of_models() -> None:
    async def work() -> None:
        async with serving(echo) as (served, _):
            async with openai.AsyncOpenAI(**served.openai) as one:
                assert [model.id async for model in one.models.list()] == ["policy"]
            async with anthropic.AsyncAnthropic(**served.anthropic) as two:
                assert [model.id async for model in two.models.list()] == ["policy"]

    in_a_loop(work)


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

    in_a_loop(work)


def test_more_requests_than_a_session_may_have() -> None:
    async def work() -> None:
        async with serving(echo, max_calls=2) as (served, engine):
            for said in ("one", "two"):
                await ask_openai(served, [{"role": "user", "content": said}], stream=False)
            with pytest.raises(openai.PermissionDeniedError, match="takes no more requests"):
                await ask_openai(served, [{"role": "user", "content": "three"}], stream=False)
            assert served.session.end_reason == "turns" and engine.started == 2

    in_a_loop(work)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_body_that_is_not_compressed_as_it_says(encoding: str, path: str) -> None:
    body = json.dumps({"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}).encode()
    packed = {"gzip": gzip.compress(body), "deflate": zlib.compress(body)}[encoding]

    async def work() -> None:
        async with serving(echo) as (served, engine), aiohttp.ClientSession() as raw:
            headers = {"x-api-key": served.environ["ANTHROPIC_API_KEY"], "Content-Encoding": encoding}
            url = f"{served.environ['OPENAI_BASE_URL']}/{path}"
            for data, status in ((body, 400), (packed, 200), (body, 400), (packed, 200)):
                async with raw.post(url, data=data, headers=headers) as answer:
                    found = await answer.json()
                assert answer.status == status, found
                assert status == 200 or "the body cannot be read" in found["error"]["message"]
            assert engine.finished == 1, "the second is the first again"

    in_a_loop(work)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"functions": [{"name": "add", "parameters": {}}]}, "functions: a setting of OpenAI's first form of tools.*give tools"),
        ({"function_call": "auto"}, "function_call: a setting of OpenAI's first form of tools.*give tool_choice"),
    ],
)  # fmt: skip
def test_openais_first_form_of_tools_is_refused_and_not_ignored(more: dict[str, Any], said: str) -> None:
    async def work() -> None:
        async with serving(echo) as (served, engine):
            with pytest.raises(openai.BadRequestError, match=said):
                await ask_openai(served, [{"role": "user", "content": "x"}], stream=False, **more)
            assert not engine.started

    in_a_loop(work)


@pytest.mark.parametrize("key", ["function_call", "refusal", "audio"])
def test_what_a_message_says_elsewhere_is_refused_and_not_dropped(key: str) -> None:
    async def work() -> None:
        async with serving(echo) as (served, engine):
            chat = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y"},
                {"role": "user", "content": "z"},
            ]
            await ask_openai(served, [chat[0], chat[1] | {key: None}, chat[2]], stream=False)
            with pytest.raises(openai.BadRequestError, match=rf"messages\[1\].{key}: this model reads"):
                await ask_openai(served, [chat[0], chat[1] | {key: {"name": "add"}}, chat[2]], stream=False)
            assert engine.started == 1

    in_a_loop(work)


def test_settings_that_nobody_follows_are_noted() -> None:
    async def work() -> None:
        async with serving(echo) as (served, _):
            chat = [{"role": "user", "content": "x"}]
            more = {"guided_json": {"type": "object"}, "min_tokens": None, "ignore_eos": False}
            await ask_openai(served, chat, stream=False, extra_body=more, user="me", verbosity="low")
            await ask_anthropic(served, chat, stream=False, extra_body={"context_management": {}}, metadata={})
            noted = ["context_management", "guided_json", "ignore_eos", "verbosity"]
            assert sorted(served.session.overridden) == noted

    in_a_loop(work)
