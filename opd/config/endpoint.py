"""Keys of a server with an OpenAI-compatible API: where it is, who may ask, how it is asked and what that may cost."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from opd.machine.address import LOOPBACK, strip_secret
from opd.settings.strict import Strict

OWN_REQUEST_KEYS = frozenset({"model", "messages", "prompt", "n", "stream", "temperature", "max_tokens"})
"""Keys of a request that `request` must not have, because other keys of the pipeline set them."""


class ServerConfig(Strict):
    base_url: str
    """Address with version, as http://127.0.0.1:8000/v1; plain http to this machine only."""
    model: str = Field(..., min_length=1)
    """The model's name at the server."""

    @model_validator(mode="after")
    def _check_base_url(self) -> ServerConfig:
        problem = _find_url_problem(self.base_url)
        if problem is not None:
            raise PydanticCustomError(
                "base_url", "https://HOST/v1, or http://127.0.0.1:PORT/v1 on this machine", {"found": problem}
            )
        return self


def _find_url_problem(url: str) -> str | None:
    """Return why a server's address cannot be used, in words that leave out any password; None if it can be used."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        return f"no address: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return f"{strip_secret(url)!r}, no http address"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return f"an address of {host} with a user, a query or a fragment (a key goes into api_key_env)"
    if parts.scheme == "http" and host not in LOOPBACK:
        return f"plain http to another machine, {host}: prompts, responses and key would be readable on the way"
    return None


class ServerAccess(Strict):
    api_key_env: str | None = None
    """Environment variable with the key: of `openai` in scoring workers, else where `opd` runs."""
    server_timeout_s: float = Field(120, gt=0, allow_inf_nan=False)
    """Deadline of one request; a failed one is sent up to four times."""

    @field_validator("api_key_env")
    @classmethod
    def _refuse_key_itself(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            # A user may have put the key itself here, which must not be printed.
            raise PydanticCustomError(
                "api_key_env",
                "a variable's name, such as TEACHERS_KEY",
                {"found": "something that is no variable's name"},
            )
        return name


class PriceConfig(Strict):
    """The price of a million tokens, in the currency of your choice."""

    input: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Price of prompts."""
    output: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Price of answers."""


class TextServerConfig(ServerAccess, ServerConfig):
    """A model that writes text."""

    served_model: str | None = Field(None, min_length=1)
    """The model's name in answers; default: `model`, or that with a date or version behind a dash."""
    request: dict[str, Any] = {}
    """Further keys of requests, such as `{reasoning_effort: low}`. `max_completion_tokens` replaces `max_tokens`."""
    temperature: float | None = Field(0.0, ge=0, allow_inf_nan=False)
    """Null: not sent, for models that take none."""
    max_calls: int | None = Field(None, ge=1)
    """Most requests of a run, failed ones too; default: no limit."""
    max_cost: float | None = Field(None, gt=0, allow_inf_nan=False)
    """The run stops once so much was spent; default: no limit."""
    price: PriceConfig = PriceConfig()
    """Money for a million tokens, `input` and `output`."""

    def find_problem(self) -> tuple[str, str, str] | None:
        """Return a key, what was found there and what is wanted, if two keys do not go together; None if all do."""
        if self.max_cost is not None and not self.has_price:
            return "max_cost", f"{self.max_cost:g} without a price", "price as well"
        if reserved := sorted(OWN_REQUEST_KEYS & {*self.request}):
            return "request", ", ".join(reserved), "keys that have no place of their own in a pipeline"
        return None

    @property
    def has_price(self) -> bool:
        """True if tokens cost anything."""
        return bool(self.price.input or self.price.output)
