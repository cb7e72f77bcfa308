"""The section `balance`, a name or a mapping with `kind` and options: how a step's samples are dealt out to the domains.

`opd.prompts.balance` computes the shares. The tags begin with a tilde because pydantic puts them among the keys of an error, where `~` tells
them from what the user wrote (`opd.config.kinds`).
"""

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
    """A domain's share of the trained tokens is its `weight`."""
    window: int = Field(10, ge=1)
    """Steps over which response lengths are averaged."""

    # Not a key of the section: this kind shares out tokens, as `GapBalance` does with `of: tokens`.
    of: ClassVar[str] = "tokens"


class GapBalance(Strict):
    kind: Literal["gap"]
    """A domain's share is `weight` times what it has left to learn."""
    of: Literal["samples", "tokens"] = "samples"
    """Quantity to share out: a step's samples, or its trained tokens."""
    per: Literal["token", "response"] = "token"
    """Count the loss a `token`, over that of the domain's first steps, or of a whole `response`."""
    floor: float = Field(0.5, gt=0, le=1)
    """Smallest share of a domain, as a multiple of its share by `weight` alone."""
    cap: float = Field(3.0, ge=1)
    """Largest share of a domain, as the same multiple."""
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
