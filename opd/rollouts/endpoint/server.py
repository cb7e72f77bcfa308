"""The HTTP server: it finds the session of a request, checks the secret, and leaves the rest to the session and the wire format.

agent ── POST /s/SESSION/v1/chat/completions ─→ openai    ┐
      ── POST /s/SESSION/v1/messages ─────────→ anthropic ┴─ Request → Session → Reply ─→ whole, or as events
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol, Self

from aiohttp import web

from opd.records.json_fields import parse_strict_json
from opd.rollouts.endpoint import anthropic, openai
from opd.rollouts.endpoint.messages import ApiError, Reply, Request, make_request_error
from opd.rollouts.endpoint.session import EndpointSession, Turn
from opd.rollouts.episodes.threads import run_in_reader
from opd.text import to_one_line

LOOPBACK = "127.0.0.1"
MODEL = "policy"
"""Name of the only model in the list of models; requests may give any name."""
MAX_BODY_BYTES = 16 << 20
KEEP_ALIVE_S = 5.0
"""Seconds after which a stream gets an event that says the policy is still writing."""
SHUTDOWN_S = 5.0


class Codec(Protocol):
    """One wire format."""

    WAITING: bytes

    def parse(self, body: Mapping[str, Any]) -> Request: ...
    def body(self, reply: Reply, model: str) -> dict[str, Any]: ...
    def opening(self, reply_id: str, model: str, created: int) -> bytes: ...
    def remaining_events(self, reply: Reply, request: Request) -> Iterator[bytes]: ...
    def error(self, problem: ApiError) -> dict[str, Any]: ...
    def error_event(self, problem: ApiError) -> bytes: ...


CODECS: dict[str, Codec] = {"chat/completions": openai, "messages": anthropic}
"""Last part of the URL -> wire format."""


class EndpointServer:
    """Serves open sessions within `async with`, on a free port of this machine's loopback address."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_format_refusals])
        for path in CODECS:
            app.router.add_post(f"/s/{{session}}/v1/{path}", self._answer_chat)
        app.router.add_get("/s/{session}/v1/models", self._answer_models)
        # A handler whose client has gone is cancelled, and with it the request to the engine.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
        self._sessions: dict[str, EndpointSession] = {}
        self._port = 0

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    def open_session(self, session: EndpointSession) -> Mapping[str, str]:
        """Serve a session. Return the environment variables by which the stock clients of both APIs find it."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = session
        base = f"http://{LOOPBACK}:{self._port}/s/{name}"
        return {
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": session.secret,
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": session.secret,
        }

    def close(self, session: EndpointSession) -> None:
        """Stop serving a session; what it is waiting for is cancelled."""
        self._sessions = {
            name: other_session for name, other_session in self._sessions.items() if other_session is not session
        }
        session.close()

    def _find_session(self, http: web.Request) -> EndpointSession:
        """Return the session that the URL names. Raises: ApiError if there is none, or the secret is not its own."""
        session = self._sessions.get(http.match_info["session"])
        if session is None:
            raise ApiError(404, "not_found", "there is no such session, or its episode has ended")
        kind, _, token = http.headers.get("Authorization", "").partition(" ")
        key = token if kind.lower() == "bearer" else http.headers.get("x-api-key", "")
        if not _equal_in_constant_time(key, session.secret):
            for other_session in self._sessions.values():
                # Its agent asked in the name of another episode, so it is the key's session that ends.
                if _equal_in_constant_time(key, other_session.secret):
                    other_session.end_session("foreign")
            raise ApiError(401, "authentication", "the key is not that of this session")
        return session

    async def _answer_models(self, http: web.Request) -> web.StreamResponse:
        self._find_session(http)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "opd"}
        model |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
        page = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return web.json_response({"object": "list", "data": [model]} | page)

    async def _answer_chat(self, http: web.Request) -> web.StreamResponse:
        codec, session = _codec_of_url(http), self._find_session(http)
        session.count_request()
        try:
            request = await run_in_reader(_parse_request, codec, await http.read())
            turn = await session.accept_request(request)
        except RecursionError:
            raise make_request_error("the body is nested too deeply") from None
        if request.stream:
            return await _stream_reply(http, codec, request, turn)
        return web.json_response(codec.body(await turn.wait_for_reply(), request.model))


def _equal_in_constant_time(key: str, secret: str) -> bool:
    """Return True if both texts are equal. The time that this takes does not tell how many characters agree."""
    return hmac.compare_digest(key.encode("utf-8", "surrogateescape"), secret.encode())


def _codec_of_url(http: web.BaseRequest) -> Codec:
    """Return the wire format of a URL; OpenAI's for a URL that belongs to none."""
    return next((codec for path, codec in CODECS.items() if http.path.endswith(f"/v1/{path}")), openai)


def _parse_request(codec: Codec, data: bytes) -> Request:
    """Read a request's body. Raises: ApiError, RecursionError."""
    try:
        body = parse_strict_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise make_request_error(f"the body is not JSON: {error!s:.100}") from None
    if not isinstance(body, dict):
        raise make_request_error("the body is not a JSON object")
    return codec.parse(body)


@web.middleware
async def _format_refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Handle a request, and turn each refusal into a response in the form of the API that was asked."""
    try:
        return await handler(request)
    except ApiError as error:
        problem = error
    except web.RequestPayloadError as error:
        problem = make_request_error(f"the body cannot be read: {to_one_line(str(error.__cause__ or error), 100)}")
    except web.HTTPRequestEntityTooLarge:
        problem = ApiError(413, "too_large", f"the body has more than {request.client_max_size >> 20} MiB")
    except web.HTTPException as error:  # no such URL, or another method
        problem = ApiError(error.status, "not_found", f"{request.method} {request.path:.100}: {error.reason}")
    answer = web.json_response(_codec_of_url(request).error(problem), status=problem.status)
    if request.content.exception() is not None:  # nobody knows where the next request on this connection would begin
        answer.force_close()
    return answer


async def _stream_reply(http: web.Request, codec: Codec, request: Request, turn: Turn) -> web.StreamResponse:
    """Send a reply as events, the first one before the policy has written anything, so that the client sees that it is at work."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    await response.write(codec.opening(turn.reply_id, request.model, turn.created))
    writing = asyncio.ensure_future(turn.wait_for_reply())
    try:
        while not (await asyncio.wait({writing}, timeout=KEEP_ALIVE_S))[0]:
            await response.write(codec.WAITING)
        for event in codec.remaining_events(await writing, request):
            await response.write(event)
    except ApiError as problem:  # the HTTP status has been sent already, so the refusal is sent as an event
        await response.write(codec.error_event(problem))
    finally:
        writing.cancel()
    return response
