"""Render a pipeline as YAML in which a comment beside each setting says what it is for."""

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
    """Return the text of the file: the lines of `head` as comments, then the keys of `data`. `notes` has the comment of each key, by its
    dotted path."""
    # A path in these lines may hold any character, even one that would end the comment.
    lines = [escape_control_characters(line).replace("\n", "\\n") for line in head]
    comments = [line if line.startswith("# ") else f"# {line}".rstrip() for line in lines]
    return "\n".join([*comments, *_render_lines(data, notes, "", 0)]) + "\n"


def _render_lines(data: Mapping[str, Any], notes: Mapping[str, str], path: str, depth: int) -> Iterator[str]:
    pad = "  " * depth
    for key, value in data.items():
        key_path = f"{path}{key}"
        note = to_one_line(notes.get(key_path, ""), 400)
        nested = isinstance(value, Mapping) and bool(value) and not isinstance(value, Flow)
        if nested and not path:  # a blank line before each section
            yield ""
        line = f"{pad}{render_on_one_line(key)}:" + ("" if nested else f" {render_on_one_line(value)}")
        if not note:
            yield line
        elif len(line) + len(note) + 4 <= WIDTH:
            yield f"{line}  # {note}"
        else:
            yield from (f"{pad}# {part}" for part in textwrap.wrap(note, WIDTH - len(pad) - 2))
            yield line
        if nested:
            yield from _render_lines(value, notes, f"{key_path}.", depth + 1)


def render_on_one_line(value: Any) -> str:
    """Return a value as YAML on one line, quoted where YAML would take it for something else."""
    plain = _with_paths_as_text(value)
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _with_paths_as_text(value: Any) -> Any:
    """Return the value with paths as text and mappings as plain dictionaries, at any depth: `yaml.safe_dump` knows no others."""
    if isinstance(value, Mapping):
        return {key: _with_paths_as_text(part) for key, part in value.items()}
    return str(value) if isinstance(value, Path) else value


def make_schema_line(schema: Path) -> str:
    """Make the comment by which editors find the schema, which lies beside the pipeline."""
    return f"{SCHEMA_LINE}{schema.name}"
