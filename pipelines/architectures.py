"""Whether every model of a merge is one that its roles can run, found before any worker starts.

    student                          trained by transformers, rolled out by vLLM
    experts, engine `transformers`   scored by transformers; measured in the rollout engine if their domain has an exam
    experts, engine `vllm`           scored and measured by vLLM

Reads headers: which of a file's tensors make which of a module's is tried out on shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experts.adapter import AdapterInfo
from experts.model_dir import ModelInfo, weight_tensors
from opd.config import PipelineConfig
from opd.errors import ConfigError, ModelError
from opd.rollouts.served import refusal
from pipelines.routes import Expert

LOCAL = ("transformers", "vllm")
"""Engines that score on our own machines."""


def refuse_unservable(config: PipelineConfig, student: ModelInfo, experts: Mapping[str, Expert]) -> None:
    """Raises: ModelError, ConfigError for the first model that one of its roles cannot run."""
    cpu = not config.cluster.rollout_gpus
    seen: dict[tuple[str, ...], Any] = {}
    _check_modules(Path(student.path), student, seen)
    _check_engine(Path(student.path), student, config.rollout.dtype, cpu)
    engine = config.teachers.engine
    for name, expert in experts.items():
        if engine not in LOCAL:
            continue
        path = Path(expert.info.path)
        if engine == "vllm":
            _check_engine(path, expert.info, config.teachers.dtype, not config.cluster.teacher_gpus)
            continue
        layout = _check_modules(path, expert.info, seen)
        if expert.adapter is not None:
            _check_adapter(name, expert.adapter, layout)
        if config.domains[expert.domain].eval is not None if expert.domain in config.domains else False:
            _check_engine(path, expert.info, config.rollout.dtype, cpu)


def _check_modules(path: Path, info: ModelInfo, seen: dict[tuple[str, ...], Any]) -> Any:
    """The model's layout in transformers, whose modules its files fill. Raises: ModelError."""
    key = (info.architecture, (path / "config.json").read_text(encoding="utf-8"), *sorted(info.weight_files.values()))
    if key not in seen:
        seen[key] = _layout(path, info)
    return seen[key]


def _layout(path: Path, info: ModelInfo) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from opd.model_weights import Layout

    file = path / "config.json"
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        known = AutoModelForCausalLM._model_mapping.get(type(config), None)
    except ValueError:  # what transformers raises for a model type that it does not know
        known = None
    if known is None:
        raise ModelError.at(
            f"{file}: model_type",
            found=f"{info.model_type!r}, which transformers has no causal language model for",
            wanted="an architecture of AutoModelForCausalLM",
            fix="take another model, or the version of transformers that knows this one",
        )
    if info.architecture != known.__name__ and not info.architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise ModelError.at(
            f"{file}: architectures",
            found=info.architecture,
            wanted=f"a causal language model, for {info.model_type} {known.__name__}",
            fix="AutoModelForCausalLM.from_pretrained(dir).save_pretrained(out) writes the part that writes text",
        )
    layout = Layout(config, torch.float32)
    shapes = {n: torch.empty(t.shape, dtype=torch.float32, device="meta") for n, t in weight_tensors(path).items()}
    _, problem = layout.from_files(shapes)
    if problem:
        raise ModelError.at(
            path,
            found=f"weights that do not fit config.json: {problem}",
            wanted=f"what {known.__name__} of transformers has, no more and no less",
            fix="copy the directory again, or save the model again with save_pretrained",
        )
    return layout


def _check_adapter(name: str, adapter: AdapterInfo, layout: Any) -> None:
    """Raises: ModelError for an adapter of a module that is not linear, such as an expert of a mixture."""
    from torch import nn

    from experts.safetensors_header import read_header
    from opd.lora import ADAPTER_WEIGHTS, split_name

    modules = dict(layout.model.named_modules())
    for tensor in read_header(Path(adapter.path) / ADAPTER_WEIGHTS):
        part = split_name(tensor)
        if part is not None and not isinstance(modules.get(part[0]), nn.Linear):
            raise ModelError.at(
                f"expert `{name}`: {Path(adapter.path) / ADAPTER_WEIGHTS}",
                found=f"an adapter of {part[0]}, which is no linear module of {type(layout.model).__name__} in transformers",
                wanted="adapters of linear modules; transformers keeps the experts of a mixture in one tensor",
                fix="merge the adapter into a full model, or set teachers.engine to vllm",
            )


def _check_engine(path: Path, info: ModelInfo, dtype: str, cpu: bool) -> None:
    """Raises: ModelError, ConfigError if a vLLM engine cannot serve the model."""
    from transformers import AutoConfig

    found = refusal(AutoConfig.from_pretrained(path, trust_remote_code=False), info.architecture, dtype, cpu)
    if found is None:
        return
    if found.where.startswith("rollout."):
        raise ConfigError.at(found.where, found=found.found, wanted=found.wanted, fix=found.fix)
    raise ModelError.at(f"{path / 'config.json'}: {found.where}", found=found.found, wanted=found.wanted, fix=found.fix)
