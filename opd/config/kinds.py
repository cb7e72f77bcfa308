"""Shared code of sections that choose one of several kinds: by a name alone, or by a mapping with `kind` and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Discriminator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from opd.settings.suggestions import find_nearest


@dataclass(frozen=True, slots=True)
class NameOrMapping:
    """Annotation for pydantic: a name alone is read as a mapping with that `kind`, so that code sees one form only."""

    error: str
    """Type of pydantic's error for an unknown kind."""
    key: str
    """Key of the section, from the top of the pipeline."""
    kinds: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._read_section, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"oneOf": [{"enum": list(self.kinds), "type": "string"}, *handler(schema)["oneOf"]]}

    def _read_section(self, value: Any) -> Any:
        """Turn a name into a mapping. Raises: PydanticCustomError for an unknown kind, with the nearest known one."""
        if isinstance(value, str):
            value = {"kind": value}
        if isinstance(value, Mapping) and value.get("kind") not in self.kinds:
            kind = value.get("kind")
            near = find_nearest(str(kind), self.kinds)
            raise PydanticCustomError(
                self.error,
                "{hint}one of: {kinds}",
                {
                    "hint": f"did you mean `{near}`? " if near else "",
                    "kinds": ", ".join(self.kinds),
                    "where": self.key,
                    "found": "no `kind`" if kind is None else str(kind),
                },
            )
        return value


def discriminate_by_kind(error: str) -> Discriminator:
    """Return the discriminator by which pydantic chooses a section's class. The tag of a class is a tilde and its `kind`."""
    return Discriminator(
        kind_tag, custom_error_type=error, custom_error_message="a kind, or a mapping with `kind` and options"
    )


def kind_tag(value: Any) -> str:
    """Return the tag of a section: a tilde and its `kind`.

    pydantic puts tags among the keys of an error. By the tilde `opd.settings.yaml_files.find_error_keys` knows that the user did
    not write this one.
    """
    return f"~{value.get('kind') if isinstance(value, Mapping) else getattr(value, 'kind', '')}"
