"""The YAML of `opd experts train`: one base model and the experts trained from it. Needs no torch.

Paths are relative to the directory that `opd` was started in.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from opd.config.prompts import ChatTemplateKwargs, ToolCallParser
from opd.settings.strict import NUMPY_SEEDS, Name, Strict, UserPath
from opd.settings.yaml_files import no_such_yaml_error

BASE = "base"
"""Name of a new base's directory."""


class TrainSettings(Strict):
    """One supervised fine-tuning run; the names are those of transformers' `TrainingArguments`."""

    max_steps: int = Field(..., ge=1)
    learning_rate: float = Field(..., gt=0)
    per_device_train_batch_size: int = Field(8, ge=1)
    warmup_steps: int = Field(0, ge=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    max_length: int = Field(512, ge=2)
    """Longer rows (prompt and completion, or a whole episode) are left out and counted."""
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    bf16: bool = False
    """Compute in bfloat16 with float32 weights."""
    train_sampling_strategy: Literal["random", "group_by_length"] | None = None
    """`group_by_length`: rows of like lengths share a batch; default: `random`."""

    @model_serializer(mode="wrap")
    def _dump_without_none(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump without keys that are None, so that a `training.json` of an older version, which lacks them, compares equal."""
        return {key: value for key, value in dump(self).items() if value is not None}


class FromScratch(Strict):
    """A small Llama with random weights."""

    tokenizer: Literal["letters"]
    """`letters`: one token per character, as the letters suite needs it."""
    hidden_size: int = Field(..., ge=8)
    layers: int = Field(..., ge=1)
    heads: int = Field(..., ge=1)
    intermediate_size: int = Field(..., ge=8)
    tie_word_embeddings: bool = True
    max_position_embeddings: int = Field(128, ge=8)

    @model_validator(mode="after")
    def _heads_divide(self) -> FromScratch:
        if self.hidden_size % (2 * self.heads):
            raise PydanticCustomError(
                "heads",
                "hidden_size / heads must be an even whole number",
                {"found": f"hidden_size {self.hidden_size}, heads {self.heads}"},
            )
        return self


class BaseSpec(Strict):
    """The model that the experts start from: exactly one of `model` and `from_scratch`."""

    model: UserPath | None = None
    """Hugging Face directory, safetensors only."""
    from_scratch: FromScratch | None = None
    """A new model, written to OUTPUT_DIR/base."""
    data: tuple[UserPath, ...] = ()
    """Prompt files with completions or episodes on which the base is trained first. Without them `model` is the base as
    it is."""
    train: TrainSettings | None = None
    """Settings of that training; default for each: the spec's `train`."""
    template_date: date | None = None
    """Same as the merge's `student.template_date`; default: today."""
    tool_call_parser: ToolCallParser = "auto"
    """Same as the merge's `student.tool_call_parser`."""

    @property
    def template_reading(self) -> dict[str, Any]:
        """The settings that decide how the chat template is read, without those at their defaults.

        Defaults are left out so that a `training.json` of an older version, which lacks these keys, compares equal.
        """
        return self.model_dump(mode="json", include={"template_date", "tool_call_parser"}, exclude_defaults=True)

    @property
    def existing_model(self) -> Path | None:
        """The existing model that serves as base unchanged; None for a base that is made, or trained first."""
        return None if self.data else self.model

    @model_validator(mode="after")
    def _one_origin(self) -> BaseSpec:
        origins = [key for key in ("model", "from_scratch") if getattr(self, key)]
        if len(origins) != 1:
            raise PydanticCustomError(
                "origin", "exactly one of `model` and `from_scratch`", {"found": " and ".join(origins) or "neither"}
            )
        if bool(self.data) != (self.train is not None):
            actual = "`data` alone" if self.data else "`train` alone"
            raise PydanticCustomError("origin", "`data` and `train` together, or neither", {"found": actual})
        return self


class LoraSettings(Strict):
    r: int = Field(16, ge=1)
    alpha: float = Field(32, gt=0)
    target_modules: str | list[str] = "all-linear"


class ExpertSpec(Strict):
    domain: Name
    data: UserPath
    """Prompt file whose completions or episodes the expert learns."""
    train: TrainSettings
    """Settings for this expert; default for each: the spec's `train`."""


class FromBase(Strict):
    """Fields that every method needs: one base, and the directory of its experts."""

    output_dir: UserPath
    """Gets one subdirectory per expert, and `base` for a base that is made or trained first."""
    seed: int = Field(0, ge=0)
    base: BaseSpec
    add_special_tokens: bool = True
    """Same as the merge's `student.add_special_tokens`."""
    chat_template_kwargs: ChatTemplateKwargs = Field(default_factory=dict)
    """Same as the merge's `student.chat_template_kwargs`."""
    registry: UserPath | None = None
    """Registry for finished experts; default: none is registered."""

    @property
    def training_seed(self) -> int:
        """The seed, reduced to the range that numpy takes."""
        return self.seed % NUMPY_SEEDS

    @property
    def base_dir(self) -> Path:
        """Directory of the base, which may not exist yet."""
        return self.base.existing_model or self.output_dir / BASE

    @model_validator(mode="after")
    def _base_is_no_expert(self) -> Self:
        if not self.base.existing_model and BASE in getattr(self, "experts", ()):
            raise PydanticCustomError(
                "base_name", "an expert name other than `base`, which is the base's directory", {"found": BASE}
            )
        return self


class ExpertsSpec(FromBase):
    """One base and the experts that are fine-tuned from it, one after the other."""

    method: Literal["full", "lora"] = "full"
    """`lora` trains adapters and merges them into the saved weights."""
    lora: LoraSettings = LoraSettings()
    train: TrainSettings
    experts: dict[Name, ExpertSpec] = Field(..., min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _share_train(cls, data: Any) -> Any:
        """Merge the spec's `train` under each expert's and the base's, so that errors name the key as it was written."""
        if not isinstance(data, Mapping) or not isinstance(shared := data.get("train"), Mapping):
            return data
        data = dict(data)
        if isinstance(base := data.get("base"), Mapping) and base.get("data"):
            data["base"] = _with_train(base, shared)
        if isinstance(experts := data.get("experts"), Mapping):
            data["experts"] = {name: _with_train(expert, shared) for name, expert in experts.items()}
        return data


def list_shipped_specs() -> dict[str, Path]:
    """Return name -> file of every training spec that comes with the package."""
    spec_files = sorted((file for file in files("experts").iterdir() if file.name.endswith(".yaml")), key=str)
    return {file.name.removesuffix(".yaml"): Path(str(file)) for file in spec_files}


def find_spec(name_or_path: str) -> Path:
    """Return the file of a shipped spec, or the path of one of the user's. Raises: ConfigError if there is neither."""
    shipped, path = list_shipped_specs(), Path(name_or_path)
    if name_or_path not in shipped and not path.exists():
        raise no_such_yaml_error(path, shipped, "a shipped training spec", "check the path, or name a shipped one")
    return shipped.get(name_or_path, path)


def _with_train(section: Any, shared: Mapping[str, Any]) -> Any:
    if not isinstance(section, Mapping):
        return section
    train = section.get("train", {})
    return {**section, "train": {**shared, **train} if isinstance(train, Mapping) else train}
