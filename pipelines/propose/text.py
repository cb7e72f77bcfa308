"""Write a pipeline as YAML in which every setting says what it is for."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from opd.text import escape_control_characters, to_one_line

WIDTH = 120
SCHEMA_LINE = "# yaml-language-server: $schema="


class Flow(dict[str, Any]):
    """A mapping that is written on one line."""


def render_pipeline(head: list[str], data: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """The file: lines of comment, then the keys, each with the note that `notes` has for its dotted path."""
    shown = [escape_control_characters(line).replace("\n", "\\n") for line in head]  # a path may hold anything
    comments = [line if line.startswith("# ") else f"# {line}".rstrip() for line in shown]
    return "\n".join([*comments, *_render_lines(data, notes, "", 0)]) + "\n"


def _render_lines(data: Mapping[str, Any], notes: Mapping[str, str], path: str, depth: int) -> Iterator[str]:
    pad = "  " * depth
    for key, value in data.items():
        key_path = f"{path}{key}"
        note = to_one_line(notes.get(key_path, ""), 400)
        nested = isinstance(value, Mapping) and bool(value) and not isinstance(value, Flow)
        if nested and not path:
            yield ""
        line = f"{pad}{on_one_line(key)}:" + ("" if nested else f" {on_one_line(value)}")
        if not note:
            yield line
        elif len(line) + len(note) + 4 <= WIDTH:
            yield f"{line}  # {note}"
        else:
            yield from (f"{pad}# {part}" for part in textwrap.wrap(note, WIDTH - len(pad) - 2))
            yield line
        if nested:
            yield from _render_lines(value, notes, f"{key_path}.", depth + 1)


def on_one_line(value: Any) -> str:
    """A value on one line, quoted where YAML would take it for something else."""
    plain = _plain_scalar(value)
    return (
        yaml.safe_dump(plain, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True)
        .removesuffix("...\n")
        .strip()
    )


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_scalar(part) for key, part in value.items()}
    return str(value) if isinstance(value, Path) else value


def schema_line(schema: Path) -> str:
    """The comment by which editors find the schema, which lies beside the pipeline."""
    return f"{SCHEMA_LINE}{schema.name}"
