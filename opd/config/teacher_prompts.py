"""A teacher's own prompt: what it reads, in place of the student's prompt, before the student's response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from opd.config.prompts import ChatTemplateKwargs
from opd.settings.strict import Strict, UserPath

OWN_COLUMNS = ("answer", "completion", "metadata")
"""Columns of a row that have these names whatever the data set calls them."""
ROW = "row"
"""The one variable of a teacher's texts."""


def list_row_columns(text: str) -> list[str]:
    """Return the columns that a text of a teacher's prompt reads, as `{{ row.NAME }}` or `{{ row["NAME"] }}`.

    Raises: PydanticCustomError for a text that jinja2 cannot parse, that reads another variable, or the row as a whole.
    """
    from jinja2 import TemplateSyntaxError, meta, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        tree = ImmutableSandboxedEnvironment().parse(text)
    except TemplateSyntaxError as error:
        raise _text_error(text, f"text in which jinja2 reads {{{{ ... }}}}: {error.message}") from None
    columns = [node.attr for node in tree.find_all(nodes.Getattr) if _is_row(node.node)]
    for node in tree.find_all(nodes.Getitem):
        if _is_row(node.node) and isinstance(node.arg, nodes.Const):
            columns.append(str(node.arg.value))
    names = meta.find_undeclared_variables(tree)
    uses = sum(_is_row(node) for node in tree.find_all(nodes.Name))
    if names - {ROW} or uses > len(columns):
        raise _text_error(text, "no variable but columns of the row, each by its name: {{ row.solution }}")
    return list(dict.fromkeys(columns))


def _is_row(node: Any) -> bool:
    return getattr(node, "name", None) == ROW


def _text_error(text: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError("teacher_text", "{wanted}", {"wanted": expected, "found": f"{text:.60}"})


def _check_text(text: str) -> str:
    list_row_columns(text)
    if not text.strip():
        raise _text_error(repr(text), "some text; leave the key out for none")
    return text


RowText = Annotated[str, AfterValidator(_check_text)]
"""Text in which jinja2 fills in columns of the prompt's row."""


class TeacherMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: RowText


class TeacherPromptConfig(Strict):
    system: RowText | None = None
    """System message in the place of the row's own. `{{ row.solution }}`: the row's column `solution`, which the student
    does not read; the same in `messages`."""
    template: UserPath | None = None
    """File with the chat template, in jinja2; default: the student's."""
    template_kwargs: ChatTemplateKwargs = {}
    """Variables for the chat template, beside the student's own."""
    messages: list[TeacherMessage] = []
    """Messages before those of the row, such as solved examples."""
    effort: bool | None = None
    """False: without the tag of the student's effort, see docs/efforts.md; default: with it."""
    max_model_len: int | None = Field(None, ge=8)
    """Context in tokens, this prompt and the response; default: `rollout.max_model_len`."""

    @property
    def row_columns(self) -> tuple[str, ...]:
        """The columns of rows that the texts read."""
        texts = [self.system or "", *(message.content for message in self.messages)]
        return tuple(dict.fromkeys(name for text in texts for name in list_row_columns(text)))

    @property
    def more_columns(self) -> tuple[str, ...]:
        """Those of `row_columns` that are read for no other reason."""
        return tuple(name for name in self.row_columns if name not in OWN_COLUMNS)

    @property
    def has_messages(self) -> bool:
        """True if even a prompt of plain text becomes messages; False if the teacher's prompt only lacks the tag of the effort."""
        return bool(self.system or self.template or self.template_kwargs or self.messages)

    @model_validator(mode="after")
    def _check_content(self) -> TeacherPromptConfig:
        if not self.has_messages and self.effort is not False:
            raise PydanticCustomError(
                "teacher_prompt", "`system`, `template`, `template_kwargs` or `messages`", {"found": "none of them"}
            )
        return self
