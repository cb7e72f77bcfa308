"""The section `balance`, a name or a mapping with `kind` and options: how a step's samples are dealt out to the domains."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from opd.config.strict import Strict


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
    floor: float = Field(0.5, gt=0, le=1)
    """Smallest share of a domain, as a multiple of the share that its `weight` gives it: a finished domain keeps so much."""
    cap: float = Field(3.0, ge=1)
    """Largest share of a domain, as a multiple of the same share."""
    window: int = Field(10, ge=1)
    """Steps over which losses are averaged. The first `window` steps go by `weight` alone, because they measure the start."""


KINDS = ("samples", "tokens", "gap")


class _NameOrMapping:
    """Reads a name alone as the kind with its defaults, so that a pipeline, once read, has one form only."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_section, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"oneOf": [{"enum": list(KINDS), "type": "string"}, *handler(schema)["oneOf"]]}


def _section(value: Any) -> Any:
    """Read a name as a mapping. Raises: PydanticCustomError for an unknown kind, with the nearest known one."""
    if isinstance(value, str):
        value = {"kind": value}
    if isinstance(value, Mapping) and value.get("kind") not in KINDS:
        kind = value.get("kind")
        near = difflib.get_close_matches(str(kind), KINDS, n=1)
        raise PydanticCustomError(
            "balance",
            "{hint}one of: {kinds}",
            {
                "hint": f"did you mean `{near[0]}`? " if near else "",
                "kinds": ", ".join(KINDS),
                "where": "balance",
                "found": "no `kind`" if kind is None else str(kind),
            },
        )
    return value


def _kind(value: Any) -> str:
    return f"~{value.get('kind') if isinstance(value, Mapping) else getattr(value, 'kind', '')}"


BalanceConfig = Annotated[
    Annotated[SamplesBalance, Tag("~samples")]
    | Annotated[TokensBalance, Tag("~tokens")]
    | Annotated[GapBalance, Tag("~gap")],
    Discriminator(
        _kind, custom_error_type="balance", custom_error_message="a kind, or a mapping with `kind` and options"
    ),
    _NameOrMapping(),
]
