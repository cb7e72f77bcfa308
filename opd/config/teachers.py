"""The section `teachers`: what scores, where, and what it sends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from opd.address import LOOPBACK, parse_url, without_secret
from opd.config.payloads import PayloadName
from opd.config.strict import DType, Name, Strict


class ServerConfig(Strict):
    base_url: str
    """Address of the API with its version, e.g. http://127.0.0.1:8000/v1; plain http to this machine only."""
    model: str = Field(..., min_length=1)
    """Name under which the server knows the expert."""

    @model_validator(mode="after")
    def _https_or_loopback(self) -> ServerConfig:
        problem = _url_problem(self.base_url)
        if problem is not None:
            raise PydanticCustomError(
                "base_url", "https://HOST/v1, or http://127.0.0.1:PORT/v1 on this machine", {"found": problem}
            )
        return self


def _url_problem(url: str) -> str | None:
    """What is wrong with a server's address, without any password in it; None if nothing is."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        return f"no address: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return f"{without_secret(url)!r}, no http address"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return f"an address of {host} with a user, a query or a fragment (a key goes into teachers.api_key_env)"
    if parts.scheme == "http" and host not in LOOPBACK:
        return f"plain http to another machine, {host}: prompts, responses and key would be readable on the way"
    return None


class TeachersConfig(Strict):
    engine: Literal["transformers", "vllm", "openai", "flight"] = "transformers"
    """What scores: the model's body under transformers, many rows packed into one forward pass; a vLLM engine in the
    worker; `openai`: servers elsewhere that speak the OpenAI completions API with vLLM's prompt log-probs; `flight`: an
    `opd teachers serve` elsewhere, to which `workers` and `memory` are left."""
    address: str | None = None
    """Engine `flight`: who serves the teachers, `grpc+tls://HOST:PORT`; on this machine `grpc://127.0.0.1:PORT` too."""
    tls_root_certs: Path | None = None
    """Engine `flight`: PEM file with the certificates to trust; wanted with `grpc+tls`."""
    token_file: Path | None = None
    """Engine `flight`: file with the server's token, readable by its owner only; default: OPD_TEACHERS_TOKEN."""
    workers: int = Field(1, ge=1)
    """Scoring workers; each teacher's rows of a step go to one of them."""
    payload: PayloadName = "hidden_states"
    """What is sent per response token: the last hidden state after the final norm, from which any objective but `top_k`
    can be computed; the sampled token's log-prob; or the likeliest tokens' log-probs (`objective.k` of them)."""
    memory: ByteSize = Field("8GiB", validate_default=True, gt=0)
    """Teachers kept in memory by each scoring worker, one read ahead among them, least recently used out; the one in use
    always stays. Engine `vllm` holds one and reads the next from its files."""
    queue: ByteSize = Field("256MiB", validate_default=True, gt=0)
    """Scored rows that may wait for the trainer while it overlaps with the teachers (`schedule.overlap`), over all scoring
    workers, and two more parts of about a mebibyte for each; what the next micro-batch needs is always let in."""
    mask_tokens: dict[Name, list[str]] = {}
    """By expert's name: tokens that it never writes, such as `<think>`. Where the student writes one in a domain of that
    expert, the token carries no loss: the expert has nothing to say about it but "never"."""
    max_quarantined: float = Field(0.001, ge=0, le=1)
    """Share of a step's responses that may be left out because a teacher's states are not finite, before the run stops."""
    dtype: DType = "float32"
    """Teachers compute in it, and hidden states and heads are sent in it; a server computes in its own."""
    kv_cache_gib: int = Field(1, ge=1)
    """Key-value cache of engine `vllm` on a CPU, whole GiB."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that engine `vllm` may take."""
    servers: dict[Name, ServerConfig] = {}
    """By expert's name: who serves it. Engine `openai` needs one for each expert."""
    api_key_env: str | None = None
    """Environment variable that holds the servers' key; set it where the scoring workers run."""
    server_timeout_s: float = Field(120, gt=0, allow_inf_nan=False)
    """Deadline of one request to a server; it is made up to four times."""

    @field_validator("api_key_env")
    @classmethod
    def _no_key_in_the_pipeline(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            # It may be the key itself, which must not be printed.
            raise PydanticCustomError(
                "api_key_env",
                "a variable's name, such as TEACHERS_KEY",
                {"found": "something that is no variable's name"},
            )
        return name

    @model_validator(mode="after")
    def _servers_only_with_openai(self) -> TeachersConfig:
        unused = [key for key in ("servers", "api_key_env") if getattr(self, key)] if self.engine != "openai" else []
        if unused:
            raise PydanticCustomError(
                "servers",
                "engine: openai, or no {key}",
                {
                    "key": unused[0],
                    "where": f"teachers.{unused[0]}",
                    "found": f"set, with teachers.engine {self.engine}",
                },
            )
        if self.engine == "openai" and self.payload == "hidden_states":
            raise PydanticCustomError(
                "payload",
                "sampled_logprobs or top_k, with objective.kind sampled or top_k: a server sends no hidden states; "
                "engine transformers or vllm does",
                {"where": "teachers.payload", "found": "hidden_states with teachers.engine openai"},
            )
        return self

    @model_validator(mode="after")
    def _an_address_for_flight(self) -> TeachersConfig:
        if self.engine != "flight":
            for key in ("address", "tls_root_certs", "token_file"):
                if getattr(self, key) is not None:
                    raise _teachers_error(key, getattr(self, key), "nothing, or teachers.engine flight")
            return self
        url = parse_url(self.address or "")
        if url is None:
            raise _teachers_error("address", self.address, "grpc+tls://HOST:PORT, or grpc:// on this machine")
        scheme, address = url
        if scheme == "grpc" and not address.is_loopback:
            raise _teachers_error(
                "address", self.address, f"grpc+tls:// for a host other than {', '.join(LOOPBACK)}: tokens are secret"
            )
        if (scheme == "grpc+tls") != (self.tls_root_certs is not None):
            wanted = "a PEM file, for grpc+tls" if scheme == "grpc+tls" else "nothing, grpc:// has no certificates"
            raise _teachers_error("tls_root_certs", self.tls_root_certs, wanted)
        return self


def _teachers_error(key: str, found: object, wanted: str) -> PydanticCustomError:
    shown = "nothing" if found is None else without_secret(str(found))
    return PydanticCustomError("teachers", "{wanted}", {"wanted": wanted, "where": f"teachers.{key}", "found": shown})
