"""Reading records back from JSON that another release, or another program, may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


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
