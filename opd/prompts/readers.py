"""Read the rows of a source one after the other, each with its place for error messages.

The library `datasets` reads CSV, Parquet and saved data sets for us, in batches. JSONL we read ourselves. The library guesses
a column's type from blocks of 10 MB, so a row would depend on its neighbours (`{"a": 1}` becomes `{"a": 1, "b": None}`), and
it cannot say which line is broken.
"""

from __future__ import annotations

import codecs
import csv
import glob
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from opd.config.prompts import PromptsConfig
from opd.errors import PromptError
from opd.prompts.broken_rows import BrokenRow
from opd.prompts.line import COLUMNS, FORM, MAX_LINE_BYTES, PARSER, no_column, parse_json_line
from opd.prompts.sources import Source, find_file_kind, import_datasets, open_unpacked, quiet_datasets

BATCH_ROWS = 1024
ARRAY_CHARACTERS = 1 << 20
"""Characters of a JSON array that are read at once."""
GZIP_ERRORS = (EOFError, zlib.error)
"""Errors that a damaged gzip file raises, besides OSError."""
csv.field_size_limit(MAX_LINE_BYTES)  # Python's own limit is 128 KiB


class RowLocation(NamedTuple):
    """The place of a row, as messages show it."""

    file: str
    number: int
    """Number, from 1, of the line of a JSONL file or of the row of any other file. The header of a CSV file is not a row."""
    line: bool
    """True if `number` is that of a line."""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.line else f"{self.file}, row {self.number}"

    def make_error(self, problem: BrokenRow) -> PromptError:
        """Return the error about this row that the user sees."""
        return problem.make_error(str(self), wanted=f"{'one JSON object' if self.line else 'a row'} with {FORM}")


Row = tuple[RowLocation, Any]
"""A place, and the row's columns by the data set's names (for JSONL the line's value, whatever it is). The second is None if
the filter drops the row."""
Clean = Callable[[dict[str, Any], str], dict[str, Any]]
"""Converts a row of a table to what JSONL would hold; it gets the row and the name of the prompt's column."""


def source_rows(source: Source, config: PromptsConfig) -> Iterator[Row]:
    """Yield every row of every file, one at a time. Raises: PromptError."""
    if source.kind == "saved":
        assert source.directory is not None
        batches = _read_saved_dataset(source.directory, config)
        yield from _read_tables(str(source.directory), batches, _from_table, config)
        return
    for file, shown in zip(source.files, source.shown, strict=True):
        if source.kind == "jsonl":
            for location, row in _json_rows(file, shown):
                is_kept = passes_filter(row, config, text=False)
                yield location, _from_json(row, config.prompt_column) if is_kept else None
        elif source.kind == "csv":
            yield from _read_tables(shown, _read_csv(file, shown, config), _from_text, config)
        else:
            yield from _read_tables(shown, _parquet_tables(file, shown, config), _from_table, config)


def passes_filter(row: Any, config: PromptsConfig, *, text: bool) -> bool:
    """Return True if the pipeline's filter keeps the row. `text`: whether all cells of the data set are text."""
    rule = config.filter
    if rule is None:
        return True
    allowed = [rule.equals] if rule.one_of is None else rule.one_of
    cell = row.get(rule.column) if isinstance(row, dict) else None
    if text:
        return cell in [value if isinstance(value, str) else json.dumps(value) for value in allowed]
    # Python's True equals 1, but for a data set they are different values.
    return any(cell == value and isinstance(cell, bool) == isinstance(value, bool) for value in allowed)


# JSONL


def _json_rows(file: Path, shown: str) -> Iterator[Row]:
    """Yield the rows of a JSONL file, or of a file that is one JSON array. Raises: PromptError."""
    try:
        with open_unpacked(file) as stream:
            if stream.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                stream.seek(0)
            start = stream.tell()
            is_array = _is_array(stream.read(1 << 16))
            stream.seek(start)
            yield from _array_rows(stream, shown) if is_array else _json_lines(stream, shown)
    except (OSError, *GZIP_ERRORS) as error:
        raise _make_unreadable_error(shown, error) from None


def _is_array(start: bytes) -> bool:
    """Return True if a file begins like an array of objects. A file that begins in any other way is read as JSONL."""
    text = start.lstrip()
    return text.startswith(b"[") and text[1:].lstrip()[:1] in (b"{", b"]", b"")


def _array_rows(stream: IO[bytes], shown: str) -> Iterator[Row]:
    """Yield the values of one JSON array; only a part of it is in memory at a time. Raises: PromptError naming the row."""
    text, number, at_end = "", 0, False
    decoded = codecs.getreader("utf-8")(stream)
    while True:
        location = RowLocation(shown, number + 1, line=False)
        text = text.lstrip(" \t\r\n," if number else " \t\r\n[")  # what stands before the next value
        if text.startswith("]"):
            return
        try:
            row, end = PARSER.raw_decode(text)
        except (RecursionError, ValueError) as error:
            # The value may just be incomplete: read on, unless the file has ended or the value is too long.
            if at_end or len(text) > MAX_LINE_BYTES:
                fault = f"JSON that cannot be read: {error}" if at_end else f"a row of more than {len(text):,} bytes"
                raise location.make_error(
                    BrokenRow(fault, "correct this array, or make lines of it: jq -c '.[]'")
                ) from None
            try:
                chunk = decoded.read(ARRAY_CHARACTERS)
            except UnicodeDecodeError as wrong:
                fault = f"bytes that are not UTF-8: {wrong.reason}"
                raise location.make_error(BrokenRow(fault, "convert the file to UTF-8")) from None
            text, at_end = text + chunk, not chunk
            continue
        number, text = number + 1, text[end:]
        yield location, row


def _json_lines(stream: IO[bytes], shown: str) -> Iterator[Row]:
    """Yield the rows of a JSONL file. CRLF and blank lines are accepted. Raises: PromptError."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 2):  # 2 for CRLF
        number += 1
        location = RowLocation(shown, number, line=True)
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        if len(body) > MAX_LINE_BYTES:
            length = len(line) if line.endswith(b"\n") else len(line) + _skip_line(stream)
            raise location.make_error(
                BrokenRow(f"a line of {length:,} bytes", "is it JSONL, one object a line? Split or delete this line")
            )
        if body.strip():
            try:
                yield location, parse_json_line(body)
            except BrokenRow as problem:
                raise location.make_error(problem) from None


def _skip_line(stream: Any) -> int:
    """Read to the end of the line, and return the number of bytes."""
    total = 0
    while part := stream.readline(MAX_LINE_BYTES):
        total += len(part.removesuffix(b"\n"))
        if part.endswith(b"\n"):
            break
    return total


def _from_json(row: Any, prompt: str) -> Any:
    """Return a row of JSONL without null columns, and without null keys of chat messages.

    `datasets` writes such nulls when it exports JSONL, and nulls of tables are dropped too. A null `role` or `content` stays,
    so that the error about the message names this key.
    """
    if not isinstance(row, dict):
        return row
    return {name: _drop_empty_keys(value, ("role", "content")) for name, value in _without_empty(row, prompt).items()}


def _without_empty(row: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Return the row without columns that are null, or NaN, which pandas writes for null. The prompt's column stays."""
    return {name: value for name, value in row.items() if name == prompt or not _is_missing(value)}


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


# Tables, by `datasets`


def _read_tables(shown: str, batches: Iterator[Any], clean: Clean, config: PromptsConfig) -> Iterator[Row]:
    """Yield the rows of Arrow tables. Raises: PromptError, also for an error that the library finds in the file."""
    number, text = 0, clean is _from_text
    prompt, metadata = config.prompt_column, config.columns.get("metadata", "metadata")
    while (table := _next_batch(shown, batches)) is not None:
        _refuse_large_row(table, shown, number)
        for row in _rows_of_table(table):
            number += 1
            location = RowLocation(shown, number, line=False)
            if not passes_filter(row, config, text=text):
                yield location, None
                continue
            try:
                yield location, _with_metadata(clean(row, prompt), metadata)
            except BrokenRow as problem:
                raise location.make_error(problem) from None


def _next_batch(shown: str, batches: Iterator[Any]) -> Any:
    import pyarrow as pa

    try:
        with quiet_datasets():
            return next(batches, None)
    except PromptError:
        raise
    # Errors of pandas are ValueErrors.
    except (OSError, ValueError, csv.Error, pa.ArrowException, *GZIP_ERRORS) as error:
        raise _make_unreadable_error(shown, error) from None


def _refuse_large_row(table: Any, shown: str, rows_before: int) -> None:
    """Refuse a row that is too large, before Python copies it. `rows_before`: rows of the file before this table.

    Raises: PromptError.
    """
    import pyarrow as pa

    # A column with a dictionary is left out, because each of its rows would count the whole dictionary.
    plain = table.select([field.name for field in table.schema if not pa.types.is_dictionary(field.type)])
    if plain.nbytes <= MAX_LINE_BYTES:
        return
    for index in range(len(plain)):
        if (size := plain.slice(index, 1).nbytes) > MAX_LINE_BYTES:
            location = RowLocation(shown, rows_before + index + 1, line=False)
            raise location.make_error(BrokenRow(f"a row of {size:,} bytes", "split or delete this row"))


def refuse_large_groups(file: Path, shown: str, columns: Sequence[str]) -> None:
    """Refuse a Parquet file whose rows are too large on average. Only its footer is read. Raises: PromptError."""
    from pyarrow import parquet

    metadata, row = parquet.read_metadata(file), 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = [group.column(index) for index in range(group.num_columns)]
        read = [part for part in parts if any(f"{part.path_in_schema}.".startswith(f"{name}.") for name in columns)]
        total, rows = sum(part.total_uncompressed_size for part in read), group.num_rows
        if total > MAX_LINE_BYTES * max(1, rows):
            size = f"a row of {total:,} bytes" if rows == 1 else f"{rows:,} rows of {total:,} bytes, from this one on"
            raise RowLocation(shown, row + 1, line=False).make_error(BrokenRow(size, "split or delete what is so long"))
        row += group.num_rows


def _parquet_tables(file: Path, shown: str, config: PromptsConfig) -> Iterator[Any]:
    from pyarrow import parquet

    columns = _choose_columns(shown, parquet.read_schema(file).names, config)
    refuse_large_groups(file, shown, columns)
    stream = import_datasets().load_dataset(
        "parquet",
        data_files=glob.escape(str(file.absolute())),
        split="train",
        streaming=True,
        columns=columns,
        batch_size=BATCH_ROWS,
    )
    yield from stream.with_format("arrow").iter(BATCH_ROWS)


def _read_csv(file: Path, shown: str, config: PromptsConfig) -> Iterator[Any]:
    """Yield a CSV file as Arrow tables. Every cell is text: `007` stays `007`, and `NA` is not a missing value."""
    columns = _choose_columns(shown, _read_header(file), config)
    if file.stat().st_size > MAX_LINE_BYTES:
        for _ in csv_rows(file):  # the module `csv` raises for a cell that is too long; pandas has no limit
            pass
    datasets = import_datasets()
    stream = datasets.load_dataset(
        "csv",
        data_files=glob.escape(str(file.absolute())),
        split="train",
        streaming=True,
        features=datasets.Features({name: datasets.Value("string") for name in columns}),
        keep_default_na=False,
    )
    yield from stream.with_format("arrow").iter(BATCH_ROWS)


def _read_header(file: Path) -> list[str]:
    """Return the names of the columns. Raises: ValueError if the first row has more cells.

    pandas would take the first cell of each row for the row's name then, so that all cells would move by a column. Later rows
    that are too long are refused by pandas itself.
    """
    rows = csv_rows(file)
    names = next(rows, [])
    if len(next(rows, [])) > len(names):
        raise ValueError("more cells in row 1 than in the header; is a comma without quotes?")
    return names


def csv_rows(file: Path) -> Iterator[list[str]]:
    """Yield the rows of a CSV file, the header first. Blank lines are skipped, as by pandas. Raises: OSError, csv.Error."""
    with open_unpacked(file) as opened, io.TextIOWrapper(opened, "utf-8-sig", errors="replace", newline="") as text:
        yield from (row for row in csv.reader(text) if row)


def refuse_missing_columns(file: Path, shown: str, config: PromptsConfig) -> None:
    """Check the columns of a CSV or Parquet file, without its rows. Raises: PromptError, also if it is no Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        names = _read_header(file) if find_file_kind(file) == "csv" else parquet.read_schema(file).names
    except (OSError, ValueError, csv.Error, pa.ArrowException, *GZIP_ERRORS) as error:
        raise _make_unreadable_error(shown, error) from None
    _choose_columns(shown, names, config)


def _read_saved_dataset(directory: Path, config: PromptsConfig) -> Iterator[Any]:
    stored = import_datasets().load_from_disk(str(directory))
    columns = _choose_columns(str(directory), stored.column_names, config)
    yield from stored.select_columns(columns).with_format("arrow").iter(BATCH_ROWS)


def _choose_columns(shown: str, names: Sequence[str], config: PromptsConfig) -> list[str]:
    """Return the columns that are read. Raises: PromptError if the prompt, or a column that the pipeline names, is missing."""
    required = [config.prompt_column, *config.named_columns.values()]
    required += [config.filter.column] if config.filter else []
    for name in required:
        if name not in names:
            fault, fix = no_column(name, dict.fromkeys(names))
            raise PromptError.at(shown, found=fault, wanted=f"columns with {FORM}", fix=fix)
    optional = [config.columns.get(name, name) for name in COLUMNS]
    columns = list(dict.fromkeys(name for name in (*required, *optional) if name is not None and name in names))
    for name in columns:
        if (times := list(names).count(name)) > 1:
            raise PromptError.at(
                shown,
                found=f"{times} columns with the name `{name}`",
                wanted="one, so that it is clear which is meant",
                fix="rename or delete the others",
            )
    return columns


def column_names(source: Source) -> list[str]:
    """Return the names of all columns of a table; none of JSONL, whose rows have their own. Raises: OSError."""
    from pyarrow import parquet

    if source.kind == "jsonl":
        return []
    if source.kind == "saved":
        return list(import_datasets().load_from_disk(str(source.directory)).column_names)
    by_file = [_read_header(file) if source.kind == "csv" else parquet.read_schema(file).names for file in source.files]
    return list(dict.fromkeys(name for names in by_file for name in names))


def _make_unreadable_error(shown: str, error: Exception) -> PromptError:
    if isinstance(error, UnicodeDecodeError):
        return PromptError.at(
            _first_bad_line(shown),
            found=f"bytes that are not UTF-8: {error.reason}",
            wanted="UTF-8 text",
            fix="convert the file to UTF-8",
        )
    return PromptError.at(
        shown,
        found=f"a file that cannot be read: {error}".strip(),
        wanted="the format of its ending: .csv with a header and as many cells in each row, or .parquet",
        fix="write it again, or give a JSONL file",
    )


def _first_bad_line(shown: str) -> str:
    """Return the place of the first line that is not UTF-8, which the library does not tell; for a file of the hub its name."""
    if not Path(shown).is_file():
        return shown
    with open_unpacked(Path(shown)) as opened:
        for number, line in enumerate(opened, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"{shown}:{number}"
    return shown


# Rows of tables, converted to what JSONL would hold


def _from_table(row: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Convert a row of a typed table. A column whose cell is empty is left out."""
    filled = _without_empty(row, prompt)
    return {name: _without_nulls(value) if isinstance(value, list) else value for name, value in filled.items()}


def _drop_empty_keys(value: Any, keep_keys: Sequence[str] = ()) -> Any:
    """Return chat messages without keys that are null, except `keep_keys`; any other value as it is."""
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return [
            {key: part for key, part in message.items() if part is not None or key in keep_keys} for message in value
        ]
    return value


def _without_nulls(value: Any) -> Any:
    """Return a value without null keys at any depth. In a table every mapping has the keys of all mappings of its column."""
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return value


def _from_text(row: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Convert a row of a CSV file. A column whose cell is empty is left out. Raises: BrokenRow for chat messages as text."""
    for name, value in row.items():
        if value and value.startswith("[{") and _is_chat(value):
            raise BrokenRow(
                f"column `{name}`: chat messages as JSON, {value!r:.60}",
                "give messages as lists, in JSONL or Parquet: the student would read this cell as the text that it is",
            )
    return {name: value for name, value in row.items() if value or name == prompt}


def _is_chat(text: str) -> bool:
    try:
        value = json.loads(text)
    except (RecursionError, ValueError):
        return False
    return all(isinstance(message, dict) and message.keys() >= {"role", "content"} for message in value)


def _with_metadata(row: dict[str, Any], metadata: str | None) -> dict[str, Any]:
    """Return the row with its metadata parsed, if it is text. Raises: BrokenRow.

    Tables hold metadata as JSON text, because rows seldom have the same keys.
    """
    if metadata is None or not isinstance(row.get(metadata), str):
        return row
    try:
        return {**row, metadata: json.loads(row[metadata])}
    except (RecursionError, ValueError) as error:
        raise BrokenRow(f"column `{metadata}`: {error}", "write metadata as one JSON object") from None


def _rows_of_table(table: Any) -> list[dict[str, Any]]:
    """Return the table's rows. Cells of Arrow's JSON type, also in lists, are parsed."""
    import pyarrow as pa

    columns = {}
    for name in table.column_names:
        values, kind = table[name].to_pylist(), table[name].type
        if isinstance(kind, pa.JsonType):
            values = [None if value is None else json.loads(value) for value in values]
        elif pa.types.is_list(kind) and isinstance(kind.value_type, pa.JsonType):
            values = [None if value is None else [json.loads(part) for part in value] for value in values]
        columns[name] = values
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
