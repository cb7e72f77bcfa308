"""Files of settings: YAML of bounded size, `--set`, and pydantic's errors in the user's words.

An error names the key, what was found, what is wanted and the way out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from opd.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, which plain YAML silently resolves to the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"key {key} is no name", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


MAX_YAML_BYTES = 1 << 20
MAX_YAML_NODES = 100_000
"""Most keys and values of a file. Values behind an alias count each time: ten aliases of ten aliases of ten ... make a small
file that does not fit into memory."""
MAX_YAML_DEPTH = 32


def parse_yaml(text: str) -> Any:
    """The value of one YAML document, of bounded size. Raises: ValueError, yaml.YAMLError."""
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"{len(text):,} characters, at most {MAX_YAML_BYTES:,} are read")
    _bound_nodes(yaml.parse(text, Loader=yaml.SafeLoader))
    return yaml.load(text, Loader=_UniqueKeyLoader)


def _bound_nodes(events: Iterable[yaml.Event]) -> None:
    """Count the values that a file would have once its aliases are resolved, and refuse too many. Raises: ValueError.

    The parser's events are counted, which resolves nothing yet: there are no more events than characters.
    """
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and nodes before it
    total = 0
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = total - before
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in {anchor for anchor, _ in open_nodes}:
                    raise ValueError(f"*{event.anchor} lies in what it names")
                total += sizes.get(str(event.anchor), 1)
            else:
                total += 1
                if event.anchor is not None:
                    sizes[event.anchor] = 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total - 1))
            if len(open_nodes) > MAX_YAML_DEPTH:
                raise ValueError(f"nested deeper than {MAX_YAML_DEPTH} levels")
            if total > MAX_YAML_NODES:
                raise ValueError(f"more than {MAX_YAML_NODES:,} values, aliases written out")


M = TypeVar("M", bound=BaseModel)


def load_yaml(path: Path) -> dict[str, Any]:
    """Parse one YAML mapping.

    Raises: ConfigError if the file is missing, is not YAML, repeats a key or is not a mapping.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError.at(
            path,
            found="no such file",
            wanted="a YAML file or a shipped pipeline",
            fix="`opd pipelines list` names the shipped ones",
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8, too much, or a date like 2024-99-99
        raise ConfigError.at(
            path, found=str(error), wanted="one YAML mapping", fix="correct the file at that line"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError.at(
            path,
            found=f"{type(data).__name__}",
            wanted="a mapping of keys",
            fix="start from `opd pipelines show quickstart`",
        )
    return data


def apply_overrides(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return `data` with each `a.b=value` set; the value is read as YAML.

    Raises: ConfigError for an override without `=` or a path through something that is not a mapping.
    """
    data = {k: dict(v) if isinstance(v, dict) else v for k, v in data.items()}
    for item in overrides:
        path, eq, text = item.partition("=")
        keys = path.strip().split(".")
        if not eq or not all(keys):
            raise ConfigError.at(
                f"--set {item}",
                found="no key=value",
                wanted="--set section.key=value",
                fix="for example --set trainer.steps=10",
            )
        node = data
        for key in keys[:-1]:
            child = node.get(key, {})
            if not isinstance(child, dict):
                raise ConfigError.at(
                    f"--set {item}", found=f"`{key}` is {child!r}", wanted="a mapping", fix="set the whole key"
                )
            node[key] = node = dict(child)  # a copy: the caller's data must not change
        try:
            node[keys[-1]] = parse_yaml(text)
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError.at(
                f"--set {item}", found=str(error), wanted="a YAML value", fix="quote the value"
            ) from None
    return data


def validate(model: type[M], data: Mapping[str, Any], source: object) -> M:
    """Check `data` against `model`; `source` names the file in messages.

    Raises: ConfigError naming the first offending key, what was found and what is wanted.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(error.errors()[0], source) from None


def keys_of(error: ErrorDetails) -> list[str]:
    """The keys that lead to the error. The tags of our unions (~) are left out, because the user did not write them."""
    context = error.get("ctx", {})
    if "where" in context:
        return [context["where"]]
    return [str(k) for k in error["loc"] if not str(k).startswith("~") and k != "[key]"]


def found_in(error: ErrorDetails) -> str:
    """The value that the user gave, as messages show it."""
    return str(error.get("ctx", {}).get("found", "nothing" if error["type"] == "missing" else repr(error["input"])))


def _explain(error: ErrorDetails, source: object) -> ConfigError:
    keys = keys_of(error)
    context = error.get("ctx", {})
    if isinstance(context.get("error"), ConfigError):  # the code that found it has worded it already
        return ConfigError(f"{source}: {context['error']}")
    if error["type"] == "unknown_key":
        where = ".".join([*keys, context["key"]])
        message = ConfigError.at(
            f"{source}: {where}", found="an unknown key", wanted=f"one of: {context['known']}", fix=error["msg"]
        )
    else:
        where = ".".join(keys) or "the file as a whole"
        message = ConfigError.at(
            f"{source}: {where}",
            found=found_in(error),
            wanted=error["msg"],
            fix="`opd pipelines schema` lists every key with its type",
        )
    return message
