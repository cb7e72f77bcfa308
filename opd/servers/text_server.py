"""Questions to a server that writes answers and gives no log-probs.

POST {base_url}/chat/completions  {"model", "messages", "temperature", "max_tokens"}  → choices[0].message.content
POST {base_url}/completions       {"model", "prompt", ...}                            → choices[0].text
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from opd.config.endpoint import TextServerConfig
from opd.records.texts import TextAnswer
from opd.records.types import Prompt
from opd.servers.requests import (
    ATTEMPTS,
    IN_FLIGHT,
    MAX_SHOWN,
    RequestFailed,
    RequestRefused,
    open_session,
    post_request,
)
from opd.text import to_one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class TextServerSpec:
    """Settings of requests to a model."""

    base_url: str
    """Address with version."""
    model: str
    """Name under which the server knows the model."""
    api: Literal["chat", "completions"]
    """The server's API, one of the two."""
    max_tokens: int
    """Most tokens of an answer, in the server's own."""
    temperature: float | None = 0.0
    """Temperature of the answers; None: the server's."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of each request."""
    served_model: str | None = None
    """Name of the model that answers must have; None: `model`, or that with a date or version behind a dash."""
    api_key_env: str | None = None
    """Environment variable with the server's key."""
    timeout_s: float = 120.0
    """Deadline of one request."""
    needs_usage: bool = False
    """True if an answer that does not say how many tokens it took cannot be used."""

    @classmethod
    def from_config(
        cls, config: TextServerConfig, api: Literal["chat", "completions"], max_tokens: int
    ) -> TextServerSpec:
        """Return the spec of a server as a pipeline describes it."""
        return cls(
            base_url=config.base_url,
            model=config.model,
            api=api,
            max_tokens=max_tokens,
            temperature=config.temperature,
            request=config.request,
            served_model=config.served_model,
            api_key_env=config.api_key_env,
            timeout_s=config.server_timeout_s,
            needs_usage=config.has_price,
        )


class UnusableAnswer(ValueError):
    """The server answered, and nothing can be learned from it."""


class TextServer:
    """Asks one model."""

    def __init__(self, name: str, spec: TextServerSpec, role: Literal["expert", "judge"] = "expert") -> None:
        """`name` is that of the expert, or of the domain that the judge is for."""
        self.name = name
        self.role = role
        self._spec = spec
        path = "chat/completions" if spec.api == "chat" else "completions"
        self._url = f"{spec.base_url.rstrip('/')}/{path}"
        self._speaker = f"{role} {name}: {self._url}"

    def ask_prompts(
        self, prompts: Sequence[Prompt], keep: Callable[[TextAnswer], None], count: Callable[[], None]
    ) -> None:
        """Ask about all prompts, `IN_FLIGHT` at a time. `keep` gets each answer as it comes, `count` is called before
        every request. Raises: RunError if the server refuses every request; what `keep` and `count` raise."""
        asyncio.run(self._ask_all(prompts, keep, count))

    async def _ask_all(
        self, prompts: Sequence[Prompt], keep: Callable[[TextAnswer], None], count: Callable[[], None]
    ) -> None:
        free_slots = asyncio.Semaphore(IN_FLIGHT)
        async with open_session(self._spec.timeout_s, self._spec.api_key_env, "the environment of `opd`") as session:

            async def ask_one(prompt: Prompt) -> None:
                async with free_slots:
                    keep(await self._request_answer(session, prompt, count))

            try:
                async with asyncio.TaskGroup() as group:
                    for prompt in prompts:
                        group.create_task(ask_one(prompt))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _request_answer(self, session: Any, prompt: Prompt, count: Callable[[], None]) -> TextAnswer:
        """Return the answer, with its problem if it has one. Raises: RunError if the server refuses every request."""
        try:
            response = await post_request(session, self._url, self.build_request(prompt), self._speaker, count)
        except RequestFailed as error:
            return self._make_answer(prompt, answered=False, attempts=ATTEMPTS, problem=str(error))
        except RequestRefused as error:
            return self._make_answer(prompt, problem=str(error))
        prompt_tokens, completion_tokens = _read_usage(response)
        said = {
            "model": _read_model(response),
            "prompt_tokens": prompt_tokens or 0,
            "completion_tokens": completion_tokens or 0,
        }
        try:
            if self._spec.needs_usage and None in (prompt_tokens, completion_tokens):
                raise UnusableAnswer("the answer does not say how many tokens it took, which has a price")
            text, finished = self._parse_text(response)
        except UnusableAnswer as error:
            return self._make_answer(prompt, problem=f"{self._speaker}: {error}", **said)
        return self._make_answer(prompt, text=text, finished=finished, **said)

    def _make_answer(self, prompt: Prompt, **values: Any) -> TextAnswer:
        return TextAnswer(expert=self.name, prompt_id=prompt.id, **values)

    def build_request(self, prompt: Prompt) -> dict[str, Any]:
        """Return the JSON of a question."""
        spec = self._spec
        if spec.api == "chat":
            chat = prompt.text if isinstance(prompt.text, list) else [{"role": "user", "content": prompt.text}]
            asked: dict[str, Any] = {"messages": chat}
        else:
            asked = {"prompt": prompt.text}
        if spec.temperature is not None:
            asked["temperature"] = spec.temperature
        if "max_completion_tokens" not in spec.request:  # the newer name, which some models insist on
            asked["max_tokens"] = spec.max_tokens
        return {"model": spec.model, **asked, **spec.request}

    def _parse_text(self, response: Any) -> tuple[str, bool]:
        """Return the text, and whether the expert ended it itself. Raises: UnusableAnswer."""
        choices = response.get("choices") if isinstance(response, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise UnusableAnswer(f"answered without one choice: {to_one_line(json.dumps(response), MAX_SHOWN)}")
        if not self._is_the_model(response.get("model")):
            raise UnusableAnswer(
                f"{response.get('model')!r} answered, asked was {self._spec.model!r} (served_model says how answers name it)"
            )
        choice, reason = choices[0], choices[0].get("finish_reason")
        if reason not in ("stop", "length"):
            raise UnusableAnswer(f"ended with finish_reason {reason!r}, wanted stop or length")
        message = choice.get("message") if self._spec.api == "chat" else {"content": choice.get("text")}
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise UnusableAnswer("an empty answer")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UnusableAnswer("text that is no Unicode") from None
        return text, reason == "stop"

    def _is_the_model(self, name: Any) -> bool:
        if self._spec.served_model is not None:
            return bool(name == self._spec.served_model)
        return isinstance(name, str) and (name == self._spec.model or name.startswith(f"{self._spec.model}-"))


def _read_model(response: Any) -> str:
    """Return the model's name in an answer; empty if it has none."""
    name = response.get("model") if isinstance(response, dict) else None
    return name if isinstance(name, str) else ""


def _read_usage(response: Any) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer that the server counted; None for a number that it does not give."""
    usage = response.get("usage") if isinstance(response, dict) else None
    numbers = usage if isinstance(usage, dict) else {}

    def read_number(key: str) -> int | None:
        value = numbers.get(key)
        return value if type(value) is int and value >= 0 else None

    return read_number("prompt_tokens"), read_number("completion_tokens")
