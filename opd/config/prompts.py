"""The source of prompts in a pipeline: a path, or a mapping that also chooses rows and columns of a data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, JsonValue, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Name, Strict, UserPath
from opd.tool_formats import check_parser_name

Column = Literal["prompt", "completion", "answer", "metadata", "system", "tools", "chat_template_kwargs"]

CHAT_COLUMNS: tuple[Column, ...] = ("system", "tools", "chat_template_kwargs")
"""Columns that only a chat template reads, so that a prompt of plain text has no use for them."""
RENDERING = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"),
    *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "strftime_now", "tokenize"),
    *("tokenizer_kwargs", "tools", "truncation"),
}
"""Names that no variable of a chat template may have: arguments of `apply_chat_template`, and variables that it sets itself."""


def _refuse_rendering(variables: dict[str, Any]) -> dict[str, Any]:
    if reserved := RENDERING.intersection(variables):
        raise PydanticCustomError("variables", "variables of the chat template's own", {"found": f"`{min(reserved)}`"})
    return variables


ChatTemplateKwargs = Annotated[dict[str, JsonValue], AfterValidator(_refuse_rendering)]
ToolCallParser = Annotated[str, AfterValidator(check_parser_name)]
"""Form of a model's calls of tools, by the names of `opd.tool_formats`."""


def _scalar_kind(value: Any) -> str:
    kinds = {str: "~text", bool: "~bool", int: "~whole"}
    return kinds.get(type(value), "~number")


Scalar = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[bool, Tag("~bool")]
    | Annotated[int, Tag("~whole")]
    | Annotated[float, Tag("~number")],
    Discriminator(_scalar_kind),
]


class FilterConfig(Strict):
    column: str
    """Column of the data set, by its own name."""
    equals: Scalar | None = None
    """Keep rows with this value; in CSV compared as text."""
    one_of: Annotated[list[Scalar], Field(min_length=1)] | None = None
    """Instead of `equals`: keep rows with one of these values."""

    @model_validator(mode="after")
    def _check_one_rule(self) -> FilterConfig:
        if (self.equals is None) == (self.one_of is None):
            actual = "neither" if self.equals is None else "both"
            raise PydanticCustomError("filter", "either `equals` (a value) or `one_of` (a list)", {"found": actual})
        return self


class PromptsConfig(Strict):
    path: UserPath
    """A path, see docs/pipelines.md#prompts, or `owner/name` of the Hugging Face hub."""
    name: str | None = None
    """Configuration of a hub data set or directory, such as `main`."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set; only a commit is the same tomorrow."""
    split: Name | None = None
    """Default: `train`, or the only one."""
    columns: dict[Column, Annotated[str, Field(min_length=1)] | None] = {}
    """The data set's names for our columns: `{prompt: question, answer: solution}`. `null`: not read."""
    chat: bool = False
    """Read `prompt` as a chat, see docs/pipelines.md#prompts; default: as plain text."""
    filter: FilterConfig | None = None
    """Keep only rows with this value in this column."""
    shuffle_seed: int | None = Field(None, ge=0)
    """Shuffle the rows, so that `limit` and exams take a random sample."""
    limit: int | None = Field(None, ge=1)
    """Read at most so many rows, after filter and shuffle."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Leave out longer prompts; the run says how many."""
    _more_columns: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _check_prompt_column(self) -> PromptsConfig:
        if self.columns.get("prompt", "") is None:
            raise PydanticCustomError("columns", "a column that asks", {"found": "no column `prompt`"})
        return self

    @property
    def prompt_column(self) -> str:
        """Name of the prompt column in the data set."""
        return self.columns.get("prompt") or "prompt"

    @property
    def named_columns(self) -> dict[Column, str]:
        """Our name of a column -> the data set's name, for the columns that the pipeline names and does not switch off."""
        return {column: name for column, name in self.columns.items() if name is not None}

    @property
    def more_columns(self) -> tuple[str, ...]:
        """The data set's names of the columns that are read for teachers' prompts and judges alone."""
        return self._more_columns

    def with_more_columns(self, names: Iterable[str]) -> PromptsConfig:
        """Return the same source, of which these columns are read, too, for teachers' prompts or a judge."""
        changed = self.model_copy()
        changed._more_columns = tuple(sorted({*self._more_columns, *names}))
        return changed

    def without_columns(self, *names: Column) -> PromptsConfig:
        """Return the same source, with these columns switched off."""
        return self.model_copy(update={"columns": {**self.columns, **dict.fromkeys(names)}})


def _prompts_kind(value: Any) -> str:
    # pydantic also calls this with values that it has already parsed: a Path, or a `PromptsConfig`.
    return "~more" if isinstance(value, (Mapping, PromptsConfig)) else "~text"


Prompts = Annotated[
    Annotated[UserPath, Tag("~text")] | Annotated[PromptsConfig, Tag("~more")], Discriminator(_prompts_kind)
]
"""A path alone is a file or directory on this machine; only the mapping may name a data set of the hub."""


def as_prompts_config(prompts: Path | PromptsConfig) -> PromptsConfig:
    """Return the mapping form of a source that may be a path alone."""
    return prompts if isinstance(prompts, PromptsConfig) else PromptsConfig(path=prompts)
