"""`Strict`, the base of every config model, and the types that several of them use."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from opd.settings.suggestions import suggest_key
from opd.text import expand_home

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
UserPath = Annotated[Path, AfterValidator(lambda path: Path(expand_home(str(path))))]
"""A path as a user writes it. `~` becomes the home directory: no shell reads YAML, so nobody else replaces it."""
PathOrName = Annotated[str, AfterValidator(expand_home)]
"""A path as a user writes it, or a name; `~` becomes the home directory."""
DType = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of one value."""
NUMPY_SEEDS, TORCH_SEEDS = 1 << 32, 1 << 64
"""Number of seeds that numpy takes (training on text and mergekit seed numpy), and that torch takes. A pipeline's seed may be
larger."""


class Strict(BaseModel):
    """Base of every config model: it is frozen, unknown keys are refused, and the string under a field documents the field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    GONE: ClassVar[Mapping[str, Any]] = {}
    """Key of an earlier release -> its value that means what this release always does. With this value the key is ignored,
    because run directories of that release contain it; with another value it is refused."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # pydantic's `use_attribute_docstrings` reads the source of every class when it is imported, which is a tenth of the start of
        # each command. Only schemas show these texts.
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in read_field_texts(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        # Done here because pydantic's own error for an unknown key cannot suggest the nearest key.
        if isinstance(data, Mapping):
            data = {key: value for key, value in data.items() if key not in cls.GONE or value != cls.GONE[key]}
            keys = list(cls.model_fields)
            for key in data:
                if key not in keys:
                    raise PydanticCustomError(
                        "unknown_key",
                        "{hint}",
                        {"key": str(key), "hint": suggest_key(str(key), keys), "known": ", ".join(keys)},
                    )
        return data


@cache
def read_field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return field -> the string under it, for the fields of a model and of those that it extends."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                texts.pop(field.target.id, None)  # a field that is defined anew has its own text or none
                if (
                    isinstance(below, ast.Expr)
                    and isinstance(below.value, ast.Constant)
                    and isinstance(below.value.value, str)
                ):
                    texts[field.target.id] = inspect.cleandoc(below.value.value)
    return texts


def text_or_more(value: Any) -> str:
    """Return the tag of a union's member: `~text` for text, else `~more`. An error is then about that member alone."""
    return "~text" if isinstance(value, str) else "~more"


def flag_or_mapping(value: Any) -> str:
    """Return the tag of a union's member: `~mapping` for a mapping, else `~flag`, which is true or false."""
    return "~mapping" if isinstance(value, Mapping) else "~flag"
