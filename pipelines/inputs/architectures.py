"""Check that every model of a merge is one that its roles can run, before any worker starts.

    the student                          trained by transformers, rolled out by vLLM
    experts                              scored by transformers, vLLM or the trainer, as `teachers.engine` says
    the leading expert of each exam      measured in the rollout engine

Only headers are read. Whether the files' tensors fit the modules is tried with empty tensors of the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experts.adapter import AdapterInfo
from experts.model_dir import ModelInfo
from experts.weight_check import check_weights
from experts.weight_files import weight_shards
from opd.config import PipelineConfig
from opd.config.sections import RolloutConfig
from opd.config.teachers import TrainerTeachers, TransformersTeachers, VLLMTeachers
from opd.errors import ConfigError, ModelError
from opd.rollouts.cpu_patches import RESTARTED
from opd.rollouts.engine_args import find_refused_argument
from opd.rollouts.served_families import Refusal, find_indivisible_part, find_refusal
from pipelines.draft import find_drafted_families
from pipelines.inputs.indexers import refuse_unfit_indexers
from pipelines.inputs.shared_rows import refuse_shared_rows
from pipelines.inputs.tiled_mlps import refuse_tiled_mlps
from pipelines.inputs.transformers_engine import TRANSFORMERS_ENGINE
from pipelines.routes import RoutedExpert


def refuse_untrainable(config: PipelineConfig, student: ModelInfo) -> None:
    """Refuse a student that transformers cannot hold or vLLM cannot serve, or whose new weights would not reach the engine.

    Raises: ModelError; ConfigError for the last reason.
    """
    _refuse_unstreamable(config, student)
    refuse_unfit_indexers(config, student)
    naming = _read_naming(Path(student.path), student)
    refuse_shared_rows(config, naming.model)
    refuse_tiled_mlps(config, naming.model)
    _check_rollout_engine(config, student)
    _refuse_undraftable(config, student)


def _refuse_undraftable(config: PipelineConfig, student: ModelInfo) -> None:
    """Refuse a draft for a student that cannot have it. Raises: ConfigError."""
    if config.draft is None:
        return
    families = find_drafted_families(config.draft.kind)
    if student.model_type not in families:
        raise ConfigError.at(
            "draft",
            found=f"a student of the family {student.model_type}, kind {config.draft.kind}",
            wanted=f"one of {', '.join(families)}, whose inner states a draft of this kind reads",
            fix="set draft.kind to shared_kv, or remove the section `draft`"
            if student.model_type in find_drafted_families("shared_kv")
            else "remove the section `draft`",
        )
    from opd.models.weights import load_config

    layers = load_config(Path(student.path)).get_text_config(decoder=True).num_hidden_layers
    for layer in config.draft.layers or ():
        if not 0 <= layer < layers:
            raise ConfigError.at("draft.layers", found=str(layer), wanted=f"0 to {layers - 1}", fix="remove it")


def refuse_engine_args(config: PipelineConfig) -> None:
    """Refuse keys of `rollout.engine_args` that an engine must not get. Raises: ConfigError for the first one."""
    refusal = find_refused_argument(config.rollout.engine_args, not config.cluster.rollout_gpus)
    if refusal is not None:
        key = f"rollout.engine_args.{refusal.key}"
        raise ConfigError.at(key, found=refusal.found, wanted=refusal.wanted, fix=refusal.fix)


def _refuse_unstreamable(config: PipelineConfig, student: ModelInfo) -> None:
    """Refuse a student whose new weights can reach an engine only as files, if the pipeline sends no files.

    Raises: ConfigError.
    """
    streams = config.push_kind != "shared_memory" and config.rollout.engine != TRANSFORMERS_ENGINE
    if streams and config.student.lora is None and student.model_type in RESTARTED:
        raise ConfigError.at(
            "sync.kind",
            found=f"{config.push_kind} for a student of the family {student.model_type}",
            wanted="shared_memory: vLLM takes this family's experts from files alone",
            fix="set sync.kind to shared_memory, with engines and trainer on one machine; or train adapters (student.lora)",
        )


def refuse_unscorable(config: PipelineConfig, experts: Mapping[str, RoutedExpert]) -> None:
    """Refuse experts that the scoring engine of a group of teachers cannot run. Raises: ModelError for the first one."""
    namings: dict[tuple[str, ...], Any] = {}  # so that equal experts, and adapters of the same base, are checked once
    for name, expert in experts.items():
        if isinstance(config.teachers, VLLMTeachers):
            _check_engine(expert.info, config.teachers, "teachers", not config.cluster.teacher_gpus)
        elif isinstance(config.teachers, TransformersTeachers | TrainerTeachers):
            key = (expert.info.path, *sorted(expert.info.weight_files.values()))
            if key not in namings:
                namings[key] = _read_naming(Path(expert.info.path), expert.info)
            if expert.adapter is not None:
                _check_adapter(name, expert.adapter, namings[key])


def refuse_unmeasurable(config: PipelineConfig, leading: Mapping[str, RoutedExpert]) -> None:
    """Refuse leading experts that the rollout engine cannot serve: they take their domain's exam there. Raises: ModelError."""
    for domain, expert in leading.items():
        if config.domains[domain].eval is not None:
            _check_rollout_engine(config, expert.info)


def _read_naming(path: Path, info: ModelInfo) -> Any:
    """Return the model's naming in transformers. Raises: ModelError if its files do not fill all modules."""
    _refuse_other_kind(path, info)
    naming = check_weights(path)
    _refuse_biased_head(path, naming)
    return naming


def _refuse_biased_head(path: Path, naming: Any) -> None:
    """Refuse an output head with a bias, because targets and losses multiply by the head and add nothing. Raises: ModelError."""
    from safetensors import safe_open

    bias = getattr(naming.model.get_output_embeddings(), "bias", None)
    name = next((name for name, param in naming.model.named_parameters() if param is bias), None)
    for shard in weight_shards(path) if name else []:
        with safe_open(shard, framework="pt") as file:
            head_bias = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118 it is no mapping
        if head_bias is not None and bool((head_bias != 0).any()):
            raise ModelError.at(
                f"{shard}: {name}",
                found=f"an output head with a bias, as {type(naming.model).__name__} has one",
                wanted="a head that is one matrix, or a bias of zeros",
                fix="take models of another family: student and experts share one, and this one is not supported",
            )


def _refuse_other_kind(path: Path, info: ModelInfo) -> None:
    """Refuse a model that is not a causal language model. Raises: ModelError."""
    from opd.models.weights import causal_lm_class

    _, model_class = causal_lm_class(path)
    if info.architecture != model_class.__name__ and not info.architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise ModelError.at(
            f"{path / 'config.json'}: architectures",
            found=info.architecture,
            wanted=f"a causal language model, for {info.model_type} {model_class.__name__}",
            fix="AutoModelForCausalLM.from_pretrained(dir).save_pretrained(out) writes the part that writes text",
        )


def _check_adapter(name: str, adapter: AdapterInfo, naming: Any) -> None:
    """Refuse an adapter of a module that is not linear, such as an expert of a mixture. Raises: ModelError."""
    from torch import nn

    from experts.safetensors_header import read_header
    from opd.models.lora import ADAPTER_WEIGHTS, split_name

    modules = dict(naming.model.named_modules())
    for tensor in read_header(Path(adapter.path) / ADAPTER_WEIGHTS):
        part = split_name(tensor)
        if part is not None and not isinstance(modules.get(part[0]), nn.Linear):
            raise ModelError.at(
                f"expert `{name}`: {Path(adapter.path) / ADAPTER_WEIGHTS}",
                found=f"an adapter of {part[0]}, which is no linear module of {type(naming.model).__name__} in transformers",
                wanted="adapters of linear modules; transformers keeps the experts of a mixture in one tensor",
                fix="merge it into a full model where it was trained, or train one of the attention alone",
            )


def _check_rollout_engine(config: PipelineConfig, info: ModelInfo) -> None:
    """Refuse a model that the rollout engine cannot serve; transformers serves all that it trains. Raises: ModelError."""
    if config.rollout.engine != TRANSFORMERS_ENGINE:
        _check_engine(info, config.rollout, "rollout", not config.cluster.rollout_gpus)


def _check_engine(info: ModelInfo, engine: RolloutConfig | VLLMTeachers, section: str, cpu: bool) -> None:
    """Refuse a model that a vLLM engine cannot serve, or cannot divide among its processes. Raises: ModelError."""
    from transformers import AutoConfig

    config, size = AutoConfig.from_pretrained(info.path, trust_remote_code=False), engine.tensor_parallel_size
    refusal = find_refusal(config, info.architecture, engine.dtype, cpu)
    way_out = f"; or set {section}.engine to transformers{', which is slower' if section == 'rollout' else ''}"
    _raise_unservable(info, refusal and replace(refusal, fix=refusal.fix + way_out))
    if size > 1:
        _raise_unservable(info, find_indivisible_part(config, size, f"{section}.tensor_parallel_size"))


def _raise_unservable(info: ModelInfo, refusal: Refusal | None) -> None:
    if refusal is not None:
        file = Path(info.path) / "config.json"
        raise ModelError.at(f"{file}: {refusal.key}", found=refusal.found, wanted=refusal.wanted, fix=refusal.fix)
