"""Texts of a pipeline in which jinja2 fills in columns of a prompt's row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opd.config.teacher_prompts import ROW, list_row_columns


class _Row:
    """A row as such texts see it: without methods, so that every name is a column."""

    __slots__ = ("_columns",)

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]


class RowTemplate:
    """One such text."""

    def __init__(self, text: str) -> None:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        self._template = environment.from_string(text)
        self._columns = list_row_columns(text)

    def find_missing(self, values: Mapping[str, Any]) -> str | None:
        """Return the first column that the text reads and the row lacks; None if it has all."""
        return next((name for name in self._columns if name not in values), None)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text for a row with these columns. Raises: jinja2's TemplateError."""
        return self._template.render({ROW: _Row(values)})
