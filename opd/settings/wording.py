"""Pydantic's errors in plain English: what a field wants, in words for the user who wrote the file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opd.settings.suggestions import find_nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

LABEL = r"^([A-Za-z0-9][A-Za-z0-9.-]*/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
"""Pattern for the name of a label on a Ray node."""
SELECTED = r"^!?([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?|in\([A-Za-z0-9][A-Za-z0-9_.-]*(, ?[A-Za-z0-9][A-Za-z0-9_.-]*)*\))$"
"""Pattern for what a label selector of Ray asks of a label's value."""
FORMS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "1 to 64 of A-Z a-z 0-9 . _ -, first a letter or digit",
    r"^(vllm|transformers|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$": "vllm, transformers, or a class of yours as module:Class",
    r"^([a-z][a-z0-9_]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$": "a name of `opd environments list`, or a class of yours as module:Class",
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$": "a function of yours as module:function",
    r"^\w[\w.]*$": "the name of a module, such as q_proj",
    LABEL: "a label's name, such as pool or example.com/pool",
    SELECTED: "a label's value, such as teachers, !teachers or in(a, b)",
    r"^\s*(\d*\.?\d+)\s*(\w+)?": "a size such as 512MiB or 8GiB",
    r"^[A-Z]{2,26}$": "2 to 26 capital letters, such as ABCD",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "a variable's name, such as API_KEY",
    r"^[A-Za-z_][A-Za-z0-9_]{0,63}$": "a tool's name, 1 to 64 letters, digits and underscores, first no digit",
}
"""Pattern of a field -> what the field wants, in words."""

WANTED = {
    "missing": "a value: the key has no default",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "bytes_too_short": "more bytes",
    "byte_size": "a size such as 512MiB or 8GiB",
    "byte_size_unit": "a size such as 512MiB or 8GiB",
    "date_from_datetime_parsing": "a day such as 2026-11-20",
    "date_parsing": "a day such as 2026-11-20",
    "date_type": "a day such as 2026-11-20",
    "dict_type": "a mapping of keys",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "mapping_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "none_required": "nothing",
    "path_type": "a path, as text",
    "string_sub_type": "text",
    "string_type": "text",
    "string_unicode": "text",
    "tuple_type": "a list",
}
"""Type of pydantic's error -> what the field wants, in words."""

_BOUNDS = {
    "greater_than": ("gt", "above {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "below {}"),
    "less_than_equal": ("le", "at most {}"),
    "multiple_of": ("multiple_of", "a multiple of {}"),
    "too_short": ("min_length", "entries, at least {}"),
    "too_long": ("max_length", "entries, at most {}"),
    "string_too_short": ("min_length", "text of {} or more characters"),
    "string_too_long": ("max_length", "text of at most {} characters"),
}
"""Type of pydantic's error -> name of the bound in the error's context, and the words around the bound."""


def describe_wanted(error: ErrorDetails) -> str:
    """Describe what the field wants instead of the value it has. The message of our own errors is that description already."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in WANTED:
        return WANTED[kind]
    if kind in _BOUNDS:
        name, template = _BOUNDS[kind]
        return template.format(f"{context[name]:g}" if isinstance(context[name], float) else context[name])
    if kind == "string_pattern_mismatch":
        return FORMS.get(context["pattern"], f"text that the regular expression {context['pattern']} matches")
    if kind in ("literal_error", "enum"):
        return _describe_choices(error["input"], str(context["expected"]))
    return re.sub(r"^(Value error|Assertion failed), |^Input should be (a valid )?", "", error["msg"])


def describe_error(error: ErrorDetails) -> str:
    """Describe what was found and what is wanted in one phrase, for callers that name the place themselves."""
    if error["type"] in ("missing", "json_invalid"):
        return "no value" if error["type"] == "missing" else error["msg"]
    return f"{error['input']!r:.60}, not {describe_wanted(error)}"


def describe_alternatives(errors: Sequence[ErrorDetails]) -> str:
    """Describe what is wanted where any of several forms would do; `errors` has one error for each form."""
    return " or ".join(dict.fromkeys(describe_wanted(error) for error in errors))


def has_key(data: Any, key: int | str) -> bool:
    """Return True if the value is a mapping with this key, or a list with this index."""
    if isinstance(data, Mapping):
        return key in data
    return isinstance(data, list | tuple) and isinstance(key, int) and key < len(data)


def _describe_choices(value: Any, expected: str) -> str:
    """Return the choices in words, with the one nearest to `value`. `expected` is pydantic's list: 'a', 'b' or 'c'."""
    names = re.findall(r"'([^']*)'", expected)
    if not names or ", ".join(map(repr, names)) != expected.replace(" or ", ", "):
        return expected  # numbers, true and false are listed without quotes
    if len(names) == 1:
        return names[0]
    near = find_nearest(value, names) if isinstance(value, str) else None
    return (f"did you mean `{near}`? " if near else "") + f"one of: {', '.join(names)}"
