"""Reading records back from JSON that another release, or another program, may have written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.20} is too large")
    return value


STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
"""Reads JSON as its standard has it: Python's own also takes NaN and Infinity, and writes them again, which other readers refuse."""


def strict_json(text: str) -> Any:
    """Return the value of a JSON text. Raises: ValueError, also for NaN, Infinity and numbers beyond them; RecursionError."""
    return STRICT.decode(text)


def known(record: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the record class has. Raises: TypeError if `data` is not a JSON object."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r:.60} where {record.__name__} was expected")
    return {f.name: data[f.name] for f in fields(record) if f.name in data}


def mapping_under(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping under a key, empty if there is none. Raises: TypeError if something else is there."""
    found = data.get(key, {})
    if not isinstance(found, Mapping):
        raise TypeError(f"{found!r:.60} under {key} where a mapping was expected")
    return found
