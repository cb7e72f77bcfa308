"""The stock clients of both APIs, each as one function: messages in, reply out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import anthropic
import openai

from tests.unit.opd.rollouts.endpoint.fakes import Served

Chat = list[dict[str, Any]]
WAIT_S = 60.0
"""Of the clients too: on a busy machine 64 of them do not connect within their own five seconds."""


def in_a_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine to its end, a minute at most."""
    asyncio.run(asyncio.wait_for(work(), WAIT_S))


def echo(before: str, seed: int) -> str:
    """Says the last thing that was said to it."""
    return "you said " + before.rsplit("user\n", 1)[-1].removesuffix("assistant\n")


async def ask_openai(served: Served, messages: Chat, *, stream: bool, **more: Any) -> dict[str, Any]:
    """The reply as the assistant's message of OpenAI's form, with `finish`."""
    async with openai.AsyncOpenAI(**served.openai, max_retries=0, timeout=WAIT_S) as client:
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
    async with anthropic.AsyncAnthropic(**served.anthropic, max_retries=0, timeout=WAIT_S) as client:
        given: Any = {"model": "m", "messages": messages, "max_tokens": 150, **more}
        if not stream:
            return await client.messages.create(**given)
        async with client.messages.stream(**given) as events:
            return await events.get_final_message()
