"""PEFT LoRA adapters: which modules an adapter changes and what it adds to each.

    y = W x + scaling * B (A x)      scaling = alpha / rank, or alpha / √rank (rsLoRA)

PEFT writes the files. This module interprets them, for all code that checks, merges, probes or scores adapters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_Alpha = Annotated[float, Field(allow_inf_nan=False)]
T = TypeVar("T")


class LoraConfig(BaseModel):
    """The fields of adapter_config.json that decide what is computed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    r: int = Field(ge=1)
    """Rank of modules that `rank_pattern` does not name."""
    lora_alpha: _Alpha
    use_rslora: bool = False
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] | None = None
    """Regular expression for the end of a module's name -> rank; the first that fits decides."""
    alpha_pattern: dict[str, _Alpha] | None = None
    """The same for `lora_alpha`."""

    def rank(self, module: str) -> int:
        """Return the rank of a module by its full name. Raises: re.error if a pattern is no regular expression."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scaling(self, module: str) -> float:
        """Return the factor of a module's product B A. Raises: re.error."""
        rank = self.rank(module)
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Addition of an adapter to one linear module: scaling * B A. K is the rank, I and O are the module's inputs and outputs."""

    a_K_I: Tensor
    b_O_K: Tensor
    scaling: float

    def to(self, device: torch.device) -> Update:
        """Return the update with its matrices on a device."""
        return replace(self, a_K_I=self.a_K_I.to(device), b_O_K=self.b_O_K.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSize:
    """Counts of the numbers of a LoRA student that are trained, and that a push sends."""

    trained: int
    """Count of the numbers in the adapters."""
    pushed: int
    """Count of the numbers in the weights that a push sends."""


def split_name(tensor: str) -> tuple[str, str] | None:
    """Split a tensor's name into module and `A` or `B`; None if it is not part of a plain LoRA.

    Example: base_model.model.model.layers.0.mlp.up_proj.lora_A.weight → ("model.layers.0.mlp.up_proj", "A")
    """
    match = _NAME.fullmatch(tensor)
    return (match[1], match[2]) if match else None


def tensor_name(module: str, letter: str) -> str:
    """Return the name in PEFT's files of a module's matrix `A` or `B`; the inverse of `split_name`."""
    return f"base_model.model.{module}.lora_{letter}.weight"


def read_updates(config: LoraConfig, tensors: Mapping[str, Tensor]) -> dict[str, Update]:
    """Return module -> update. The tensors are those of a checked adapter: every A has its B, and there is nothing else."""
    parts = {split_name(name): tensor for name, tensor in tensors.items()}
    assert None not in parts, "an adapter that was not checked"
    modules = sorted({part[0] for part in parts if part})
    return {
        module: Update(a_K_I=parts[module, "A"], b_O_K=parts[module, "B"], scaling=config.scaling(module))
        for module in modules
    }


def load_updates(adapter_dir: Path, dtype: torch.dtype) -> dict[str, Update]:
    """Return module -> update of an adapter that was checked, in this type, on the CPU."""
    from safetensors.torch import load_file

    config = LoraConfig.model_validate_json((adapter_dir / ADAPTER_CONFIG).read_bytes())
    tensors = load_file(adapter_dir / ADAPTER_WEIGHTS)
    return read_updates(config, {name: tensor.to(dtype) for name, tensor in tensors.items()})


def merge_update(weight_O_I: Tensor, update: Update) -> Tensor:
    """Return a module's weight plus its update: added in float32, then converted to the weight's type."""
    added_O_I = update.b_O_K.float() @ update.a_K_I.float()
    # In place: the weight may be the largest of its model.
    return added_O_I.mul_(update.scaling).add_(weight_O_I.float()).to(weight_O_I.dtype)


def find_nonlinear_modules(model: nn.Module, changes: Mapping[str, Update]) -> list[str]:
    """Return the names in `changes` of modules that the model lacks or that are no `nn.Linear`: no update can be added to them."""
    from torch import nn

    modules = dict(model.named_modules())
    return [name for name in changes if not isinstance(modules.get(name), nn.Linear)]


def attach_updates(model: nn.Module, changes: Mapping[str, Update]) -> list[RemovableHandle]:
    """Let the model compute with the adapter until the returned handles are removed; its weights stay as they are.

    The caller has checked with `find_nonlinear_modules` that all modules are linear. The updates have the model's type and device.
    """
    return [
        model.get_submodule(name).register_forward_hook(_make_adding_hook(update)) for name, update in changes.items()
    ]


def _make_adding_hook(update: Update) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """Make a forward hook that turns W x into W x + scaling * B (A x)."""
    from torch import add
    from torch.nn.functional import linear

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return add(output, linear(linear(args[0], update.a_K_I), update.b_O_K), alpha=update.scaling)

    return hook


def _by_pattern(patterns: Mapping[str, T] | None, module: str, default: T) -> T:
    """Return the value of the first pattern that fits the end of a module's name, else the default; PEFT's rule."""
    return next((v for p, v in (patterns or {}).items() if re.match(rf"(.*\.)?({p})$", module)), default)
