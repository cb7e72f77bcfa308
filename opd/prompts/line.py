"""One row of a prompts file: its columns, and the checks that refuse a broken row, the same for every file format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from opd.config.prompts import CHAT_COLUMNS, Column
from opd.prompts.broken_rows import BrokenRow
from opd.prompts.conversation import (
    Messages,
    add_system_message,
    is_learned,
    join_text_parts,
    list_keys,
    read_messages,
    read_tools,
    read_variables,
    rename_turn_keys,
)
from opd.settings.wording import describe_error
from opd.settings.yaml_files import find_error_keys

COLUMNS: tuple[Column, ...] = get_args(Column)
# Made once: `json.dumps` would make a new encoder for each row.
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
SPOKEN: tuple[Column, ...] = ("prompt", "completion")
"""Columns that may be chat messages."""
MAX_LINE_BYTES = 8 << 20
"""Most bytes of a row. A longer one cannot be a prompt, since the longest contexts of today are a few MB of text."""
FORM = f'`prompt`, text or messages like {{"role": "user", "content": "2+2="}}, at most {MAX_LINE_BYTES >> 20} MiB'


def _as_text(answer: Any) -> Any:
    """Return a finite number as JSON spells it, so that the row is the same as from a CSV file; any other value as it is.

    A whole number is written without a point, because pandas makes `2.0` of a 2 in a column with empty cells.
    """
    if not isinstance(answer, int | float) or isinstance(answer, bool) or not math.isfinite(answer):
        return answer
    # From 2^53 on one float stands for several whole numbers, so it is left as a float.
    is_whole = isinstance(answer, float) and answer.is_integer() and abs(answer) < 1 << 53
    return json.dumps(int(answer) if is_whole else answer)


class PromptLine(BaseModel):
    """One row. Columns that we do not know are ignored, because data sets have many."""

    model_config = ConfigDict(frozen=True, strict=True)

    prompt: str | Messages
    """A prompt without text is left out of a merge, and counted."""
    completion: str | Messages | None = None
    answer: Annotated[str, BeforeValidator(_as_text)] = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """Tools of which the chat template tells the model."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that the chat template gets besides the messages."""
        return self.chat_template_kwargs | ({"tools": self.tools} if self.tools else {})

    def as_json(self) -> bytes:
        """Return the row as canonical JSON: the same bytes whatever the file's format.

        A lone surrogate, which is no valid Unicode, survives `from_json` unchanged. Raises: BrokenRow for a value that JSON
        cannot hold, such as a date in a table.
        """
        columns = {name: value for name, value in self.__dict__.items() if value or name not in CHAT_COLUMNS}
        try:
            return _COMPACT.encode(columns).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise BrokenRow(f"{_find_unwritable_column(columns)}: {error}", "give it as plain JSON") from None

    @classmethod
    def from_json(cls, line: bytes) -> PromptLine:
        """Return the row that `as_json` wrote."""
        columns = json.loads(line.decode("utf-8", "surrogatepass"))
        # Defaults are given here, because pydantic takes far longer to look up a default than to take a value.
        return cls.model_construct(**{"tools": [], "chat_template_kwargs": {}, **columns})


def _find_unwritable_column(columns: Mapping[str, Any]) -> str:
    """Return the name of the column whose value JSON cannot hold, for an error."""
    for name, value in columns.items():
        try:
            _COMPACT.encode(value)
        except (TypeError, ValueError, RecursionError):
            return f"column `{name}`"
    return "the row"


def read_row(data: Any, columns: Mapping[Column, str | None] | None = None) -> PromptLine:
    """Check one row and return it. `columns`: our name -> the data set's name if it differs, None for a column not to read.

    Raises: BrokenRow.
    """
    if isinstance(data, dict):
        data = _read_columns(data, {column: (columns or {}).get(column, column) for column in COLUMNS})
    try:
        line = PromptLine.model_validate(data)
    except ValidationError as error:
        detail = error.errors()[0]
        column_path = ".".join(find_error_keys(detail, data)) or "line"
        raise BrokenRow(f"column `{column_path}`: {describe_error(detail)}", "correct or delete this line") from None
    for name in ("prompt", "completion", "answer"):
        value = getattr(line, name)
        if any("\0" in text for text in ([m["content"] for m in value] if isinstance(value, list) else [value or ""])):
            raise BrokenRow(f"column `{name}`: a text with the character NUL", "correct or delete this line")
    return line


def _read_columns(data: Mapping[str, Any], names: Mapping[Column, str | None]) -> dict[str, Any]:
    """Return the row's columns by our names, with conversations in the form that chat templates read. Raises: BrokenRow."""
    if names["prompt"] not in data:
        raise BrokenRow(*no_column(str(names["prompt"]), data))
    row: dict[str, Any] = {column: data[name] for column, name in names.items() if name is not None and name in data}
    for column in SPOKEN:
        if isinstance(row.get(column), list):
            row[column] = read_messages(str(names[column]), row[column])
    chat = {column: value for column in CHAT_COLUMNS if (value := row.pop(column, None))}
    if not isinstance(row["prompt"], list):  # plain text, for which these columns mean nothing
        return row
    if "system" in chat:
        row["prompt"] = add_system_message(row["prompt"], chat["system"], str(names["system"]))
    if "tools" in chat:
        row["tools"] = read_tools(chat["tools"], str(names["tools"]))
    if "chat_template_kwargs" in chat:
        row["chat_template_kwargs"] = read_variables(chat["chat_template_kwargs"], str(names["chat_template_kwargs"]))
    return row


def columns_in_use(columns: Mapping[Column, str | None], *, chat: bool) -> set[str | None]:
    """Return the data set's names of the columns that are read. `chat`: whether the row's prompt is a conversation."""
    return {columns.get(column, column) for column in COLUMNS if chat or column not in CHAT_COLUMNS}


def as_chat(data: Any, columns: Mapping[Column, str | None]) -> Any:
    """Return the row with its prompt as a chat, for `chat: true`.

    A prompt or completion that is text becomes a message of the user or the assistant. `from` and `value` become `role` and
    `content`. If the prompt ends with a turn of the assistant, that turn becomes the completion and the answer, unless the
    row has its own; a turn with OpenAI's `weight` 0 is dropped.
    """
    if not isinstance(data, dict):
        return data  # `read_row` refuses it
    prompt_column, completion_column, answer_column = (
        columns.get(column, column) for column in ("prompt", "completion", "answer")
    )
    prompt, completion = data.get(prompt_column), data.get(completion_column)
    if isinstance(completion, str) and answer_column != completion_column:
        data = {**data, completion_column: [{"role": "assistant", "content": completion}]}
    elif completion_column and isinstance(completion, list):
        completion_turns = [rename_turn_keys(message) for message in completion]
        answers = _read_answers(data, completion_turns[0], answer_column) if len(completion_turns) == 1 else {}
        data = {**data, completion_column: completion_turns, **answers}
    if isinstance(prompt, str):
        return {**data, prompt_column: [{"role": "user", "content": prompt}]}
    if not isinstance(prompt, list):
        return data
    turns = [rename_turn_keys(message) for message in prompt]
    last = turns[-1] if len(turns) > 1 and isinstance(turns[-1], dict) else {}
    if last.get("role") != "assistant":
        return {**data, prompt_column: turns}
    learned = {completion_column: [last]} if completion_column and is_learned(last) else {}
    answers = _read_answers(data, last, answer_column) if learned else {}
    return {**learned, **data, prompt_column: turns[:-1], **answers}


def _read_answers(data: Mapping[str, Any], turn: Any, answer_column: str | None) -> dict[str, str]:
    """Return the assistant's text under `answer_column`. Empty if the row has an answer, or if the column is not to be read."""
    is_answer = isinstance(turn, dict) and turn.get("role") == "assistant" and is_learned(turn)
    if not answer_column or not is_answer or data.get(answer_column) not in (None, ""):
        return {}
    return {answer_column: _turn_text(turn)}


def _turn_text(message: Mapping[str, Any]) -> str:
    """Return the text of a turn; empty for one that calls a tool, or that `read_messages` will refuse."""
    try:
        text = join_text_parts(message.get("content"))
    except BrokenRow:
        return ""
    return text if isinstance(text, str) and not message.get("tool_calls") else ""


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary. Raises: ValueError for a key given twice; Python would keep the last value."""
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key `{next(name for name in names if names.count(name) > 1):.40}` is given twice")
    return data


PARSER = json.JSONDecoder(object_pairs_hook=_parse_object)


def parse_json_line(line: bytes) -> Any:
    """Return the value of one line of JSONL. Raises: BrokenRow."""
    fix = "correct or delete this line"
    try:
        return PARSER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        fault, fix = f"byte {error.start + 1} is not UTF-8: {error.reason}", "convert the file to UTF-8"
    except json.JSONDecodeError as error:
        fault = f"{error.msg} at column {error.colno}: {error.doc.strip()[:60]!r}"
        if error.doc.strip() in ("{", "["):
            fix = "write each object on a line of its own: jq -c . OLD.json > NEW.jsonl"
    except (RecursionError, ValueError) as error:  # ValueError: bad JSON, or a number of thousands of digits
        fault = f"JSON that cannot be read: {error}"
    raise BrokenRow(fault, fix)


def no_column(name: str, data: Mapping[str, Any]) -> tuple[str, str]:
    """Return `fault` and `fix` of a `BrokenRow` for a required column that is missing or has another name."""
    fault = f"no column `{name}`{', but ' + list_keys(data) if data else ''}"
    if name != "prompt":
        return fault, "correct the names under `columns` and `filter` of the pipeline's `prompts`"
    return fault, (
        "call what asks `prompt`, or say what it is called: `prompts: {path: ..., columns: {prompt: NAME}}`, and for "
        "conversations that end with their answer `chat: true` beside it"
    )
