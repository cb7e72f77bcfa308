"""Reading records back from JSON that another release, or another program, may have written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _refuse_infinite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.20} is too large")
    return value


STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_refuse_infinite)
"""Reads JSON as its standard has it: Python's own also takes NaN and Infinity, and writes them again, which other readers refuse."""


def strict_json(text: str) -> Any:
    """Return the value of a JSON text. Raises: ValueError, also for NaN, Infinity and numbers beyond them; RecursionError."""
    return STRICT.decode(text)


def keep_known_keys(record: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the record class has. Raises: TypeError if `data` is not a JSON object."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r:.60} where {record.__name__} was expected")
    return {f.name: data[f.name] for f in fields(record) if f.name in data}


def mapping_under(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key, empty if there is none. Raises: TypeError if something else is there."""
    found = data.get(key, {})
    if not isinstance(found, Mapping):
        raise TypeError(f"{found!r:.60} under {key} where a mapping was expected")
    return found


def check_types(record: T) -> T:
    """Return a dataclass that was read from JSON with every value in it, at any depth, of the type of its field.

    Raises: TypeError that names the first field whose value cannot be that.
    """
    kind: Any = type(record)
    try:
        found: T = _type_adapter(kind).validate_python(asdict(cast(Any, record)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TypeError(f"{where} is {first['input']!r:.60}: {first['msg'].lower()}") from None
    return found


@cache
def _type_adapter(record: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(record)
