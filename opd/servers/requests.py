"""Requests to servers with an OpenAI-compatible API. Each attempt has a deadline, and the number of attempts is limited."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opd.errors import RunError
from opd.text import to_one_line

if TYPE_CHECKING:  # its import takes too long for those who ask nobody
    import aiohttp

ATTEMPTS = 4
"""Number of attempts after which a request has failed."""
BACKOFF_S = 0.5
"""Pause before the second attempt; each later pause is twice as long."""
CONNECT_S = 10.0
"""Deadline for a connection."""
IN_FLIGHT = 16
"""Requests of one process that wait for an answer at the same time."""
MAX_SHOWN = 300
"""Most characters of a server's answer that an error quotes."""


class RequestFailed(RunError):
    """Every attempt of a request failed in a way that may pass, such as a deadline or too many requests."""


class RequestRefused(RunError):
    """The server does not answer this request; it may answer others."""


def open_session(timeout_s: float, key_env: str | None, holder: str) -> aiohttp.ClientSession:
    """Return a session whose requests have this deadline and the key of the environment variable `key_env`.

    Raises: RunError if the variable is not set; `holder` says in whose environment.
    """
    import aiohttp

    headers = {}
    if key_env is not None:
        if not os.environ.get(key_env):
            raise RunError(f"api_key_env: {key_env} is not set in {holder}")
        headers["Authorization"] = f"Bearer {os.environ[key_env]}"
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(timeout=timeout, headers=headers)


def _ignore_attempt() -> None:
    return None


async def post_request(
    session: aiohttp.ClientSession,
    url: str,
    request: dict[str, Any],
    speaker: str,
    count: Callable[[], None] = _ignore_attempt,
) -> Any:
    """Post a request and return the server's JSON. `count` is called before every attempt.

    Raises: RequestRefused for a refusal, and for an answer that is no JSON; RequestFailed when every attempt failed; RunError if the
    server would refuse any request. All begin with `speaker`.
    """
    import aiohttp

    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        count()
        try:
            # A redirect could send the key to another host.
            async with session.post(url, json=request, allow_redirects=False) as response:
                status, body = response.status, await response.read()
        except TimeoutError:
            problem = "no answer in time (server_timeout_s)"
            continue
        except aiohttp.ClientError as error:
            problem = str(error) or type(error).__name__
            continue
        text = to_one_line(body.decode(errors="replace"), MAX_SHOWN)
        if status == 429 or status >= 500:  # too many requests, or an error of the server that may pass
            problem = f"status {status}: {text}"
            continue
        if status in (401, 403, 404):
            raise RunError(f"{speaker}: {_format_refusal(status, request['model'])}: {text}")
        if status != 200:
            raise RequestRefused(f"{speaker}: refused with status {status}: {text}")
        try:
            return json.loads(body)
        except ValueError:
            raise RequestRefused(f"{speaker}: no JSON: {text}") from None
    raise RequestFailed(f"{speaker}: {ATTEMPTS} attempts failed, the last with: {problem}")


def _format_refusal(status: int, model: str) -> str:
    reasons = {
        401: "the key is missing or wrong (api_key_env)",
        403: "the key is not allowed to (api_key_env)",
        404: f"no model {model!r} or no such API at this base_url",
    }
    return f"{status}, {reasons[status]}"
