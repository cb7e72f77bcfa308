"""A server on loopback with the two APIs of OpenAI that write text. A test says what it writes, or spoils what it says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.listener import answer_posts

Reply = tuple[int, Any]


class Writer:
    """The server's behaviour; a test spoils it."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.write: Callable[[str], str] = lambda text: text[::-1]
        self.spoil: Callable[[str, dict[str, Any]], Reply | None] = lambda text, reply: None
        self.delay_s = 0.0
        self.lock = threading.Lock()

    def answer(self, path: str, request: dict[str, Any]) -> Reply:
        with self.lock:
            self.requests.append(request)
        time.sleep(self.delay_s)
        chat = path == "/v1/chat/completions"
        text = request["messages"][-1]["content"] if chat else request["prompt"]
        words = self.write(text)
        choice = {"message": {"role": "assistant", "content": words}} if chat else {"text": words}
        reply = {
            "model": request["model"],
            "choices": [{"index": 0, "finish_reason": "stop", **choice}],
            "usage": {"prompt_tokens": len(text), "completion_tokens": len(words)},
        }
        return self.spoil(text, reply) or (200, reply)


@contextmanager
def serve_writer() -> Iterator[Writer]:
    """The server, for as long as the block lasts."""
    state = Writer()

    def answer(path: str, headers: Mapping[str, str], request: Any) -> tuple[int, bytes]:
        status, reply = state.answer(path, request)
        return status, reply if isinstance(reply, bytes) else json.dumps(reply).encode()

    with answer_posts(answer) as address:
        state.url = f"{address}/v1"
        yield state
