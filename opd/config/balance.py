"""The section `balance`: how the samples of a step are dealt out to the domains. A name, or a mapping with `kind` and options."""

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
    """Each domain's share of the trained tokens is its `weight`: where responses are longer, a step has fewer of them."""
    window: int = Field(10, ge=1)
    """Steps over which the length of responses is averaged; older ones count less and less."""

    of: ClassVar[str] = "tokens"


class GapBalance(Strict):
    kind: Literal["gap"]
    """Each domain's share is its `weight` times what it has left to learn, by its loss in training, the slope of that loss,
    and the responses that are cut at their limit."""
    of: Literal["samples", "tokens"] = "samples"
    """What is shared out: a step's samples, or its trained tokens."""
    floor: float = Field(0.5, gt=0, le=1)
    """Least share of a domain, in units of the share that its `weight` gives it: what a domain that is done keeps."""
    cap: float = Field(3.0, ge=1)
    """Largest share of a domain, in the same units."""
    window: int = Field(10, ge=1)
    """Steps over which losses are averaged. So many first steps go by `weight` alone: they say where each domain starts."""


KINDS = ("samples", "tokens", "gap")


class _NameOrMapping:
    """A name alone stands for the kind with its defaults, so that whoever reads the pipeline sees one form."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_section, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"oneOf": [{"enum": list(KINDS), "type": "string"}, *handler(schema)["oneOf"]]}


def _section(value: Any) -> Any:
    """Raises: PydanticCustomError for a kind that there is not, with the nearest that there is."""
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
