"""Files of settings: YAML of limited size, the overrides of `--set`, and pydantic's errors in words for users.

An error names the key, what was found, what is wanted and how to fix it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from opd.errors import ConfigError
from opd.settings.suggestions import find_nearest, suggest_key_elsewhere
from opd.settings.wording import describe_alternatives, describe_wanted, has_key

MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key `<<`."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A loader of safe YAML that refuses a key given twice. PyYAML's own would silently take the last value.

    It checks each mapping as the file spells it, before `<<: *defaults` adds keys of another mapping: the mapping's own keys
    may replace these.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = MERGE if key_node.tag == MERGE else self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"key {key} is no name", key_node.start_mark)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is given twice", key_node.start_mark)
            keys.add(key)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make the value of a node.

        Raises: ConstructorError for a value that its tag does not allow; PyYAML would raise any of several Python errors.
        """
        try:
            return super().construct_object(node, deep)
        except (KeyError, IndexError, AttributeError, ValueError, OverflowError) as error:
            reason = f": {error}" if isinstance(error, ValueError) else ""
            problem = f"{node.value!r:.60} is no {node.tag.rpartition(':')[2]}{reason}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Add the keys of `<<` to a mapping; keys that stand beside `<<` win.

        PyYAML's own method takes the wrong value if a merged mapping has replaced a key of a mapping that it merges itself.
        """
        beside = {self.construct_object(k, deep=True): (k, v) for k, v in node.value if k.tag != MERGE}
        merged: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag != MERGE:
                continue
            for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if not isinstance(source, yaml.MappingNode):
                    raise yaml.constructor.ConstructorError(None, None, "`<<` merges mappings alone", source.start_mark)
                self.flatten_mapping(source)
                merged = {self.construct_object(k, deep=True): (k, v) for k, v in source.value} | merged
        node.value = list((merged | beside).values())


MAX_YAML_BYTES = 1 << 20
"""Most characters of a file."""
MAX_YAML_NODES = 100_000
"""Most keys and values of a file. The values behind an alias count each time that it is used: a small file with ten aliases
of ten aliases of ten ... would not fit into memory."""
MAX_YAML_DEPTH = 32


def parse_yaml(text: str) -> Any:
    """Return the value of one YAML document. Raises: ValueError if it is too large or too deep; yaml.YAMLError."""
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"{len(text):,} characters, at most {MAX_YAML_BYTES:,} are read")
    _refuse_too_many_nodes(yaml.parse(text, Loader=yaml.SafeLoader))
    return yaml.load(text, Loader=_UniqueKeyLoader)


def _refuse_too_many_nodes(events: Iterable[yaml.Event]) -> None:
    """Refuse a file that would have too many values once its aliases are resolved, or too many levels. Raises: ValueError.

    The parser's events are counted, before any alias is resolved. There are no more events than characters.
    """
    sizes: dict[str, int] = {}  # anchor -> values of its node
    open_nodes: list[tuple[str | None, int]] = []  # anchor of each open mapping or list, and the values before it
    total = 0
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, start = open_nodes.pop()
            if anchor is not None:
                sizes[anchor] = total - start
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
            wanted="a YAML file",
            fix="check the path; it is relative to the current directory",
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or too much
        position, problem = _locate_yaml_problem(error)
        raise ConfigError.at(
            f"{path}{position}",
            found=problem,
            wanted="one YAML mapping",
            fix="correct that line" if position else "correct the file",
        ) from None
    if not isinstance(data, dict):
        raise ConfigError.at(
            path,
            found="nothing" if data is None else f"a {type(data).__name__}",
            wanted="a mapping of keys: lines such as `name: value`",
            fix="write keys; `opd pipelines show quickstart` shows how a pipeline looks, docs/guard.md how rules look",
        )
    return data


def no_such_yaml_error(path: Path, shipped: Iterable[str], kind: str, otherwise: str) -> ConfigError:
    """Return the error about a name that is neither a file nor one of the `shipped` names.

    It suggests the nearest of the shipped names and of the YAML files in the same directory; `kind` says what is shipped.
    """
    names = {name: name for name in shipped}
    files = {file.stem: str(file) for file in path.parent.glob("*.y*ml")} if path.parent.is_dir() else {}
    near = find_nearest(path.stem, [*names, *files])
    return ConfigError.at(
        path,
        found="no such file",
        wanted=f"a YAML file, or {kind}: {', '.join(names)}",
        fix=otherwise if near is None else f"did you mean `{(names | files)[near]}`? {otherwise}",
    )


def _locate_yaml_problem(error: Exception) -> tuple[str, str]:
    """Return where an error is (line and column as text, empty if not known) and what was found there."""
    if isinstance(error, OSError):
        return "", error.strerror or str(error)
    if isinstance(error, yaml.reader.ReaderError):
        return "", f"a character that YAML does not allow, {chr(int(error.character))!r} at position {error.position:,}"
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return "", str(error)
    problem = (error.problem or "").replace("could not determine a constructor for", "only plain YAML is read, not")
    since = error.context_mark
    begins = f", {error.context} that begins in line {since.line + 1}" if error.context and since else ""
    snippet = (mark.get_snippet(indent=0) or "").rstrip()
    excerpt = f"\n{snippet}" if snippet.strip(" ^\n") else ""
    return f": line {mark.line + 1}, column {mark.column + 1}", f"{problem}{begins}{excerpt}"


def apply_overrides(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return a copy of `data` with each `a.b=value` set; the value is parsed as YAML.

    Raises: ConfigError for an override without `=`, for a path through something that is not a mapping, or for a value that
    is not YAML.
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
                f"--set {item}", found=_locate_yaml_problem(error)[1], wanted="a YAML value", fix="quote the value"
            ) from None
    return data


def validate_section(model: type[M], data: Mapping[str, Any], source: object) -> M:
    """Check `data` against `model`; `source` names the file in messages.

    Raises: ConfigError naming the first offending key, what was found and what is wanted.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain_error(error.errors(), model, data, source) from None


_TAG = re.compile(r"(bool|int|float|str|none)$|(list|dict|tuple|literal|function-\w+|constrained-\w+)\b.*\[.*")
"""Matches names that pydantic gives to the members of a union, and puts among the keys of an error."""


def find_error_keys(error: ErrorDetails, data: Any = None) -> list[str]:
    """Return the keys that lead to the error in the user's data.

    pydantic puts names of a union's members among them: its own, and our tags that begin with `~`. The user did not write
    these, so they are left out.
    """
    context = error.get("ctx", {})
    if "where" in context:
        return [context["where"]]
    keys = []
    for part in error["loc"]:
        if str(part).startswith("~") or part == "[key]":
            continue
        if has_key(data, part):
            data = data[part]
        elif _TAG.match(str(part)) and error["type"] != "missing":
            continue
        keys.append(str(part))
    return keys


def describe_found(error: ErrorDetails) -> str:
    """Return the value that the user gave, as messages show it."""
    return str(error.get("ctx", {}).get("found", "nothing" if error["type"] == "missing" else repr(error["input"])))


def move_error(errors: ValidationError, above: Sequence[str], data: Any) -> PydanticCustomError:
    """Return the first error about a part of a file as an error about the whole file. The part lies at the keys `above`."""
    error = errors.errors()[0]
    key = ".".join([*above, *find_error_keys(error, data)])
    moved_context = {"wanted": describe_wanted(error), "found": describe_found(error), "where": key}
    return PydanticCustomError(error["type"], "{wanted}", {**error.get("ctx", {}), **moved_context})


def iterate_keys(model: type[BaseModel], above: str = "", within: tuple[type[BaseModel], ...] = ()) -> Iterator[str]:
    """Yield all keys of a file, written from the top with dots. A key that the user chooses is written as NAME.

    `within`: the sections around `model`, whose keys are not yielded again.
    """
    for name, field in model.model_fields.items():
        yield above + name
        for section, keyed in _find_sections(field.annotation):
            if section not in within:
                yield from iterate_keys(section, f"{above}{name}.{'NAME.' if keyed else ''}", (*within, section))


def _find_sections(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yield each model in a field's annotation, with True if it is the value of a mapping whose keys the user chooses."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    keyed = getattr(annotation, "__origin__", None) is dict
    for part in get_args(annotation):
        for section, _ in _find_sections(part):
            yield section, keyed


def _explain_error(errors: Sequence[ErrorDetails], model: type[BaseModel], data: Any, source: object) -> ConfigError:
    error = errors[0]
    keys = find_error_keys(error, data)
    context = error.get("ctx", {})
    if isinstance(context.get("error"), ConfigError):  # a validator raised it, with all its words
        return ConfigError(f"{source}: {context['error']}")
    if error["type"] == "unknown_key":
        key = ".".join([*keys, context["key"]])
        hint = error["msg"] if error["msg"] != "remove the key" else None
        return ConfigError.at(
            f"{source}: {key}",
            found="an unknown key",
            wanted=f"one of: {context['known']}",
            fix=hint or suggest_key_elsewhere(context["key"], iterate_keys(model)) or "remove the key",
        )
    key = ".".join(keys) or "the file as a whole"
    same_key_errors = [other for other in errors if other["type"] != "missing" and find_error_keys(other, data) == keys]
    # Several errors about the same value come from the members of a union; any of their forms would do.
    in_union = len(same_key_errors) > 1 and error["input"] is same_key_errors[1]["input"]
    return ConfigError.at(
        f"{source}: {key}",
        found=describe_found(error),
        wanted=describe_alternatives(same_key_errors) if in_union else describe_wanted(error),
        fix="`opd pipelines schema` lists every key with its type",
    )
