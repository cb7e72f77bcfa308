"""`auto`: the word for a number of a pipeline that is chosen when a run begins (`pipelines.sizing.auto` has the rules)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

AUTO: Literal["auto"] = "auto"


class OpenNumber(int):
    """A number that a pipeline leaves open. Until a run begins and chooses it, it counts as what suits a small model on a CPU."""


@dataclass(frozen=True, slots=True)
class OrAuto:
    """Annotation of a whole number, or of bytes, that may also be `auto`.

    Code that reads the number need not know: `auto` is an `OpenNumber` in memory, and the word again where the section is written out.
    """

    meanwhile: int
    """Value of the `OpenNumber`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            lambda value: OpenNumber(self.meanwhile) if value == AUTO else value,
            core_schema.union_schema([(handler(source), "~number"), (core_schema.literal_schema([AUTO]), "~auto")]),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: AUTO if isinstance(value, OpenNumber) else int(value)
            ),
        )
