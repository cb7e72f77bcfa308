"""The section `balance`, a name or a mapping with `kind` and options: how a step's samples are dealt out to the domains."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from opd.config.kinds import NameOrMapping, by_kind
from opd.settings.strict import Strict


class SamplesBalance(Strict):
    kind: Literal["samples"]
    """Each domain's share of a step's samples is its `weight`, the same in every step."""


class TokensBalance(Strict):
    kind: Literal["tokens"]
    """Each domain's share of the trained tokens is its `weight`: a domain with longer responses gets fewer samples."""
    window: int = Field(10, ge=1)
    """Steps over which the length of responses is averaged; older steps count less and less."""

    of: ClassVar[str] = "tokens"


class GapBalance(Strict):
    kind: Literal["gap"]
    """Each domain's share is its `weight` times what it has left to learn: the loss in training, its slope, and the share of
    responses that are cut at their limit."""
    of: Literal["samples", "tokens"] = "samples"
    """What is shared out: a step's samples, or its trained tokens."""
    per: Literal["token", "response"] = "token"
    """`token`: the loss a token, as a part of what it was in the domain's first steps. `response`: the nats of a whole response,
    x / (1 + x), for domains whose answers are right or wrong as a whole and differ in length."""
    floor: float = Field(0.5, gt=0, le=1)
    """Smallest share of a domain, as a multiple of the share that its `weight` gives it: a finished domain keeps so much."""
    cap: float = Field(3.0, ge=1)
    """Largest share of a domain, as a multiple of the same share."""
    window: int = Field(10, ge=1)
    """Steps over which losses are averaged. The first `window` steps go by `weight` alone, because they measure the start."""


KINDS = ("samples", "tokens", "gap")

BalanceConfig = Annotated[
    Annotated[SamplesBalance, Tag("~samples")]
    | Annotated[TokensBalance, Tag("~tokens")]
    | Annotated[GapBalance, Tag("~gap")],
    by_kind("balance"),
    NameOrMapping("balance", "balance", KINDS),
]
