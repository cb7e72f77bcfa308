"""Values and JSON schemas: whether one fits the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def problem_with(value: Any, schema: Mapping[str, Any], path: str) -> str:
    """Return why a value does not fit a JSON schema, empty if it does. Knows `type`, `enum`, `properties`, `required`,
    `additionalProperties` (by default false beside `properties`) and `items`; other words of a schema, and these in a
    form that JSON schema does not know, are for the policy."""
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else _collect(kind, str)
    if kinds and not any(fits_type(value, kind) for kind in kinds):
        return f"{path} is {value!r:.60}, wanted {' or '.join(kinds)}"
    choices = schema.get("enum")
    if isinstance(choices, list | tuple) and value not in choices:
        return f"{path} is {value!r:.60}, wanted one of {', '.join(map(str, choices))}"
    if isinstance(value, dict):
        return _problem_inside(value, schema, path)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        problems = (problem_with(item, schema["items"], f"{path}[{i}]") for i, item in enumerate(value))
        return next((problem for problem in problems if problem), "")
    return ""


def _problem_inside(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str:
    properties = schema_properties(schema)
    missing = [key for key in _collect(schema.get("required"), str) if key not in value]
    if missing:
        return f"{path} lacks {missing[0]}"
    strange = [key for key in value if key not in properties]
    if strange and schema.get("additionalProperties", not properties) is False:
        return f"{path} has {strange[0]!r:.60}, which is none of {', '.join(properties) or 'no arguments'}"
    problems = (problem_with(value[key], properties[key], f"{path}.{key}") for key in value if key in properties)
    return next((problem for problem in problems if problem), "")


def schema_properties(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the schema of each property by name; a schema that is no object, such as `true`, takes anything."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: inner if isinstance(inner, Mapping) else {} for name, inner in properties.items()}


def list_schema_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names: by `type`, by the values of `enum`, or in one of its alternatives; empty if none."""
    kind, choices = schema.get("type"), schema.get("enum")
    if kind is not None:
        return {kind} if isinstance(kind, str) else set(_collect(kind, str))
    if isinstance(choices, list | tuple):
        return {kind for kind in _TYPES for choice in choices if fits_type(choice, kind)}
    alternatives = [inner for word in ("anyOf", "oneOf", "allOf") for inner in _collect(schema.get(word), Mapping)]
    return {kind for alternative in alternatives for kind in list_schema_types(alternative)}


def fits_type(value: Any, kind: str) -> bool:
    """Return True if a value is of a type of JSON schema."""
    if isinstance(value, bool):  # Python's True is an int, JSON's is not
        return kind == "boolean"
    return kind in _TYPES and isinstance(value, _TYPES[kind])


def _collect(value: Any, kind: type) -> list[Any]:
    """Return the members of this type of a list; none of what is no list."""
    return [member for member in value if isinstance(member, kind)] if isinstance(value, list | tuple) else []
