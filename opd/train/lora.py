"""A student that LoRA trains: its own weights stay as they are, and linear modules get two small matrices each.

    add_adapters     puts PEFT's layers into a transformers model in place
    list_plain_weights    the tensors of the model as if there were no adapters, and the parameters that each is made of
    select_changed_weights  those of them that training changes: an engine that has the rest needs these
    fold_adapters    adds the adapters to the weights, where nothing is sharded
    without_adapters the model as it was, within a context

PEFT computes; `opd.models.lora` defines what an adapter adds to a weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opd.errors import ConfigError
from opd.files import raise_storage_errors
from opd.models.lora import ADAPTER_WEIGHTS, LoraSize, Update, merge_update
from opd.models.weights import to_files, whole_shape

ALL_LINEAR = "all-linear"
_ADAPTER = "default"
"""PEFT's name of the one adapter that there is."""
_BASE, _A, _B = ".base_layer.", f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
"""PEFT's names for a module's own tensors and its two matrices, after the module's name."""
_EXPERTS = re.compile(r"\.experts\.\d")
"""In the name of a module that is part of one of several experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """The settings of a student's adapters; plain values, so they cross process boundaries."""

    r: int
    """Rank."""
    alpha: float
    """The update is multiplied by `alpha / r`."""
    targets: str | tuple[str, ...]
    """Names of linear modules or ends of them, or `ALL_LINEAR`."""
    seed: int
    """Decides the adapters' first values."""


def add_adapters(lm: Any, options: LoraOptions) -> None:
    """Give the target modules of a transformers model adapters, in place, and freeze all else.

    The adapters add nothing yet. Equal seeds give equal adapters, whatever state torch's generator is in.
    Raises: ConfigError for targets that are no linear modules inside the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = options.targets
    _refuse_targets(lm, targets)
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        try:
            inject_adapter_in_model(config, lm, low_cpu_mem_usage=next(lm.parameters()).is_meta)
        except ValueError as error:  # such as a module whose weight its owner reads without running it
            raise _make_module_error(lm, str(error)) from None


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A tensor of the model as if it had no adapters. Under ZeRO-3 `params` have to be whole for `read_tensor`."""

    name: str
    """Its name without adapters."""
    own: nn.Parameter
    update: Update | None = None
    """The update that the module's adapter adds to it."""

    @property
    def params(self) -> list[Any]:
        return [self.own, self.update.a_K_I, self.update.b_O_K] if self.update else [self.own]

    @property
    def module(self) -> str:
        """Full name of the module that has the tensor."""
        return self.name.rpartition(".")[0]

    def read_tensor(self) -> Tensor:
        """Return the tensor, in the parameter's type."""
        with torch.no_grad():
            return merge_update(self.own, self.update) if self.update else self.own.detach()


def list_plain_weights(lm: Any) -> list[PlainWeight]:
    """Return every parameter of the model as if it had no adapters."""
    params = dict(lm.named_parameters())
    weights = []
    for name, param in params.items():
        module, _, own = name.rpartition(_BASE)
        if not module:
            weights += [] if name.endswith((_A, _B)) else [PlainWeight(name, param)]
        elif own != "weight":
            weights.append(PlainWeight(f"{module}.{own}", param))
        else:
            scaling = lm.get_submodule(module).scaling[_ADAPTER]
            update = Update(a_K_I=params[module + _A], b_O_K=params[module + _B], scaling=scaling)
            weights.append(PlainWeight(f"{module}.weight", param, update))
    return weights


def select_changed_weights(lm: Any, every: Sequence[PlainWeight]) -> Sequence[PlainWeight]:
    """Return the weights that training changes, and those of the linear modules beside them; `every` is from `list_plain_weights`.

    Rollout engines fuse linear modules that stand side by side, such as queries, keys and values, and take a fused layer's
    weights together or not at all. Returns all weights if there are no adapters, or if the architecture's files cannot hold
    the changed weights by themselves.
    """
    adapted = {weight.module for weight in every if weight.update}
    if not adapted:
        return every
    parents = {_parent_module(module) for module in adapted}
    linear = adapted | {name for name, module in lm.named_modules() if isinstance(module, nn.Linear)}
    changed = [w for w in every if w.module in linear and _parent_module(w.module) in parents]
    return changed if _is_convertible_alone(lm, changed, every) else every


def fold_adapters(lm: Any) -> None:
    """Add the adapters' updates to the model's own weights, and remove the adapters, in place. Not for ZeRO-3."""
    for weight in list_plain_weights(lm):
        weight.own.data.copy_(weight.read_tensor())
    for name, module in list(lm.named_modules()):
        if hasattr(module, "base_layer"):
            setattr(lm.get_submodule(_parent_module(name)), name.rpartition(".")[2], module.base_layer)


@contextmanager
def without_adapters(lm: Any) -> Iterator[None]:
    """Within, a model that `add_adapters` has changed computes as if it had not."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "a model without adapters"
    # PEFT's own switch would also take `requires_grad` off the adapters, which DeepSpeed has to find as it was.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def count_lora_weights(lm: Any) -> LoraSize:
    """Count the weights of a model that `add_adapters` has changed; it may be on the meta device."""
    every = list_plain_weights(lm)
    updates = [weight.update for weight in every if weight.update]
    return LoraSize(
        trained=sum(u.a_K_I.numel() + u.b_O_K.numel() for u in updates),
        pushed=sum(weight.own.numel() for weight in select_changed_weights(lm, every)),
    )


def write_adapter(lm: Any, tensors: dict[str, Tensor], base: Path, path: Path) -> None:
    """Write PEFT's two files of an adapter of `base`; `tensors` have PEFT's names. Raises: StorageError."""
    from safetensors.torch import save_file

    config = lm.peft_config[_ADAPTER]
    config.base_model_name_or_path, config.inference_mode = str(base), True
    with raise_storage_errors(path):
        save_file(tensors, path / ADAPTER_WEIGHTS, {"format": "pt"})
        config.save_pretrained(path)


def _parent_module(module: str) -> str:
    return module.rpartition(".")[0]


def _is_convertible_alone(lm: Any, subset: Sequence[PlainWeight], every: Sequence[PlainWeight]) -> bool:
    """Return True if some weights and the rest, each converted to files alone, give the files of all; converts only shapes."""

    def files(weights: Sequence[PlainWeight]) -> dict[str, torch.Size]:
        shapes = {w.name: whole_shape(w.own) for w in weights}
        state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return {name: tensor.shape for name, tensor in to_files(lm, state).items()}

    chosen = {weight.name for weight in subset}
    subset_files, other_files = files(subset), files([weight for weight in every if weight.name not in chosen])
    return not subset_files.keys() & other_files.keys() and subset_files | other_files == files(every)


def _refuse_targets(lm: Any, targets: str | tuple[str, ...]) -> None:
    """Refuse a target that fits no module, or one that is not linear or not inside the body, and `ALL_LINEAR` for a model
    with matrices that no adapter can have. Raises: ConfigError."""
    linear = _linear_modules(lm)
    if targets == ALL_LINEAR:
        without = _unadaptable_modules(lm)
        if without or not linear:
            raise _make_module_error(
                lm, f"{ALL_LINEAR}, which cannot be had for {without[0] if without else 'this model'}"
            )
        return
    names = [name for name, _ in lm.named_modules()]
    for target in targets:
        matches = [name for name in names if name == target or name.endswith(f".{target}")]
        wrong = [name for name in matches if name not in linear]
        if not matches or wrong:
            raise _make_module_error(
                lm, f"`{target}`, " + (f"which is also {wrong[0]}" if wrong else "which is no module")
            )


def _make_module_error(lm: Any, problem: str) -> ConfigError:
    names = sorted({name.rpartition(".")[2] for name in _linear_modules(lm)})
    return ConfigError.at(
        "student.lora.targets",
        found=problem,
        wanted=f"linear modules of {type(lm).__name__}, not its output head and not its experts: "
        + (", ".join(names) or "it has none"),
        fix="name those to adapt, such as `targets: [q_proj, v_proj]`; what is not named stays as it is",
    )


def _linear_modules(lm: Any) -> set[str]:
    """Return the names of the modules that may have an adapter."""
    head = lm.get_output_embeddings()
    return {
        name
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not _EXPERTS.search(name)
    }


def _unadaptable_modules(lm: Any) -> list[str]:
    """Return the names of modules and tensors that hold matrices and may have no adapter: experts in one tensor or in a list, and
    GPT-2's modules, whose weights are transposed."""
    names = []
    for name, module in lm.named_modules():
        listed = isinstance(module, nn.Linear) and _EXPERTS.search(name)
        if listed or type(module).__name__ == "Conv1D":
            names.append(name)
        elif not isinstance(module, nn.Conv1d | nn.Conv2d):
            names += [f"{name}.{own}" for own, p in module.named_parameters(recurse=False) if len(whole_shape(p)) == 3]
    return names
