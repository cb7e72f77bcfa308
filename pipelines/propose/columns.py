"""Find the prompt's and the answer's column in a file of prompts, by their names and the first rows, before anything large is
imported."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from opd.config.prompts import Column, PromptsConfig
from opd.errors import ConfigError, PromptError
from opd.prompts.broken_rows import BrokenRow
from opd.prompts.readers import GZIP_ERRORS, RowLocation, column_names, csv_rows, refuse_large_groups, source_rows
from opd.prompts.sources import Source, find_source, import_datasets

PROMPT_NAMES = (
    "prompt", "messages", "conversation", "conversations", "dialogue", "dialog", "chat", "turns", "question", "query",
    "instruction", "problem", "task", "user", "input", "request", "text",
)  # fmt: skip
"""Names in lower case that the prompt's column may have, the likeliest first."""
ANSWER_NAMES = (
    "answer", "final_answer", "expected_answer", "correct_answer", "ground_truth", "expected", "gold", "target", "label",
    "solution", "reference", "output", "response", "completion", "result",
)  # fmt: skip
"""Names in lower case that the column with the right answer may have, the likeliest first."""
FIRST_ROWS = 20
"""Rows that are read to tell texts from messages, and plain answers from other values."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a file that a pipeline reads, by the file's names."""

    prompt: str
    answer: str | None
    """None: no column has answers, so nothing can be judged."""
    messages: bool
    """True if the prompt is a list of messages, False if it is a text."""

    @property
    def renamed(self) -> dict[Column, str]:
        """Our name -> the file's name, where they differ."""
        by_name: dict[Column, str | None] = {"prompt": self.prompt, "answer": self.answer}
        return {name: column for name, column in by_name.items() if column is not None and column != name}


def find_columns(path: Path, columns: Sequence[str]) -> Columns:
    """Return the columns of a file, of several files those of the first.

    `columns` are names that the user gave: none, the prompt's, or the prompt's and the answer's. What was not given is guessed, so
    with one name the answer's column still is. Raises: OpdError.
    """
    source = find_source(path)
    names, rows = _read_first_rows(source)
    for name in columns:
        if name not in names:
            raise ConfigError.at(
                f"--columns {','.join(columns)}",
                found=f"no column `{name}` in {path}",
                wanted=f"one of: {', '.join(names)}",
                fix="correct the name: --columns PROMPT or --columns PROMPT,ANSWER",
            )
    prompt = columns[0] if columns else _find_prompt_column(path, names)
    if not columns:
        _refuse_separate_input(source, prompt)
    return Columns(
        prompt=prompt,
        answer=columns[1] if len(columns) > 1 else _find_answer_column(names, rows, prompt),
        messages=any(isinstance(row.get(prompt), list) for row in rows),
    )


def _find_prompt_column(path: Path, names: Sequence[str]) -> str:
    """Return the column with a known name, or the only column. Raises: PromptError."""
    column = _find_likeliest(PROMPT_NAMES, names) or (names[0] if len(names) == 1 else None)
    if column is None:
        raise PromptError.at(
            path,
            found=f"the columns {', '.join(names) or '(none)'}",
            wanted=f"one that asks, with a name such as {', '.join(PROMPT_NAMES[:2])}, question, instruction, problem",
            fix="say which one it is: --columns PROMPT, or --columns PROMPT,ANSWER",
        )
    # Probably a file separated by `;` or tabs: prompt and answer would be one cell.
    if len(names) == 1 and (";" in column or "\t" in column):
        raise PromptError.at(
            path,
            found=f"the one column {column!r}",
            wanted="a CSV file with commas between its cells",
            fix=f"write it with commas; if that is one column, say so: --columns '{column}'",
        )
    return column


def _find_answer_column(names: Sequence[str], rows: Sequence[Row], prompt: str) -> str | None:
    """Return the column with answers, which are texts or numbers; None if there is none."""
    plain_names = [name for name in names if all(isinstance(r.get(name), str | int | float | None) for r in rows)]
    return _find_likeliest(ANSWER_NAMES, [name for name in plain_names if name != prompt])


def _find_likeliest(candidates: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the column whose name, in whatever case, is the first of the candidates; None if no column has such a name."""
    # The first of two columns that differ in case alone wins: it is put into the dictionary last.
    by_lower = {name.strip().lower(): name for name in reversed(names)}
    return next((by_lower[name] for name in candidates if name in by_lower), None)


def _refuse_separate_input(source: Source, prompt: str) -> None:
    """Refuse a file in Alpaca's form, whose question is in `instruction` and `input` together: the instruction alone would be an
    incomplete prompt. Rows whose input is empty are complete. Raises: PromptError."""
    table = column_names(source)  # empty for JSONL, where each row has its own keys
    input_column = _find_likeliest(("input",), table)
    if prompt.strip().lower() != "instruction" or (table and input_column is None):
        return
    # JSONL's rows come with all their keys, but a table's only with the columns that are named: so its input is named as the answer.
    columns: dict[Column, str | None] = {"prompt": prompt, **({"answer": input_column} if table else {})}
    for location, row in source_rows(source, PromptsConfig(path=source.files[0], columns=columns)):
        name = _find_likeliest(("input",), list(row)) if isinstance(row, dict) else None
        if name is not None and str(row[name] or "").strip():
            raise PromptError.at(
                location,
                found=f"a prompt in two columns, `{prompt}` and `{name}`",
                wanted="what asks in one column",
                fix=f"write a column `prompt` with both texts; or take one of the two: --columns {prompt}",
            )


def _read_first_rows(source: Source) -> tuple[list[str], Sequence[Row]]:
    """Return the names of all columns of the first file, and its first rows. Raises: PromptError."""
    import pyarrow as pa

    file = source.files[0]
    try:
        if source.kind == "jsonl":
            rows = [_parse_row(*row) for row in islice(source_rows(source, PromptsConfig(path=file)), FIRST_ROWS)]
            return list(dict.fromkeys(name for row in rows for name in row)), rows
        if source.kind == "csv":
            return _read_first_csv_rows(file)
        if source.kind == "parquet":
            return _read_first_parquet_rows(file, source.shown[0])
        assert source.directory is not None
        saved = import_datasets().load_from_disk(str(source.directory))
        return list(saved.column_names), saved.select(range(min(FIRST_ROWS, len(saved)))).to_list()
    except (OSError, csv.Error, pa.ArrowException, *GZIP_ERRORS) as error:
        raise PromptError.at(
            source.label,
            found=f"a file that cannot be read: {error}",
            wanted="the format of its ending: .csv with a header, or .parquet",
            fix="write it again, or give a JSONL file",
        ) from None


def _parse_row(location: RowLocation, row: Any) -> Row:
    """Return the row of a JSONL file. Raises: PromptError if it is no object, so that it has no columns."""
    if not isinstance(row, dict):
        raise location.make_error(
            BrokenRow(f"a {type(row).__name__}", "write every row as an object on a line of its own")
        )
    return row


def _read_first_csv_rows(file: Path) -> tuple[list[str], Sequence[Row]]:
    rows = csv_rows(file)
    names = next(rows, [])
    return names, [dict(zip(names, row, strict=False)) for row in islice(rows, FIRST_ROWS)]


def _read_first_parquet_rows(file: Path, shown: str) -> tuple[list[str], Sequence[Row]]:
    from pyarrow import parquet

    opened = parquet.ParquetFile(file)
    names = opened.schema_arrow.names
    # Other columns may have large cells, which a merge does not read.
    refuse_large_groups(file, shown, [name for name in names if name.lower() in (*PROMPT_NAMES, *ANSWER_NAMES)])
    batch = next(opened.iter_batches(FIRST_ROWS), None)
    return list(names), batch.to_pylist() if batch is not None else []
