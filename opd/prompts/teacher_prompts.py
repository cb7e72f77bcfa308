"""Prompts that a teacher reads in place of the student's: rendered and tokenised once for each row, before anything is scored.

    row ─ texts of the pipeline ─→ messages ─ the teacher's chat template ─→ token ids in Arrow ─→ TeacherPromptTable

The student's response follows these ids as it was sampled: its own ids are appended and never encoded again, so that a token of
the response is the same token to student and teacher, at the same place in the response.

An episode has its prompt once, and then turns and what the environment answers. Both go to the teacher as the student read them:

    student   its opening       | turn | answer | turn | ...
    teacher   its own opening   | turn | answer | turn | ...
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from opd.config.teacher_prompts import TeacherPromptConfig
from opd.errors import ConfigError, PromptError, RunError
from opd.prompts.arrow import Batches, in_batches, open_batches
from opd.prompts.conversation import SYSTEM_ROLES, Messages
from opd.prompts.encode import encode_prompts, is_blank, mark_prompt, render_prompt
from opd.prompts.line import PromptLine
from opd.prompts.row_text import RowTemplate
from opd.prompts.rows import Rows
from opd.prompts.table import ENCODED_AT_ONCE, PromptTable, make_cache_key
from opd.records.types import Rollout

SCHEMA = pa.schema([("token_ids", pa.list_(pa.int32())), ("length", pa.int32())])
PROVEN = 8
"""Rows of a domain for which it is proven that the template takes a response. What it does with one depends on few of their properties."""
ANSWER = "zq7zq"
"""Response with which a template is tried; it occurs in no template."""
OBSERVATION = "qz4qz"
"""Answer of an environment to it."""
LEAKED = 16
"""Characters of a shortest text whose presence in the student's prompt tells something: short answers are there by chance."""
_THOUGHTS = re.compile(r"</?think>|\s")


class TeacherPromptWriter:
    """Writes the messages of a teacher's prompt for rows."""

    def __init__(self, config: TeacherPromptConfig) -> None:
        system = [("system", config.system)] if config.system else []
        texts = [*system, *((message.role, message.content) for message in config.messages)]
        self._templates = [(role, RowTemplate(text)) for role, text in texts]
        self._has_system = bool(config.system)

    def write_messages(self, line: PromptLine) -> tuple[Messages, list[str]]:
        """Return the messages for a row, and the contents of those that are not the row's.

        Raises: ValueError for a row without a column, or with one of which nothing is left; jinja2's TemplateError.
        """
        values = read_columns(line)
        for _, template in self._templates:
            if missing := template.find_missing(values):
                raise ValueError(f"no column `{missing}`, which the teacher's prompt reads")
        own = [{"role": role, "content": template.render(values)} for role, template in self._templates]
        for message in own:
            if not message["content"].strip():
                raise ValueError(f"the teacher's {message['role']} message, which is empty for this row")
        question = [{"role": "user", "content": line.prompt}] if isinstance(line.prompt, str) else line.prompt
        start = _count_system(question)
        front = [] if self._has_system else question[:start]
        return [*front, *own, *question[start:]], [message["content"] for message in own]


def read_columns(line: PromptLine) -> dict[str, Any]:
    """Return the columns of a row that the texts of a teacher's prompt may read; empty ones of ours are left out."""
    completion = line.completion
    if isinstance(completion, list):
        completion = "\n".join(message["content"] for message in completion)
    ours = {"answer": line.answer, "completion": completion, "metadata": line.metadata}
    return {**line.more, **{name: value for name, value in ours.items() if value}}


def _count_system(messages: Messages) -> int:
    """Return the number of system messages with which a conversation begins."""
    return next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))


def load_teacher_tokenizer(tokenizer: Any, config: TeacherPromptConfig, key: str) -> Any:
    """Return the tokenizer with the chat template of a teacher's prompt. `key`: the prompt's place in the pipeline.

    Raises: ConfigError for a template that cannot be read, or if there is none.
    """
    teacher_tokenizer = copy.copy(tokenizer)
    if config.template is not None:
        try:
            teacher_tokenizer.chat_template = config.template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError.at(
                f"{key}.template",
                found=f"{config.template}: {error}",
                wanted="a file with a chat template in jinja2",
                fix="correct the path",
            ) from None
    if not teacher_tokenizer.chat_template and config.has_messages:
        raise ConfigError.at(
            f"{key}.template",
            found="nothing, and a student without a chat template",
            wanted="a file with the chat template by which this teacher's messages become text",
            fix="write one: {% for m in messages %}{{ m.content }}{% endfor %} puts the contents one after the other",
        )
    return teacher_tokenizer


@dataclass(frozen=True, eq=False)
class TeacherPromptTable:
    """The prompts that a teacher reads in one domain. Implements `opd.records.types.TeacherPrompts`."""

    rows: Rows
    _tokens: Batches

    def __call__(self, rollout: Rollout) -> tuple[int, ...]:
        """Return [P] the token ids that the teacher reads before this rollout's response."""
        number = int(rollout.group.rpartition("/")[2])  # a group is named after its prompt
        return tuple(self._tokens.read_cell("token_ids", self._index_by_row_number[number]))

    @cached_property
    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Number of tokens for each of `rows`, [rows]; 0 for a row whose prompt has no text."""
        return self._tokens.read_numbers("length")

    @cached_property
    def _index_by_row_number(self) -> dict[int, int]:
        """Row's number in the source -> its index in `rows`."""
        return {int(number): index for index, number in enumerate(self.rows.row_numbers())}


@dataclass(frozen=True, eq=False)
class TeacherOpenings:
    """The tokens with which a teacher reads an episode in place of the student's opening. Implements `opd.records.types.TeacherPrompts`.

    All after the opening is shared, also where it stands in the prompt of a later segment.
    """

    student: TeacherPromptTable
    teacher: TeacherPromptTable

    def __call__(self, rollout: Rollout) -> tuple[int, ...]:
        """Return [P] the token ids that the teacher reads before the segment's response. Raises: RunError for an episode that begins
        otherwise than the student's table says."""
        opening = self.student(rollout)
        if rollout.prompt_ids[: len(opening)] != opening:
            raise RunError(
                f"episode {rollout.episode} of domain {rollout.domain}: it begins with other tokens than its prompt, because `reset` of "
                "its environment returned a text, or has other tools here than in the first task; a teacher with a prompt of its own "
                "reads episodes that begin with prompt and tools alone"
            )
        return (*self.teacher(rollout), *rollout.prompt_ids[len(opening) :])


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherPromptSpec:
    """All that decides what a teacher reads in a domain."""

    key: str
    """The prompt's place in the pipeline, for errors."""
    config: TeacherPromptConfig | None
    """None: the row's own messages, or its text, in the tokens and by the template of `tokenizer`."""
    tokenizer: Any
    """The tokenizer with the teacher's chat template: `load_teacher_tokenizer`."""
    student_tokenizer: Any
    day: date | None
    """See `encode_prompt`."""
    student_variables: Mapping[str, Any]
    """Variables of the student's chat template, as far as the teacher gets them too."""
    text: str = ""
    """Text with which each prompt begins; see `mark_prompt`."""
    own_tokens: bool = False
    """True if the tokenizer is another one than the student's."""
    has_turns: bool = False
    """True if the prompts begin episodes, in which messages of an environment follow the response."""
    encode_opening: Callable[[Messages], Sequence[int]] | None = None
    """Encodes the messages that open an episode, with the tools of its environment; None: there are none to list."""

    def list_variables(self, line: PromptLine) -> dict[str, Any]:
        """Return the variables of the teacher's chat template for a row."""
        own = {} if self.config is None else self.config.template_kwargs
        return {**self.student_variables, **line.variables, **own}

    def write_prompt(self, line: PromptLine) -> tuple[str | Messages, list[str]]:
        """Return the prompt for a row, and the contents of messages that are not the row's; nothing for a row without text.

        Raises: what `TeacherPromptWriter.write_messages` raises.
        """
        if is_blank(line.prompt):
            return "", []
        line = line.model_copy(update={"prompt": mark_prompt(line.prompt, self.text)}) if self.text else line
        return (line.prompt, []) if self._writer is None else self._writer.write_messages(line)

    @property
    def has_messages(self) -> bool:
        """True if the teacher reads messages even where the row is plain text."""
        return self.config is not None and self.config.has_messages

    @cached_property
    def _writer(self) -> TeacherPromptWriter | None:
        return TeacherPromptWriter(self.config) if self.config is not None and self.config.has_messages else None


def render_teacher_prompt(spec: TeacherPromptSpec, rows: Rows, domain: str, place: int) -> str:
    """Return the text of what a teacher reads for one row, `rows[place]`. Raises: PromptError."""
    from jinja2 import TemplateError

    line = rows[place]
    try:
        messages, _ = spec.write_prompt(line)
        return render_prompt(spec.tokenizer, messages, spec.day, **spec.list_variables(line))
    except (TemplateError, ValueError, TypeError) as error:
        raise _make_error(spec, rows, domain, place, str(error)) from None


def load_teacher_prompts(spec: TeacherPromptSpec, prompts: PromptTable) -> TeacherPromptTable:
    """Render and tokenise a teacher's prompts for all rows of a domain. `prompts`: the student's, of the same rows.

    Raises: PromptError for a row for which there is none, or after which the template does not take a response.
    """
    rows = prompts.rows
    # The key of the cache knows nothing of tools.
    cached = rows.cached and hasattr(spec.tokenizer, "backend_tokenizer") and spec.encode_opening is None
    settings = {**spec.student_variables, "teacher": spec.config.model_dump(mode="json") if spec.config else None}
    tokens = open_batches(
        f"teacher-{make_cache_key(rows, spec.tokenizer, spec.day, settings, spec.text)}" if cached else "",
        SCHEMA,
        lambda: in_batches(_encode_rows(spec, rows, prompts.domain), SCHEMA),
        cached=cached,
    )
    prove_responses(spec, prompts)
    return TeacherPromptTable(rows, tokens)


def _encode_rows(spec: TeacherPromptSpec, rows: Rows, domain: str) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """Yield a row of `SCHEMA` for each prompt. Raises: PromptError."""
    from jinja2 import TemplateError

    for start in range(0, len(rows), ENCODED_AT_ONCE):
        lines = rows.read_lines(start, start + ENCODED_AT_ONCE)
        prompts: list[str | Messages] = []
        required: list[list[str]] = []
        for place, line in enumerate(lines, start=start):
            try:
                messages, own = spec.write_prompt(line)
            except (TemplateError, ValueError) as error:
                raise _make_error(spec, rows, domain, place, str(error)) from None
            prompts.append(messages)
            required.append(own)
        variables = [spec.list_variables(line) for line in lines]
        for index, ids in enumerate(_encode_batch(spec, prompts, variables, required, rows, domain, start)):
            if prompts[index] and not len(ids):
                raise _make_error(spec, rows, domain, start + index, "a teacher's prompt that renders to nothing")
            yield np.asarray(ids, np.int32), len(ids)


def _encode_batch(
    spec: TeacherPromptSpec,
    prompts: Sequence[str | Messages],
    variables: Sequence[Mapping[str, Any]],
    required: Sequence[Sequence[str]],
    rows: Rows,
    domain: str,
    start: int,
) -> list[Sequence[int]]:
    """Return the token ids of the prompts of the rows from `start`. Raises: PromptError naming the one that cannot be encoded."""
    from jinja2 import TemplateError

    try:
        encoded = encode_prompts(spec.tokenizer, prompts, spec.day, variables, required)
        if spec.encode_opening is None:
            return encoded
        openings = zip(prompts, encoded, strict=True)
        return [ids if isinstance(messages, str) else spec.encode_opening(messages) for messages, ids in openings]
    except (TemplateError, ValueError, TypeError) as error:
        if len(prompts) == 1:
            raise _make_error(spec, rows, domain, start, str(error)) from None
    parts = (slice(index, index + 1) for index in range(len(prompts)))
    return [_encode_batch(spec, prompts[p], variables[p], required[p], rows, domain, start + p.start)[0] for p in parts]


def prove_responses(spec: TeacherPromptSpec, prompts: PromptTable) -> None:
    """Prove for the first rows that a response may follow the teacher's prompt just as it follows the student's.

    With an answer behind it, the template writes the same prompt and then the answer as it is. What it writes between the two is
    what the student's template writes there, too, apart from thoughts; in an episode also what it writes after the answer, up to the
    next turn. If both read messages by the student's own template, nothing is to be proven. Raises: PromptError.
    """
    from jinja2 import TemplateError

    for place in range(min(PROVEN, len(prompts.rows))):
        line = prompts.rows[place]
        if is_blank(line.prompt) or not _may_differ(spec, line):
            continue
        try:
            messages, _ = spec.write_prompt(line)
            assert not isinstance(messages, str)
            gaps = _find_gaps(spec.tokenizer, messages, spec.day, spec.list_variables(line), turns=spec.has_turns)
        except (TemplateError, ValueError, TypeError) as error:
            raise _make_error(spec, prompts.rows, prompts.domain, place, str(error)) from None
        sides = zip(gaps, _find_student_gaps(spec, line), ("its prompt and an answer", "two turns"), strict=True)
        for gap, student_gap, between in sides:
            if gap != student_gap:
                has = f"has {student_gap!r:.60} there" if student_gap else "has no such text"
                fault = f"a chat template that writes {gap!r:.60} between {between}; what the student writes and reads {has}"
                raise _make_error(spec, prompts.rows, prompts.domain, place, fault)


def _may_differ(spec: TeacherPromptSpec, line: PromptLine) -> bool:
    """Return True if the teacher's template may treat a response otherwise than the student's does."""
    if isinstance(line.prompt, str):
        return spec.has_messages
    return spec.own_tokens or (spec.config is not None and spec.config.template is not None)


def _find_student_gaps(spec: TeacherPromptSpec, line: PromptLine) -> tuple[str, str]:
    """Return `_find_gaps` of the student's chat template; of plain text, which has nothing between its pieces."""
    from jinja2 import TemplateError

    if isinstance(line.prompt, str):
        return "", OBSERVATION if spec.has_turns else ""
    variables = {**spec.student_variables, **line.variables}
    try:
        return _find_gaps(spec.student_tokenizer, line.prompt, spec.day, variables, turns=spec.has_turns)
    except (TemplateError, ValueError, TypeError):
        return "", ""  # nothing is known of a template that refuses an answer


def _find_gaps(
    tokenizer: Any, messages: Messages, day: date | None, variables: Mapping[str, Any], *, turns: bool
) -> tuple[str, str]:
    """Return what a chat template writes between a prompt and an answer and, with `turns`, between this and the next one, which follows
    an observation; both without thoughts and white space.

    Raises: ValueError for a template that does not write the prompt and then the answer; what `render_prompt` raises.
    """
    prompt = render_prompt(tokenizer, messages, day, **variables)
    # Templates that open the thoughts of a new turn do not do so in a turn that is over.
    head = re.sub(r"<think>\s*(</think>\s*)?\Z", "", prompt)
    answered = [*messages, {"role": "assistant", "content": ANSWER}]
    if turns:
        answered.append({"role": "user", "content": OBSERVATION})
    whole = render_prompt(tokenizer, answered, day, **{**variables, "add_generation_prompt": turns})
    gap, answer, following = whole[len(head) :].partition(ANSWER)
    if not whole.startswith(head) or not answer:
        raise ValueError(
            "a chat template that cuts or changes what it has written once an answer follows, or the answer"
        )
    return _THOUGHTS.sub("", gap), _THOUGHTS.sub("", following) if turns else ""


def find_leaks(config: TeacherPromptConfig, rows: Rows) -> dict[str, list[int]]:
    """Return column that the teacher's prompt reads -> indices of the rows whose own prompt, which the student reads, has its text."""
    names = [name for name in config.row_columns if name != "metadata"]
    leaks: dict[str, list[int]] = {name: [] for name in names}
    for index, line in enumerate(rows if names else ()):
        question = line.prompt if isinstance(line.prompt, str) else "\n".join(m["content"] for m in line.prompt)
        values = read_columns(line)
        for name in names:
            text = str(values.get(name, "")).strip()
            if len(text) >= LEAKED and text in question:
                leaks[name].append(index)
    return leaks


def _make_error(spec: TeacherPromptSpec, rows: Rows, domain: str, place: int, fault: str) -> PromptError:
    return PromptError.at(
        f"{spec.key}, {rows.label}: prompt {domain}/{rows.row_number(place)}",
        found=fault,
        wanted="a row and a chat template that give the teacher a prompt, after which the student's response stands as it is",
        fix=f"correct {spec.key} or the row",
    )
