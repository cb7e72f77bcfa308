"""Read values out of a request's JSON, and check their types. Each function raises ApiError with the value's path for a wrong one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from opd.records.environments import Tool
from opd.records.json_fields import parse_strict_json
from opd.rollouts.endpoint.messages import make_request_error


def read_mapping(value: Any, path: str) -> Mapping[str, Any]:
    """Return a value that must be an object of JSON."""
    if not isinstance(value, dict):
        raise make_request_error(f"{path}: expected an object, found {_type_name(value)}")
    return value


def read_list(value: Any, path: str) -> list[Any]:
    """Return a value that must be a list; None counts as an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise make_request_error(f"{path}: expected a list, found {_type_name(value)}")
    return value


def read_mappings(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield path and value of each item of a list, which must be objects of JSON; None counts as an empty list."""
    for number, item in enumerate(read_list(value, path)):
        item_path = f"{path}[{number}]"
        yield item_path, read_mapping(item, item_path)


def read_text(value: Any, path: str) -> str:
    """Return a value that must be a text."""
    if not isinstance(value, str):
        raise make_request_error(f"{path}: expected text, found {_type_name(value)}")
    return value


def read_positive_integer(value: Any, path: str) -> int | None:
    """Return a value that must be a whole number of at least 1, or None."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise make_request_error(f"{path}: expected a whole number of at least 1, found {_type_name(value)}")
    return value


def read_content(value: Any, path: str) -> str:
    """Return the text of a message's content, which must be a text, None, or a list of parts of type text."""
    if value is None or isinstance(value, str):
        return value or ""
    texts = []
    for part_path, part in read_mappings(value, path):
        kind = part.get("type")
        if kind != "text":
            raise make_request_error(
                f"{part_path}: expected a part of type text, found {kind!r:.40}: this model reads text only"
            )
        texts.append(read_text(part.get("text"), f"{part_path}.text"))
    return "".join(texts)


def read_arguments(value: Any, path: str) -> Mapping[str, Any]:
    """Return the arguments of a call. OpenAI's form has them as a text that is the JSON of an object."""
    json_text = read_text(value, path)
    try:
        value_read = parse_strict_json(json_text or "{}")
    except (ValueError, RecursionError) as error:
        raise make_request_error(f"{path}: expected the JSON of an object ({error!s:.80})") from None
    return read_mapping(value_read, path)


def read_tool(data: Mapping[str, Any], schema: str, path: str) -> Tool:
    """Read a tool; the JSON schema of its arguments stands under the key `schema`, and may be missing."""
    parameters = data.get(schema)
    return Tool(
        name=read_text(data.get("name"), f"{path}.name"),
        description=read_text(data.get("description") or "", f"{path}.description"),
        **({} if parameters is None else {"parameters": read_mapping(parameters, f"{path}.{schema}")}),
    )


def _type_name(value: Any) -> str:
    """Return the type of a JSON value in words, for numbers and booleans the value itself."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)[:40]
    return {dict: "an object", list: "a list", str: "a text", type(None): "nothing"}.get(type(value), str(value)[:40])
