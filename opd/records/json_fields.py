"""Reading records back from JSON that another release, or another program, may have written."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any, TypeVar

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


def parse_json_or_none(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def make_record(record: type[T], data: Any) -> T:
    """Make a dataclass of the parsed JSON of `dataclasses.asdict`, with every value, at any depth, converted to the type of its field.

    Keys of a newer release are ignored. Raises: TypeError, which names the first field whose value cannot be converted.
    """
    kind: Any = record  # to mypy, `type[T]` cannot be hashed
    try:
        made: T = _type_adapter(kind).validate_python(data)
    except ValidationError as error:
        first_error = error.errors()[0]
        path = ".".join(map(str, first_error["loc"])) or record.__name__
        if first_error["type"] == "missing":
            raise TypeError(f"'{path}' is missing") from None
        raise TypeError(f"{path} is {first_error['input']!r:.60}: {first_error['msg'].lower()}") from None
    return made


@cache
def _type_adapter(record: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(record)
