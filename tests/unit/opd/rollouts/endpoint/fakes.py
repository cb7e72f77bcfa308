"""A policy that writes what a function says, one token a step, behind the interface of the engine.

It behaves as vLLM does where that matters here: requests that wait at the same time advance together, one that is cancelled
leaves the batch, the end token is among the sampled ones, a limit cuts, and every token has a log-prob.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from opd.errors import RunError
from opd.records.environments import Tool
from opd.records.types import SampledTurn
from opd.rollouts.endpoint.messages import Call, Message
from opd.rollouts.endpoint.server import EndpointServer
from opd.rollouts.endpoint.session import EndpointSession, SessionLimits
from opd.rollouts.episodes.chat import make_call_id
from opd.rollouts.episodes.trace import Trace
from opd.rollouts.episodes.turns import History
from opd.tool_formats.hermes import Hermes
from opd.tool_formats.records import WrittenCalls

BEGIN, END = 1, 2
"""Tokens around a message; every other token is a letter."""
Policy = Callable[[str, int], str]
"""The text before the turn, seed -> the turn."""


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids if token not in (BEGIN, END))


class Letters:
    """A chat template of letters: BEGIN role newline text END, and calls as Hermes writes them."""

    def encode_conversation(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        named = [Message(role="system", text=f"tools: {tool.name}") for tool in tools]
        return [*self._render([*named, *messages]), BEGIN, *encode("assistant\n")]

    def encode_following(self, turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        close = [] if turn[-1] == END else [END]
        return [*close, *self._render(messages), BEGIN, *encode("assistant\n")]

    def encode_history(self, history: History, messages: Sequence[Message]) -> list[int]:
        return history.ids

    def text(self, turn: Sequence[int]) -> str:
        return decode(turn)

    def calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, tuple[Call, ...]]:
        found = Hermes().read(text, tools) if tools else WrittenCalls((), text)
        calls = (Call(id=make_call_id(i), name=c.name, arguments=c.arguments) for i, c in enumerate(found.calls))
        return found.text, tuple(calls)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        ids = []
        for message in messages:
            calls = "".join(
                f"<tool_call>{json.dumps({'name': c.name, 'arguments': dict(c.arguments)})}</tool_call>"
                for c in message.calls
            )
            ids += [BEGIN, *encode(f"{message.role}\n{message.text}{calls}"), END]
        return ids


@dataclass
class FakeEngine:
    """Implements `opd.interfaces.TokenEngine`."""

    policy: Policy
    step_s: float = 0.0
    version: int = 7
    started: int = 0
    finished: int = 0
    cancelled: int = 0
    most: int = 0
    """Largest number of requests that were at work together."""
    seeds: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    broken: bool = False

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> SampledTurn:
        self.started += 1
        self.seeds.append(seed)
        self.limits.append(max_tokens)
        self.most = max(self.most, self.started - self.finished - self.cancelled)
        meant = [*encode(self.policy(decode(token_ids), seed)), END]
        written: list[int] = []
        try:
            while len(written) < max_tokens and written[-1:] != [END]:
                await asyncio.sleep(self.step_s)
                if self.broken:
                    raise RunError("the rollout engine returned NaN log-probs: the student's weights are broken")
                written.append(meant[len(written)])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.finished += 1
        return SampledTurn(
            token_ids=tuple(written),
            logprobs=tuple(-0.001 * (1 + place) for place in range(len(written))),
            stop_reason="stop" if written[-1] == END else "length",
            policy_version=self.version,
        )


def make_limits(**changed: Any) -> SessionLimits:
    return SessionLimits(
        **{"max_new_tokens": 200, "max_model_len": 4000, "max_calls": 50, "seed": "3/000001/a/0"} | changed
    )


@dataclass
class Served:
    """A session that is served, its trace, and how its clients find it."""

    session: EndpointSession
    trace: Trace
    environ: Mapping[str, str]

    @property
    def openai(self) -> dict[str, Any]:
        """Return the arguments of `openai.AsyncOpenAI`."""
        return {"base_url": self.environ["OPENAI_BASE_URL"], "api_key": self.environ["OPENAI_API_KEY"]}

    @property
    def anthropic(self) -> dict[str, Any]:
        """Return the arguments of `anthropic.AsyncAnthropic`."""
        return {"base_url": self.environ["ANTHROPIC_BASE_URL"], "api_key": self.environ["ANTHROPIC_API_KEY"]}


def serve(endpoint: EndpointServer, engine: FakeEngine, **changed: Any) -> Served:
    trace = Trace(policy_version=engine.version)
    session = EndpointSession(trace, engine, Letters(), make_limits(**changed))
    return Served(session, trace, endpoint.open_session(session))


@asynccontextmanager
async def serving(policy: Policy, step_s: float = 0.0, **changed: Any) -> AsyncIterator[tuple[Served, FakeEngine]]:
    """One session on an endpoint of its own."""
    engine = FakeEngine(policy, step_s)
    async with EndpointServer() as endpoint:
        served = serve(endpoint, engine, **changed)
        yield served, engine
        endpoint.close(served.session)
