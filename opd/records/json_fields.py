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
"""Decoder that follows JSON's standard. Python's own also reads NaN and Infinity, and would write them again; other readers refuse them."""


def parse_strict_json(text: str) -> Any:
    """Return the value of a JSON text. Raises: ValueError, also for NaN, Infinity and numbers beyond them; RecursionError."""
    return STRICT.decode(text)


def keep_known_keys(record: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `data` whose keys are fields of the record class. Raises: TypeError if `data` is not a JSON object."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r:.60} where {record.__name__} was expected")
    return {f.name: data[f.name] for f in fields(record) if f.name in data}


def get_mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key, empty if there is none. Raises: TypeError if something else is there."""
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r:.60} under {key} where a mapping was expected")
    return value


def check_types(record: T) -> T:
    """Return a dataclass that was read from JSON, after every value in it, at any depth, was converted to the type of its field.

    Raises: TypeError, which names the first field whose value cannot be converted.
    """
    kind: Any = type(record)
    try:
        checked: T = _type_adapter(kind).validate_python(asdict(cast(Any, record)))
    except ValidationError as error:
        first_error = error.errors()[0]
        path = ".".join(map(str, first_error["loc"]))
        raise TypeError(f"{path} is {first_error['input']!r:.60}: {first_error['msg'].lower()}") from None
    return checked


@cache
def _type_adapter(record: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(record)
