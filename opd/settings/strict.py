"""What every config model shares: frozen, unknown keys refused with the nearest known one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from opd.settings.near import suggest_key
from opd.text import expand_home

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
UserPath = Annotated[Path, AfterValidator(lambda path: Path(expand_home(str(path))))]
"""A path as a user writes it: `~` is the home directory, as in a shell, which reads no YAML."""
PathOrName = Annotated[str, AfterValidator(expand_home)]
"""The same for what may be a name instead."""
DType = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of one value."""
NUMPY_SEEDS, TORCH_SEEDS = 1 << 32, 1 << 64
"""Number of seeds that numpy takes, which training on text and mergekit seed, and that torch takes; a pipeline's may be larger."""


class Strict(BaseModel):
    """Base of every config model: frozen, no unknown keys, the string under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    GONE: ClassVar[Mapping[str, Any]] = {}
    """Key of an earlier release -> the value under which it says what is always so now. Run directories of that time have it."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        # pydantic's own `extra_forbidden` cannot suggest the nearest key; here the class knows its keys.
        if isinstance(data, Mapping):
            data = {key: value for key, value in data.items() if key not in cls.GONE or value != cls.GONE[key]}
            keys = list(cls.model_fields)
            for key in data:
                if key not in keys:
                    raise PydanticCustomError(
                        "unknown_key",
                        "{hint}",
                        {
                            "key": str(key),
                            "hint": suggest_key(str(key), keys),
                            "known": ", ".join(keys),
                        },
                    )
        return data


def text_or_more(value: Any) -> str:
    """Tell which half of a union a value is meant for, so that an error speaks of that half alone."""
    return "~text" if isinstance(value, str) else "~more"


def flag_or_mapping(value: Any) -> str:
    """Return the same for a value that is true, false, or a mapping of more."""
    return "~mapping" if isinstance(value, Mapping) else "~flag"
