"""One row of a prompts file: its columns, and how a broken one is refused. The same for every file format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from opd.config.prompts import Column
from opd.errors import PromptError
from opd.settings import keys_of
from opd.wording import described

Messages = list[dict[str, str]]
"""Each with `role` and `content`."""
COLUMNS: tuple[Column, ...] = ("prompt", "completion", "answer", "metadata")
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps makes a new one for each row
SPOKEN: tuple[Column, ...] = ("prompt", "completion")
"""Columns that may be chat messages."""
MAX_LINE_BYTES = 8 << 20
"""A longer row cannot be a prompt: the longest contexts of today are a few MB of text."""
FORM = f'`prompt`, text or messages like {{"role": "user", "content": "2+2="}}, at most {MAX_LINE_BYTES >> 20} MiB'


def _as_text(answer: Any) -> Any:
    """A number as JSON spells it, which is what the same row has in a CSV file."""
    return json.dumps(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else answer


class PromptLine(BaseModel):
    """One row. Unknown columns are ignored: data sets carry many."""

    model_config = ConfigDict(frozen=True, strict=True)

    prompt: str | Messages
    """A prompt without text is left out of a merge, and counted."""
    completion: str | Messages | None = None
    answer: Annotated[str, BeforeValidator(_as_text)] = ""
    metadata: dict[str, Any] = Field(default_factory=dict)

    def as_json(self) -> bytes:
        """Canonical JSON: the same bytes whatever the file's format. A lone surrogate, which is no Unicode, comes back unchanged.

        Raises: BrokenRow for metadata that JSON has no form for, such as a table's dates.
        """
        try:
            return _COMPACT.encode(self.__dict__).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise BrokenRow(f"column `metadata`: {error}", "give metadata as plain JSON") from None

    @classmethod
    def from_json(cls, line: bytes) -> PromptLine:
        """Inverse of `as_json`."""
        return cls.model_construct(**parsed(line))


def parsed(line: bytes) -> dict[str, Any]:
    """The columns of what `PromptLine.as_json` wrote."""
    found: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
    return found


class BrokenRow(Exception):
    """What is wrong with a row, and the way out. The reader of the file adds the row's place."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found)
        self.found, self.fix = found, fix

    def at(self, where: str, *, wanted: str) -> PromptError:
        """The refusal that a user reads."""
        return PromptError.at(where, found=self.found, wanted=wanted, fix=self.fix)


def read_row(data: Any, columns: Mapping[Column, str] | None = None) -> PromptLine:
    """Check one row. `columns`: our name -> the data set's name, where they differ. Raises: BrokenRow."""
    problem = _shape_problem(data, columns or {})
    if problem is not None:
        raise BrokenRow(*problem)
    if columns:
        theirs = {ours: columns.get(ours, ours) for ours in COLUMNS}
        data = {ours: data[name] for ours, name in theirs.items() if name in data}
    try:
        return PromptLine.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(keys_of(first, data)) or "line"
        raise BrokenRow(f"column `{place}`: {described(first)}", "correct or delete this line") from None


SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Roles as ShareGPT calls them -> as chat templates do."""


def as_chat(data: Any, columns: Mapping[Column, str]) -> Any:
    """The row with its prompt as a chat: texts become messages of user and assistant, `from` and `value` become `role` and
    `content`, and the assistant's last turn becomes the completion, unless the row has one."""
    if not isinstance(data, dict):
        return data  # `read_row` refuses it
    asks, says = columns.get("prompt", "prompt"), columns.get("completion", "completion")
    prompt, completion = data.get(asks), data.get(says)
    if isinstance(completion, str) and columns.get("answer") != says:
        data = {**data, says: [{"role": "assistant", "content": completion}]}
    if isinstance(prompt, str):
        return {**data, asks: [{"role": "user", "content": prompt}]}
    if not isinstance(prompt, list):
        return data
    turns = [_turn(message) for message in prompt]
    last = turns[-1] if len(turns) > 1 and isinstance(turns[-1], dict) else {}
    if last.get("role") != "assistant":
        return {**data, asks: turns}
    return {says: [last], **data, asks: turns[:-1]}


def _turn(message: Any) -> Any:
    """A message with `role` and `content`, if it has `from` and `value` in their place; else the message itself."""
    if not (isinstance(message, dict) and isinstance(message.get("from"), str) and "value" in message):
        return message
    return {"role": SPEAKERS.get(message["from"], message["from"]), "content": message["value"]}


def parse_json_line(line: bytes) -> Any:
    """The value of one line of JSONL. Raises: BrokenRow."""
    fix = "correct or delete this line"
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        found, fix = f"byte {error.start + 1} is not UTF-8: {error.reason}", "convert the file to UTF-8"
    except json.JSONDecodeError as error:
        found = f"{error.msg} at column {error.colno}: {error.doc.strip()[:60]!r}"
    except (RecursionError, ValueError) as error:  # ValueError: bad JSON, or a number of thousands of digits
        found = f"JSON that cannot be read: {error}"
    raise BrokenRow(found, fix)


def _shape_problem(data: Any, columns: Mapping[Column, str]) -> tuple[str, str] | None:
    """What was found, and the way out, if the row's columns or messages have other names than ours."""
    if not isinstance(data, dict):
        return None
    asks = columns.get("prompt", "prompt")
    if asks not in data:
        return no_column(asks, data)
    for ours in SPOKEN:
        column = columns.get(ours, ours)
        messages = data.get(column)
        for number, message in enumerate(messages if isinstance(messages, list) else (), start=1):
            found = _message_problem(message)
            if found:
                theirs = isinstance(message, dict) and message.keys() >= {"from", "value"}
                fix = FROM_SHAREGPT if theirs else "give every message a `role` and a `content`, both text"
                return f"column `{column}`, message {number}: {found}", fix
    return None


def no_column(name: str, data: Mapping[str, Any]) -> tuple[str, str]:
    """What was found, and the way out, if a column that is needed has another name or is missing."""
    found = f"no column `{name}`{', but ' + _names(data) if data else ''}"
    if name != "prompt":
        return found, "correct the names under `columns` and `filter` of the pipeline's `prompts`"
    return found, (
        "call what asks `prompt`, or say what it is called: `prompts: {path: ..., columns: {prompt: NAME}}`; of a "
        "conversation, the turns before the answer are the `prompt`, the answer is the `completion`"
    )


FROM_SHAREGPT = (
    """python3 -c 'import json, sys; who = {"human": "user", "gpt": "assistant"}; new = lambda ms: [{"role": """
    """who.get(m["from"], m["from"]), "content": m["value"]} for m in ms]; [print(json.dumps({**(d := json.loads(l)), """
    """**{c: new(d[c]) for c in ("prompt", "completion") if c in d}})) for l in sys.stdin]' < OLD.jsonl > NEW.jsonl"""
)
"""Makes `role` and `content` of `from` and `value`."""


def _message_problem(message: Any) -> str:
    """What is wrong with one message; nothing if it has a role and a text."""
    if not isinstance(message, dict):
        return f"{message!r:.60}"
    if not message.keys() >= {"role", "content"}:
        return f"the keys {_names(message)}" if message else "no keys"
    odd = next((key for key, value in message.items() if not isinstance(value, str)), "")
    return f"`{odd}` is no text: {message[odd]!r:.60}" if odd else "" if message["role"] else "an empty `role`"


def _names(data: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key:.40}`" for key in list(data)[:8])
