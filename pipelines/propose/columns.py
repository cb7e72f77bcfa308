"""Find out what a file of prompts calls its columns, from its first rows, before anything large is imported."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from opd.config.prompts import Column, PromptsConfig
from opd.errors import ConfigError, PromptError
from opd.prompts.broken import BrokenRow
from opd.prompts.readers import GZIP_ERRORS, RowLocation, column_names, csv_rows, refuse_large_groups, source_rows
from opd.prompts.sources import Source, find_source, import_datasets

ASKING = (
    *("prompt", "messages", "conversation", "conversations", "dialogue", "dialog", "chat", "turns"),
    *("question", "query", "instruction", "problem", "task", "user", "input", "request", "text"),
)
"""Names of the column that asks, the likeliest first."""
ANSWERING = (
    *(
        "answer",
        "final_answer",
        "expected_answer",
        "correct_answer",
        "ground_truth",
        "expected",
        "gold",
        "target",
        "label",
    ),
    *("solution", "reference", "output", "response", "completion", "result"),
)
"""Names of the column with the right answer, the likeliest first."""
FIRST_ROWS = 20
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names in a file of the columns that a pipeline reads."""

    prompt: str
    answer: str | None
    """None: no column has answers, so nothing can be judged."""
    messages: bool
    """The prompt is a list of messages, not a text."""

    @property
    def renamed(self) -> dict[Column, str]:
        """Our name -> theirs, where they differ."""
        by_name: dict[Column, str | None] = {"prompt": self.prompt, "answer": self.answer}
        return {name: column for name, column in by_name.items() if column is not None and column != name}


def look_at_columns(path: Path, columns: Sequence[str]) -> Columns:
    """The columns of a file; `columns` are the names of prompt and answer, as far as the user said. Raises: OpdError."""
    source = find_source(path)
    names, rows = first_rows(source)
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
        _refuse_two_parts(source, prompt)
    return Columns(
        prompt=prompt,
        answer=columns[1] if len(columns) > 1 else _find_answer_column(names, rows, prompt),
        messages=any(isinstance(row.get(prompt), list) for row in rows),
    )


def _find_prompt_column(path: Path, names: Sequence[str]) -> str:
    column = _first_of(ASKING, names) or (names[0] if len(names) == 1 else None)
    if column is None:
        raise PromptError.at(
            path,
            found=f"the columns {', '.join(names) or '(none)'}",
            wanted=f"one that asks, with a name such as {', '.join(ASKING[:2])}, question, instruction, problem",
            fix="say which one it is: --columns PROMPT, or --columns PROMPT,ANSWER",
        )
    if len(names) == 1 and (";" in column or "\t" in column):  # its cells would have the answers in the prompts
        raise PromptError.at(
            path,
            found=f"the one column {column!r}",
            wanted="a CSV file with commas between its cells",
            fix=f"write it with commas; if that is one column, say so: --columns '{column}'",
        )
    return column


def _find_answer_column(names: Sequence[str], rows: Sequence[Row], prompt: str) -> str | None:
    """The column with answers: texts or numbers."""
    plain = [
        name
        for name in names
        if name != prompt and all(isinstance(r.get(name), str | int | float | None) for r in rows)
    ]
    return _first_of(ANSWERING, plain)


def _first_of(candidates: Sequence[str], names: Sequence[str]) -> str | None:
    by_lower = {name.strip().lower(): name for name in reversed(names)}
    return next((by_lower[name] for name in candidates if name in by_lower), None)


def _refuse_two_parts(source: Source, prompt: str) -> None:
    """Raises: PromptError for an instruction with an input of its own in any row: without that, the prompt would ask nothing."""
    table = column_names(source)
    if prompt.lower() != "instruction" or (table and "input" not in table):
        return
    # As another column it is read from a table, too.
    columns: dict[Column, str | None] = {"prompt": prompt, **({"answer": "input"} if table else {})}
    rows = source_rows(source, PromptsConfig(path=source.files[0], columns=columns))
    first_input = next((location for location, row in rows if isinstance(row, dict) and str(row.get("input") or "").strip()), None)
    if first_input is not None:
        raise PromptError.at(
            first_input,
            found="a prompt in two columns, `instruction` and `input`",
            wanted="what asks in one column",
            fix="write a column `prompt` with both texts; or take one of the two: --columns instruction",
        )


def first_rows(source: Source) -> tuple[list[str], Sequence[Row]]:
    """Names of all columns, and the first rows. Raises: PromptError."""
    import pyarrow as pa

    file = source.files[0]
    try:
        if source.kind == "jsonl":
            rows = [_parse_row(*located_row) for located_row in islice(source_rows(source, PromptsConfig(path=file)), FIRST_ROWS)]
            return list(dict.fromkeys(name for row in rows for name in row)), rows
        if source.kind == "csv":
            return _first_of_csv(file)
        if source.kind == "parquet":
            return _first_of_parquet(file, source.shown[0])
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
    """The row of a JSONL file, if it has columns. Raises: PromptError."""
    if not isinstance(row, dict):
        raise location.make_error(
            BrokenRow(f"a {type(row).__name__}", "write every row as an object on a line of its own")
        )
    return row


def _first_of_csv(file: Path) -> tuple[list[str], Sequence[Row]]:
    rows = csv_rows(file)
    names = next(rows, [])
    return names, [dict(zip(names, row, strict=False)) for row in islice(rows, FIRST_ROWS)]


def _first_of_parquet(file: Path, shown: str) -> tuple[list[str], Sequence[Row]]:
    from pyarrow import parquet

    opened = parquet.ParquetFile(file)
    names = opened.schema_arrow.names
    refuse_large_groups(file, shown, [name for name in names if name.lower() in (*ASKING, *ANSWERING)])
    batch = next(opened.iter_batches(FIRST_ROWS), None)
    return list(names), batch.to_pylist() if batch is not None else []
