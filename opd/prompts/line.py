"""One row of a prompts file: its columns, and how a broken one is refused. The same for every file format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from opd.config.prompts import CHAT_COLUMNS, Column
from opd.prompts.broken import BrokenRow
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
from opd.settings.yaml_files import keys_of

COLUMNS: tuple[Column, ...] = get_args(Column)
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps makes a new one for each row
SPOKEN: tuple[Column, ...] = ("prompt", "completion")
"""Columns that may be chat messages."""
MAX_LINE_BYTES = 8 << 20
"""A longer row cannot be a prompt: the longest contexts of today are a few MB of text."""
FORM = f'`prompt`, text or messages like {{"role": "user", "content": "2+2="}}, at most {MAX_LINE_BYTES >> 20} MiB'


def _as_text(answer: Any) -> Any:
    """Return a finite number as JSON spells it, so that the row is the same from a CSV file. A whole number has no point: pandas
    makes `2.0` of the 2 in a column with empty cells."""
    if not isinstance(answer, int | float) or isinstance(answer, bool) or not math.isfinite(answer):
        return answer
    # Beyond 2^53 a float stands for several whole numbers.
    is_whole = isinstance(answer, float) and answer.is_integer() and abs(answer) < 1 << 53
    return json.dumps(int(answer) if is_whole else answer)


class PromptLine(BaseModel):
    """One row. Unknown columns are ignored: data sets carry many."""

    model_config = ConfigDict(frozen=True, strict=True)

    prompt: str | Messages
    """A prompt without text is left out of a merge, and counted."""
    completion: str | Messages | None = None
    answer: Annotated[str, BeforeValidator(_as_text)] = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """Tools that the chat template tells of."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template beside the messages."""
        return self.chat_template_kwargs | ({"tools": self.tools} if self.tools else {})

    def as_json(self) -> bytes:
        """Canonical JSON: the same bytes whatever the file's format. A lone surrogate, which is no Unicode, comes back unchanged.

        Raises: BrokenRow for a value that JSON has no form for, such as a table's dates.
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
        # Given, because pydantic takes far longer to look up a default than to take a value.
        return cls.model_construct(**{"tools": [], "chat_template_kwargs": {}, **columns})


def _find_unwritable_column(columns: Mapping[str, Any]) -> str:
    """Return the column that JSON has no form for."""
    for name, value in columns.items():
        try:
            _COMPACT.encode(value)
        except (TypeError, ValueError, RecursionError):
            return f"column `{name}`"
    return "the row"


def read_row(data: Any, columns: Mapping[Column, str | None] | None = None) -> PromptLine:
    """Check one row. `columns`: our name -> the data set's name, where they differ, or None for a column that is not read.

    Raises: BrokenRow.
    """
    if isinstance(data, dict):
        data = _read_columns(data, {column: (columns or {}).get(column, column) for column in COLUMNS})
    try:
        line = PromptLine.model_validate(data)
    except ValidationError as error:
        detail = error.errors()[0]
        column_path = ".".join(keys_of(detail, data)) or "line"
        raise BrokenRow(f"column `{column_path}`: {describe_error(detail)}", "correct or delete this line") from None
    for name in ("prompt", "completion", "answer"):
        value = getattr(line, name)
        if any("\0" in text for text in ([m["content"] for m in value] if isinstance(value, list) else [value or ""])):
            raise BrokenRow(f"column `{name}`: a text with the character NUL", "correct or delete this line")
    return line


def _read_columns(data: Mapping[str, Any], names: Mapping[Column, str | None]) -> dict[str, Any]:
    """Return the row by our names, its conversation as chat templates read it. Raises: BrokenRow."""
    if names["prompt"] not in data:
        raise BrokenRow(*no_column(str(names["prompt"]), data))
    row: dict[str, Any] = {column: data[name] for column, name in names.items() if name is not None and name in data}
    for column in SPOKEN:
        if isinstance(row.get(column), list):
            row[column] = read_messages(str(names[column]), row[column])
    of_chat = {column: value for column in CHAT_COLUMNS if (value := row.pop(column, None))}
    if not isinstance(row["prompt"], list):
        return row
    if "system" in of_chat:
        row["prompt"] = add_system_message(row["prompt"], of_chat["system"], str(names["system"]))
    if "tools" in of_chat:
        row["tools"] = read_tools(of_chat["tools"], str(names["tools"]))
    if "chat_template_kwargs" in of_chat:
        row["chat_template_kwargs"] = read_variables(
            of_chat["chat_template_kwargs"], str(names["chat_template_kwargs"])
        )
    return row


def columns_in_use(columns: Mapping[Column, str | None], *, chat: bool) -> set[str | None]:
    """Return the data set's names of the columns that are read. `chat`: of a row whose prompt is a conversation."""
    return {columns.get(column, column) for column in COLUMNS if chat or column not in CHAT_COLUMNS}


def as_chat(data: Any, columns: Mapping[Column, str | None]) -> Any:
    """Return the row with its prompt as a chat: texts become messages of user and assistant, `from` and `value` become `role` and
    `content`, and the assistant's last turn becomes the completion and the answer, unless the row has its own."""
    if not isinstance(data, dict):
        return data  # `read_row` refuses it
    prompt_column, completion_column, answer_column = (columns.get(column, column) for column in ("prompt", "completion", "answer"))
    prompt, completion = data.get(prompt_column), data.get(completion_column)
    if isinstance(completion, str) and answer_column != completion_column:
        data = {**data, completion_column: [{"role": "assistant", "content": completion}]}
    elif completion_column and isinstance(completion, list):
        completion_turns = [rename_turn_keys(message) for message in completion]
        data = {**data, completion_column: completion_turns, **(_read_answers(data, completion_turns[0], answer_column) if len(completion_turns) == 1 else {})}
    if isinstance(prompt, str):
        return {**data, prompt_column: [{"role": "user", "content": prompt}]}
    if not isinstance(prompt, list):
        return data
    turns = [rename_turn_keys(message) for message in prompt]
    last = turns[-1] if len(turns) > 1 and isinstance(turns[-1], dict) else {}
    if last.get("role") != "assistant":
        return {**data, prompt_column: turns}
    learned = {completion_column: [last]} if completion_column and is_learned(last) else {}
    return {**learned, **data, prompt_column: turns[:-1], **(_read_answers(data, last, answer_column) if learned else {})}


def _read_answers(data: Mapping[str, Any], turn: Any, answer_column: str | None) -> dict[str, str]:
    """Return the column `answer_column` with the text of the assistant's turn, if it is to be read and the row has no answer."""
    is_answer = isinstance(turn, dict) and turn.get("role") == "assistant" and is_learned(turn)
    return {answer_column: _turn_text(turn)} if answer_column and is_answer and data.get(answer_column) in (None, "") else {}


def _turn_text(message: Mapping[str, Any]) -> str:
    """Return the text of a turn; none for one that calls a tool, or that `read_messages` is about to refuse."""
    try:
        text = join_text_parts(message.get("content"))
    except BrokenRow:
        return ""
    return text if isinstance(text, str) and not message.get("tool_calls") else ""


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises: ValueError for a key given twice, of which Python would keep the last."""
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
    """Return the problem and its remedy, if a column that is needed has another name or is missing."""
    fault = f"no column `{name}`{', but ' + list_keys(data) if data else ''}"
    if name != "prompt":
        return fault, "correct the names under `columns` and `filter` of the pipeline's `prompts`"
    return fault, (
        "call what asks `prompt`, or say what it is called: `prompts: {path: ..., columns: {prompt: NAME}}`, and for "
        "conversations that end with their answer `chat: true` beside it"
    )
