"""A student that LoRA trains: its own weights stay as they are, and linear modules get two small matrices each.

    add_adapters            put PEFT's layers into a transformers model, in place
    list_plain_weights      list the model's tensors as if it had no adapters, with the parameters that each is made of
    select_changed_weights  select those that a push has to send, because training changes them or an engine fuses them with such
    fold_adapters           add the adapters to the weights of a model that is not sharded
    without_adapters        compute without the adapters, within a context

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
"""PEFT's name for a model's adapter; ours have one."""
_BASE, _A, _B = ".base_layer.", f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
"""PEFT's names for a module's own tensors and its two matrices, after the module's name."""
_EXPERTS = re.compile(r"\.experts\.\d")
"""Found in the name of a module that belongs to one of several experts (of a mixture-of-experts layer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """The settings of a student's adapters; plain values, so they cross process boundaries."""

    r: int
    """Rank: rows of a module's first matrix and columns of its second one."""
    alpha: float
    """The product of the two matrices is multiplied by `alpha / r`."""
    targets: str | tuple[str, ...]
    """Full names of linear modules or their last parts, such as `q_proj`; or `ALL_LINEAR`."""
    seed: int
    """Seed of the adapters' first values."""


def add_adapters(lm: Any, options: LoraOptions) -> None:
    """Give the target modules of a transformers model adapters, in place, and freeze all else.

    New adapters add nothing to the model's output. Equal seeds give equal adapters, whatever state torch's generator is in.
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
        except ValueError as error:  # for example for a module whose parent reads its weight and does not call it
            raise _make_module_error(lm, str(error)) from None


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A tensor that the model would have without adapters. Under ZeRO-3 `params` have to be whole for `read_tensor`."""

    name: str
    """Name that the tensor has in the model without adapters."""
    param: nn.Parameter
    """The model's own parameter, without the update."""
    update: Update | None = None
    """The update that the module's adapter adds; None if no adapter changes the tensor."""

    @property
    def params(self) -> list[Any]:
        """Parameters that the tensor is made of."""
        return [self.param, self.update.a_K_I, self.update.b_O_K] if self.update else [self.param]

    @property
    def module(self) -> str:
        """Full name of the module that has the tensor."""
        return self.name.rpartition(".")[0]

    def read_tensor(self) -> Tensor:
        """Return the tensor with its update, in the type of the parameter."""
        with torch.no_grad():
            return merge_update(self.param, self.update) if self.update else self.param.detach()


def list_plain_weights(lm: Any) -> list[PlainWeight]:
    """Return every tensor that the model would have without adapters; their matrices are in the `update` of a tensor."""
    params = dict(lm.named_parameters())
    weights = []
    for name, param in params.items():
        module, _, leaf = name.rpartition(_BASE)
        if not module:
            if not name.endswith((_A, _B)):
                weights.append(PlainWeight(name, param))
        elif leaf != "weight":
            weights.append(PlainWeight(f"{module}.{leaf}", param))
        else:
            scaling = lm.get_submodule(module).scaling[_ADAPTER]
            update = Update(a_K_I=params[module + _A], b_O_K=params[module + _B], scaling=scaling)
            weights.append(PlainWeight(f"{module}.weight", param, update))
    return weights


def select_changed_weights(lm: Any, every: Sequence[PlainWeight]) -> Sequence[PlainWeight]:
    """Return the weights that training changes, and those of the linear modules beside them; `every` is from `list_plain_weights`.

    Rollout engines fuse linear modules with the same parent, such as those of queries, keys and values. They take the weights
    of a fused layer together or not at all. Returns all weights if there are no adapters, or if the selected weights cannot
    be converted to the names of the files without the others.
    """
    adapted = {weight.module for weight in every if weight.update}
    if not adapted:
        return every
    parents = {_parent_module(module) for module in adapted}
    linear = adapted | {name for name, module in lm.named_modules() if isinstance(module, nn.Linear)}
    changed = [w for w in every if w.module in linear and _parent_module(w.module) in parents]
    return changed if _is_convertible_alone(lm, changed, every) else every


def fold_adapters(lm: Any) -> None:
    """Add the adapters' updates to the model's own weights in place, and remove the adapters. Not for a model under ZeRO-3."""
    for weight in list_plain_weights(lm):
        weight.param.data.copy_(weight.read_tensor())
    for name, module in list(lm.named_modules()):
        if hasattr(module, "base_layer"):
            setattr(lm.get_submodule(_parent_module(name)), name.rpartition(".")[2], module.base_layer)


@contextmanager
def without_adapters(lm: Any) -> Iterator[None]:
    """Within, a model with adapters computes as if it had none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "a model without adapters"
    # PEFT's own switch would also set `requires_grad` of the adapters to False, which would disturb DeepSpeed.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def count_lora_weights(lm: Any) -> LoraSize:
    """Count the numbers that training changes and that a push sends, of a model with adapters; it may be on the meta device."""
    every = list_plain_weights(lm)
    updates = [weight.update for weight in every if weight.update]
    return LoraSize(
        trained=sum(u.a_K_I.numel() + u.b_O_K.numel() for u in updates),
        pushed=sum(weight.param.numel() for weight in select_changed_weights(lm, every)),
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
    """Return True if `subset` and the rest, converted to files separately, give the same files as all weights together.

    Only names and shapes are converted, on the meta device.
    """

    def files(weights: Sequence[PlainWeight]) -> dict[str, torch.Size]:
        shapes = {w.name: whole_shape(w.param) for w in weights}
        state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return {name: tensor.shape for name, tensor in to_files(lm, state).items()}

    subset_names = {weight.name for weight in subset}
    subset_files, other_files = files(subset), files([weight for weight in every if weight.name not in subset_names])
    return not subset_files.keys() & other_files.keys() and subset_files | other_files == files(every)


def _refuse_targets(lm: Any, targets: str | tuple[str, ...]) -> None:
    """Refuse a target that fits no module, or fits one that may have no adapter. Raises: ConfigError.

    `ALL_LINEAR` is refused for a model without linear modules, or with matrices that may have no adapter.
    """
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
    """Return the names of modules and tensors that hold matrices but may have no adapter.

    These are experts, in one tensor of three dimensions or in a list of modules, and GPT-2's modules, whose weights are
    transposed.
    """
    names = []
    for name, module in lm.named_modules():
        listed = isinstance(module, nn.Linear) and _EXPERTS.search(name)
        if listed or type(module).__name__ == "Conv1D":
            names.append(name)
        elif not isinstance(module, nn.Conv1d | nn.Conv2d):
            names += [f"{name}.{key}" for key, p in module.named_parameters(recurse=False) if len(whole_shape(p)) == 3]
    return names
