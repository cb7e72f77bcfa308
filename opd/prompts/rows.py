"""The rows that a pipeline wants of a source. Each is checked and stored, and can then be read by its number.

source_rows ─ filter ─→ read_row ─→ canonical JSON in Arrow ─ shuffle_seed, limit ─→ Rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.errors import PromptError
from opd.files import blake3_json
from opd.prompts.arrow import IN_MEMORY_BYTES, Batches, in_batches, open_batches
from opd.prompts.broken_rows import BrokenRow
from opd.prompts.line import MAX_LINE_BYTES, PromptLine, as_chat, columns_in_use, read_row
from opd.prompts.mix import shuffle_numbers
from opd.prompts.readers import RowLocation, column_names, refuse_missing_columns, source_rows
from opd.prompts.sources import Source, find_source, is_hub_name

FORMAT = 3
"""Version of the cached rows; raise it if the same file would now give other rows. Version 1 accepted a CSV file whose first
row had too many cells. Version 2 did not read system messages and tools in columns of their own."""
SCHEMA = pa.schema(
    [("row", pa.int64()), ("line", pa.large_binary()), ("unread", pa.list_(pa.string())), ("answered", pa.bool_())]
)
"""`row`: its number in the source. `line`: canonical JSON. `unread`: columns of the row that nothing reads, without those of
earlier rows. `answered`: the row's answer is the last turn of its conversation."""

Stored = tuple[int, bytes, list[str], bool]
"""The cells of a row of `SCHEMA`."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows(Sequence[PromptLine]):
    """Rows in the order of the file, or shuffled. Each is read from memory, or from a mapped file, when it is asked for."""

    label: str
    key: str
    """Hash of everything that decides which rows these are and what they contain."""
    cached: bool
    """True if the source is so large that its rows are cached in a file; then their token ids are cached too."""
    unread: tuple[str, ...]
    """Columns of the source that are not read."""
    _batches: Batches
    _order: np.ndarray[tuple[int], np.dtype[np.int64]] | None

    def __len__(self) -> int:
        return len(self._batches) if self._order is None else len(self._order)

    @overload
    def __getitem__(self, index: int) -> PromptLine: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptLine]: ...
    def __getitem__(self, index: int | slice) -> PromptLine | list[PromptLine]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        line: PromptLine = PromptLine.from_json(self._batches.read_cell("line", self._source_index(index)))
        return line

    def __iter__(self) -> Iterator[PromptLine]:
        return (self[i] for i in range(len(self)))

    def row_number(self, index: int) -> int:
        """Return the row's number in the source, from 0. It is part of the prompt's name, so it ignores filter and shuffle."""
        return int(self._batches.read_cell("row", self._source_index(index)))

    def row_numbers(self) -> np.ndarray[Any, Any]:
        """Return `row_number` of every row, [rows]."""
        numbers = self._batches.read_numbers("row")
        return numbers if self._order is None else numbers[self._order]

    @property
    def num_answered(self) -> int:
        """Number of rows whose answer is the last turn of the conversation."""
        answered = self._batches.read_numbers("answered")
        return int(np.count_nonzero(answered if self._order is None else answered[self._order]))

    def read_lines(self, start: int, stop: int) -> list[PromptLine]:
        """Return the rows from `start` to before `stop`, in one go."""
        if self._order is None:
            lines = self._batches.read_cells("line", start, stop)
        else:
            lines = [self._batches.read_cell("line", int(at)) for at in self._order[start:stop]]
        return [PromptLine.from_json(line) for line in lines]

    def _source_index(self, index: int) -> int:
        index = range(len(self))[index]  # a range checks the index and resolves a negative one
        return index if self._order is None else int(self._order[index])


def open_rows(prompts: Path | PromptsConfig) -> Rows:
    """Read and check every row that the pipeline wants.

    Raises: PromptError for a row that is broken or too long, naming file and row, or for a source that is missing or empty.
    """
    config = as_prompts_config(prompts)
    source = find_source(prompts)
    states = source.file_states()
    key = _cache_key(source, config)
    cached = source.nbytes > IN_MEMORY_BYTES
    batches = open_batches(
        f"rows-{key}", SCHEMA, lambda: in_batches(_read_unchanged(source, config, states), SCHEMA), cached=cached
    )
    order = None
    if config.shuffle_seed is not None:
        permutation = np.array(shuffle_numbers(len(batches), f"opd prompts {config.shuffle_seed}"), np.int64)
        order = permutation[: config.limit]
    key = _extend_key(key, [config.shuffle_seed, config.limit])
    return Rows(source.label, key, cached, _find_unread_columns(source, config, batches), batches, order)


def _find_unread_columns(source: Source, config: PromptsConfig, batches: Batches) -> tuple[str, ...]:
    """Return the columns of the source that nothing reads. Raises: OSError."""
    of_filter = {config.filter.column} if config.filter else set()
    used = {*columns_in_use(config.columns, chat=True), *config.more_columns}
    of_table = [name for name in column_names(source) if name not in used]
    candidates = dict.fromkeys([*of_table, *batches.flatten_lists("unread")])
    return tuple(name for name in candidates if name not in of_filter)


def refuse_wrong_start(prompts: Path | PromptsConfig) -> None:
    """Check the first row of each local JSONL file, or the columns of each table. Raises: PromptError.

    It is fast: `datasets` is not imported, and nothing is kept. A source that only `datasets` can find is not checked.
    """
    config = as_prompts_config(prompts)
    if is_hub_name(prompts) or config.path.is_dir():
        return
    source = find_source(prompts)
    for file, shown in zip(source.files, source.shown, strict=True):
        if source.kind == "jsonl":
            location, row = next(source_rows(source, config), (None, None))
            if location is not None and row is not None:
                _encode_row(location, _check_line(location, row, config))
        else:
            refuse_missing_columns(file, shown, config)


def read_prompt_lines(prompts: Path | PromptsConfig) -> list[PromptLine]:
    """Return all rows as a list, for callers that need all of them at once. Raises: PromptError."""
    return list(open_rows(prompts))


def _read_unchanged(source: Source, config: PromptsConfig, states: object) -> Iterator[Stored]:
    """Yield the rows of `_check_rows`. Raises: PromptError, also if the files have changed since `states` was taken."""
    yield from _check_rows(source, config)
    if source.file_states() != states:
        raise PromptError.at(
            source.label,
            found="a file that was written to while it was read",
            wanted="prompts that stay as they are",
            fix="wait until whoever writes it is done",
        )


def _check_rows(source: Source, config: PromptsConfig) -> Iterator[Stored]:
    """Yield each row in its stored form: checked, filtered, and, unless they are shuffled, only up to the limit.

    Raises: PromptError.
    """
    present: set[str] = set()
    unread: set[str] = set()
    named, answers = config.named_columns.values(), config.columns.get("answer", "answer")
    text_columns, chat_columns = (
        {*columns_in_use(config.columns, chat=chat), *config.more_columns} for chat in (False, True)
    )
    total = read = 0
    for number, (location, row) in enumerate(source_rows(source, config)):
        total = number + 1
        if row is None:  # the filter drops it
            continue
        line = _check_line(location, row, config)
        present.update(name for name in named if name in row)
        read += 1
        used = text_columns if isinstance(line.prompt, str) else chat_columns
        new = [name for name in row if name not in used and name not in unread and row[name] not in (None, "", [], {})]
        unread.update(new)
        answered = bool(line.answer) and row.get(answers) in (None, "")
        yield number, _encode_row(location, line), new, answered
        if config.shuffle_seed is None and read == config.limit:
            break
    _refuse_none(source, config, total, read)
    for column, name in config.named_columns.items():
        if name not in present:
            raise PromptError.at(
                source.label,
                found=f"no row with a column `{name}`",
                wanted=f"the column that prompts.columns.{column} names",
                fix="correct the name",
            )


def _check_line(location: RowLocation, row: Any, config: PromptsConfig) -> PromptLine:
    """Check a row. Raises: PromptError."""
    try:
        return read_row(as_chat(row, config.columns) if config.chat else row, config.columns, config.more_columns)
    except BrokenRow as problem:
        raise location.make_error(problem) from None


def _encode_row(location: RowLocation, line: PromptLine) -> bytes:
    """Return a row as canonical JSON. Raises: PromptError."""
    try:
        encoded = line.as_json()
        if not location.line and len(encoded) > MAX_LINE_BYTES:
            raise BrokenRow(f"a row of {len(encoded):,} bytes", "split or delete this row")
    except BrokenRow as problem:
        raise location.make_error(problem) from None
    return encoded


def _refuse_none(source: Source, config: PromptsConfig, total: int, read: int) -> None:
    if read:
        return
    if total and config.filter is not None:
        rule = config.filter
        allowed = rule.equals if rule.one_of is None else rule.one_of
        raise PromptError.at(
            source.label,
            found=f"no prompts: of {total:,} rows none has {allowed!r} in the column `{rule.column}`",
            wanted="at least one row",
            fix="correct prompts.filter",
        )
    raise PromptError.at(
        source.label,
        found="no prompts",
        wanted="at least one line",
        fix='lines look like {"prompt": "2+2=", "answer": "4"}',
    )


def _cache_key(source: Source, config: PromptsConfig) -> str:
    """Return the hash of all that decides the stored rows. Shuffling happens later; the limit counts only without it."""
    settings = config.model_dump(mode="json", include={"columns", "filter"}) | ({"chat": True} if config.chat else {})
    settings |= {"more": config.more_columns} if config.more_columns else {}
    limit = config.limit if config.shuffle_seed is None else None
    return _extend_key("", [FORMAT, source.kind, source.content_hash(), settings, limit])


def _extend_key(key: str, parts: object) -> str:
    return blake3_json([key, parts])
