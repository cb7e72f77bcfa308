"""The facts about the models of a merge from which its memory is estimated: read from configurations and headers, never from weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from experts.adapter import AdapterInfo
from experts.json_files import read_json, validate_json
from experts.model_dir import ModelInfo, inspect_model
from experts.weight_files import weight_tensors
from opd.config import PipelineConfig
from opd.errors import ConfigError, ModelError
from opd.models.lora import LoraSize
from opd.prompts import PromptTable
from opd.records.types import Teacher, WeightedTeacher
from pipelines.catalog import PLANS
from pipelines.routes import START, RoutedExpert
from pipelines.sizing.formulas import ShapeConfig, make_shape
from pipelines.sizing.shape import Body, Shape
from pipelines.teacher_groups import TeacherGroup, divide_by_engine

TOLERANCE = 0.01
"""Share by which the number of parameters by the formulas may differ from that of the weight files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeModels:
    """Student and teachers of a merge, and the other facts on which its memory depends."""

    student: ModelInfo
    scorers: dict[str, RoutedExpert]
    """Name -> every teacher who scores a domain: experts, and the start student if a domain's target lies beyond its experts
    and the trainer does not ask it."""
    scoring: dict[str, tuple[WeightedTeacher, ...]]
    """Domain -> the teachers that score its responses, with their weights."""
    prompts: dict[str, PromptTable] = field(default_factory=dict)
    """Domain -> training prompts."""
    lora: LoraSize | None = None
    """Numbers of parameters that are trained and pushed; None if all of the student is."""
    bodies: Mapping[str, Body] = field(default_factory=dict)
    """Directory -> sizes of the layers of a model whose weights are not on this machine."""

    def read_body(self, model: ModelInfo) -> Body:
        """Return the sizes of a model's layers. Raises: ModelError for weights that cannot be read."""
        return self.bodies.get(model.path) or read_body(Path(model.path))

    @property
    def trained(self) -> int:
        """Parameters that are trained, for which the optimiser has a state."""
        return self.lora.trained if self.lora else self.student.parameters

    @property
    def pushed(self) -> int:
        """Parameters that a push brings to the rollout engines."""
        return self.lora.pushed if self.lora else self.student.parameters

    @property
    def experts(self) -> dict[str, RoutedExpert]:
        """Name -> expert, for each that scores a domain; without the start student."""
        return {name: expert for name, expert in self.scorers.items() if name != START}


def divide_models(config: PipelineConfig, models: MergeModels) -> list[tuple[PipelineConfig, MergeModels]]:
    """Return for each group of teachers its pipeline, and the models of the merge with the group's teachers alone."""
    groups = divide_by_engine(config, models.scoring)
    if len(groups) == 1:
        return [(groups[0].config, models)]
    return [(group.config, _select_models(models, group)) for group in groups]


def _select_models(models: MergeModels, group: TeacherGroup) -> MergeModels:
    names = {assigned.teacher.name for part in group.scoring.values() for assigned in part}
    scorers = {name: expert for name, expert in models.scorers.items() if name in names}
    return replace(models, scorers=scorers, scoring=dict(group.scoring))


def refuse_past_context(config: PipelineConfig, student: ModelInfo) -> None:
    """Raises: ConfigError if the rollout context is longer than the student's."""
    if student.context is not None and config.rollout.max_model_len > student.context:
        raise ConfigError.at(
            "rollout.max_model_len",
            found=str(config.rollout.max_model_len),
            wanted=f"at most {student.context}, the context of {config.student.model}",
            fix=f"set rollout.max_model_len to {student.context} or less",
        )


def unhashed_expert(name: str, domain: str, info: ModelInfo, adapter: AdapterInfo | None = None) -> RoutedExpert:
    """Return an expert with the paths of its directories in place of hashes: nothing is hashed, and paths tell weights apart too."""
    base, adapter_dir = info.path, adapter.path if adapter else ""
    teacher = Teacher(
        name=name,
        model_dir=Path(base),
        adapter_dir=Path(adapter_dir) if adapter_dir else None,
        digest=adapter_dir or base,
        base_digest=base if adapter_dir else "",
    )
    return RoutedExpert(teacher=teacher, domain=domain, info=info, adapter=adapter, prompts=None)


def locate_file(model_dir: Path, name: str = "config.json") -> Path:
    """Return a file of a model directory; if the directory is missing, the file that is shipped under the same relative path."""
    shipped = PLANS / model_dir / name
    return shipped if not model_dir.exists() and not model_dir.is_absolute() and shipped.is_file() else model_dir / name


def has_weights(model_dir: Path) -> bool:
    """Return True if the model or adapter is here with its weights, not as a configuration alone."""
    return any(model_dir.glob("*.safetensors"))


def read_config(model_dir: Path) -> ShapeConfig:
    """Return the config of a model directory, or the shipped one. Raises: ModelError if there is no config.json, or a bad one."""
    file = locate_file(model_dir)
    if not file.is_file():
        raise ModelError.at(
            file,
            found="no such file",
            wanted="the model's configuration: a plan needs nothing else of a model",
            fix="copy config.json from the original model, or make the model first",
        )
    data = read_json(file)
    text = data.get("text_config")
    return validate_json(ShapeConfig, {**text, **data} if isinstance(text, dict) else data, file)


def read_shape(model_dir: Path) -> Shape:
    """Return the shape of a model directory. It is checked against the weights if they are there.

    Raises: as `read_config`; ModelError for a kind without formulas, or if these give another number of parameters than the files have.
    """
    file = locate_file(model_dir)
    shape = make_shape(read_config(model_dir), file)
    if has_weights(model_dir):
        stored = sum(tensor.numel for tensor in weight_tensors(model_dir).values())
        if abs(stored - shape.parameters) > TOLERANCE * stored:
            raise ModelError.at(
                file,
                found=f"{shape.parameters:,} parameters by the formulas of {shape.kind}, {stored:,} in the weight files",
                wanted="numbers that agree within 1 %",
                fix="look for a key of the config that pipelines/sizing/formulas.py does not read",
            )
    return shape


def read_body(model_dir: Path) -> Body:
    """Return the sizes of a model's layers: by the formulas of its kind, which know how many experts of a mixture a token passes, or
    from the header of its weights if there are no formulas or they do not fit. Raises: ModelError for weights that cannot be read."""
    tensors = weight_tensors(model_dir)
    try:
        return read_shape(model_dir).body
    except ModelError:
        body = Body.from_tensors(tensors)
        return body if body.kv_values else replace(body, kv_values=2 * _keys_by_config(model_dir))


def _keys_by_config(model_dir: Path) -> int:
    """Return the number of values of a token's keys in all layers, for a model that has keys, queries and values in one matrix."""
    from opd.models.weights import load_config

    config = load_config(model_dir).get_text_config(decoder=True)
    layers, heads, width = (
        getattr(config, key, None) or 0 for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    head = getattr(config, "head_dim", None) or width // max(1, heads)
    return int(layers * (getattr(config, "num_key_value_heads", None) or heads) * head)


def model_facts(model_dir: Path, shape: Shape) -> ModelInfo:
    """Return the facts on which memory depends: as `opd check` reads them if the model is here with its weights, else as its shape says.

    Raises: as `inspect_model`.
    """
    if has_weights(model_dir):
        return inspect_model(model_dir, hash_weights=False)
    return ModelInfo(
        path=str(model_dir),
        architecture=shape.kind,
        model_type=shape.kind,
        dtype="bfloat16",
        parameters=shape.parameters,
        hidden_size=shape.hidden,
        vocab_rows=shape.vocab,
        tied=shape.tied,
        final_logit_softcapping=None,
        context=shape.context,
        vocab_size=shape.vocab,
        vocab_hash="",
        eos_token_ids=(),
        pad_token_id=None,
        bos_token_id=None,
        chat_template_hash=None,
        weight_files={},
    )
