"""Where prompts come from: a path, or a mapping that also says which rows and columns of a data set are meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Name, Strict, UserPath

Column = Literal["prompt", "completion", "answer", "metadata", "system", "tools", "chat_template_kwargs"]

OF_CHATS: tuple[Column, ...] = ("system", "tools", "chat_template_kwargs")
"""Columns that only a chat template reads, so that a prompt of plain text has no use for them."""
RENDERING = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages"),
    *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "strftime_now", "tokenize"),
    *("tokenizer_kwargs", "tools", "truncation"),
}
"""What decides how a chat template is rendered, or reaches it in another way: no variables of the template's own."""


def _refuse_rendering(variables: dict[str, Any]) -> dict[str, Any]:
    if odd := RENDERING.intersection(variables):
        raise PydanticCustomError("variables", "variables of the chat template's own", {"found": f"`{min(odd)}`"})
    return variables


ChatTemplateKwargs = Annotated[dict[str, JsonValue], AfterValidator(_refuse_rendering)]


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
    """Column of the data set, by its own name; it need not be one that is read."""
    equals: Scalar | None = None
    """Keep rows with this value. In CSV, where every cell is text, it is compared as text."""
    one_of: Annotated[list[Scalar], Field(min_length=1)] | None = None
    """Instead of `equals`: keep rows with one of these values."""

    @model_validator(mode="after")
    def _one_rule(self) -> FilterConfig:
        if (self.equals is None) == (self.one_of is None):
            found = "neither" if self.equals is None else "both"
            raise PydanticCustomError("filter", "either `equals` (a value) or `one_of` (a list)", {"found": found})
        return self


class PromptsConfig(Strict):
    path: UserPath
    """A file (`.parquet`, `.csv`, anything else is JSONL), a directory that `save_to_disk` of the library `datasets` wrote,
    or a directory of data files. If no such path exists, `owner/name` is a data set of the Hugging Face hub."""
    name: str | None = None
    """Configuration of a hub data set or directory of data files, such as `main`."""
    revision: str | None = None
    """Commit, tag or branch of a hub data set; give a commit to be sure of the same prompts tomorrow."""
    split: Name | None = None
    """Split of a directory or hub data set; default: `train`, or the only one that there is."""
    columns: dict[Column, Annotated[str, Field(min_length=1)] | None] = {}
    """What the data set calls our columns, e.g. `{prompt: question, answer: solution}`; those not named keep their names. `null`: not
    read, e.g. `{tools: null}`."""
    chat: bool = False
    """Read the column `prompt` as a chat, for models with a chat template: a text is what the user says, and of a conversation that
    ends with the assistant's turn, that turn is the `completion`, and the `answer` where the row has none. Default: a text is
    tokenised as it stands, after the tokenizer's begin token, and a conversation goes on after its last turn."""
    filter: FilterConfig | None = None
    """Keep only rows with this value in this column."""
    shuffle_seed: int | None = Field(None, ge=0)
    """Shuffle the rows that are left, so that `limit` and an exam take a random sample; training is shuffled anyway."""
    limit: int | None = Field(None, ge=1)
    """Read at most so many rows, counted after filter and shuffle."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Leave out prompts of more tokens than this; the run says how many they are."""

    @model_validator(mode="after")
    def _some_prompt(self) -> PromptsConfig:
        if self.columns.get("prompt", "") is None:
            raise PydanticCustomError("columns", "a column that asks", {"found": "no column `prompt`"})
        return self

    @property
    def prompt_column(self) -> str:
        """The data set's name of the column that asks."""
        return self.columns.get("prompt") or "prompt"

    @property
    def named_columns(self) -> dict[Column, str]:
        """Our name -> the data set's name, as far as they are written."""
        return {ours: name for ours, name in self.columns.items() if name is not None}

    def without_columns(self, *names: Column) -> PromptsConfig:
        """Return the same prompts, but for these columns, which are not read."""
        return self.model_copy(update={"columns": {**self.columns, **dict.fromkeys(names)}})


def _prompts_kind(value: Any) -> str:
    # pydantic also calls this with values that it has already parsed: a Path, or a `PromptsConfig`.
    return "~more" if isinstance(value, (Mapping, PromptsConfig)) else "~text"


Prompts = Annotated[
    Annotated[UserPath, Tag("~text")] | Annotated[PromptsConfig, Tag("~more")],
    Discriminator(_prompts_kind),
]
"""A path alone is a file or directory of this machine; only the mapping may name the hub."""


def as_prompts_config(prompts: Path | PromptsConfig) -> PromptsConfig:
    """Return the mapping that a path alone is short for."""
    return prompts if isinstance(prompts, PromptsConfig) else PromptsConfig(path=prompts)
