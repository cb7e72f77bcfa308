"""The section `balance`, a name or a mapping with `kind` and options: how a step's samples are dealt out to the domains."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from opd.config.kinds import NameOrMapping, discriminate_by_kind
from opd.settings.strict import Strict


class SamplesBalance(Strict):
    kind: Literal["samples"]
    """A domain's share of a step's samples is its `weight`."""


class TokensBalance(Strict):
    kind: Literal["tokens"]
    """Its share of the trained tokens is its `weight`."""
    window: int = Field(10, ge=1)
    """Steps over which response lengths are averaged."""

    of: ClassVar[str] = "tokens"


class GapBalance(Strict):
    kind: Literal["gap"]
    """Its share is `weight` times what it has left to learn, by loss, slope and cut responses."""
    of: Literal["samples", "tokens"] = "samples"
    """What is shared out: a step's samples, or its trained tokens."""
    per: Literal["token", "response"] = "token"
    """`token`: the loss a token, relative to the domain's first steps. `response`: the nats x of a whole response, as x
    / (1 + x)."""
    floor: float = Field(0.5, gt=0, le=1)
    """Smallest share of a domain, as a multiple of the share by `weight`."""
    cap: float = Field(3.0, ge=1)
    """Largest share, as the same multiple."""
    window: int = Field(10, ge=1)
    """Steps over which losses are averaged; the first `window` steps go by `weight` alone."""


KINDS = ("samples", "tokens", "gap")

BalanceConfig = Annotated[
    Annotated[SamplesBalance, Tag("~samples")]
    | Annotated[TokensBalance, Tag("~tokens")]
    | Annotated[GapBalance, Tag("~gap")],
    discriminate_by_kind("balance"),
    NameOrMapping("balance", "balance", KINDS),
]
