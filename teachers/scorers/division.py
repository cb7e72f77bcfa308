"""A teacher's layers on several devices: the GPUs of a scoring worker, the CPU's memory, and its files.

accelerate decides where a layer goes and puts hooks on the modules that bring inputs to a layer's device, and weights that are not
on a GPU to the first one, for the time of its part of the pass. One layer computes after the other, as on one device: what is
divided is memory, not time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from opd.errors import RunError
from opd.models.files import weight_files

DeviceName = int | str
"""Number of a GPU, `cpu` or `disk`."""
OFF_GPUS = ("cpu", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The devices of the layers of all teachers of one architecture."""

    device_map: dict[str, DeviceName]
    """Module -> its place: accelerate's device map."""
    main_device: DeviceName
    """Where layers compute that are on no GPU: the first GPU, or the CPU."""
    on_disk: frozenset[str]
    """Parameters that stay in the files until a pass needs them."""

    @classmethod
    def from_skeleton(cls, skeleton: Any, max_memory: Mapping[DeviceName, int], main: DeviceName) -> Division:
        """Divide a causal language model of transformers, which needs no weights.

        Raises: RunError if `max_memory` has no room for all of it, or if nobody knows what may be divided.
        """
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_balanced_memory

        skeleton.tie_weights()  # tied weights are counted once, and have one place
        unsplit_classes = sorted(skeleton._no_split_modules)
        if not unsplit_classes:
            raise RunError(
                f"transformers does not say where {type(skeleton).__name__} may be divided; remove teachers.device_map, or use "
                "teachers.engine vllm"
            )
        room = {device: size for device, size in max_memory.items() if device != "disk"}
        room = get_balanced_memory(skeleton, room, no_split_module_classes=unsplit_classes)
        # What fits nowhere is given to the disk.
        device_map = dict(infer_auto_device_map(skeleton, room, no_split_module_classes=unsplit_classes))
        params = dict(skeleton.named_parameters(remove_duplicate=False))
        on_disk = frozenset(name for name in params if _find_device(device_map, name) == "disk")
        sizes: Counter[DeviceName] = Counter()
        for name, param in skeleton.named_parameters():
            sizes[_find_device(device_map, name)] += param.nbytes
        if sizes["disk"] > max_memory.get("disk", 0):
            raise RunError(_format_shortage(sizes, max_memory))
        return cls(device_map=device_map, main_device=main, on_disk=on_disk)

    def find_device(self, module: str) -> torch.device:
        """Return the device on which a module computes."""
        device_name = _find_device(self.device_map, module)
        device = self.main_device if device_name in OFF_GPUS else device_name
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

    def dispatch(self, model: Any, model_dir: Path, dtype: torch.dtype) -> None:
        """Bring a model that has its weights on the CPU, but for those `on_disk`, to its places.

        Raises: RunError if the files do not have the weights that stay there.
        """
        from accelerate import dispatch_model

        dispatch_model(
            model,
            self.device_map,
            main_device=self.main_device,
            offload_index=_build_offload_index(model, self.on_disk, model_dir, dtype)
            if "disk" in self.device_map.values()
            else None,
            skip_keys=sorted(model._skip_keys_device_placement),
            force_hooks=set(self.device_map.values()) != {self.main_device},
        )


def remove_hooks(model: nn.Module) -> None:
    """Take accelerate's hooks from a model. Weights that were on the CPU are there again, those on disk are nowhere."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)


def measure_free_memory() -> dict[DeviceName, int]:
    """Return the bytes that weights may have on each GPU that this process sees, and on the CPU."""
    from accelerate.utils import get_max_memory

    # A tenth of a GPU is left for what a pass computes: accelerate's own share.
    return {device: size if device == "cpu" else int(0.9 * size) for device, size in get_max_memory().items()}


def _find_device(device_map: Mapping[str, DeviceName], name: str) -> DeviceName:
    """Return the device of a module or a parameter: that of the nearest module around it that has one. Raises: KeyError if none has."""
    parent = name
    while parent and parent not in device_map:
        parent = parent.rpartition(".")[0]
    return device_map[parent]


def _build_offload_index(
    model: Any, names: frozenset[str], model_dir: Path, dtype: torch.dtype
) -> dict[str, dict[str, str]]:
    """Build accelerate's index of these parameters: name -> file, name there, dtype. Raises: RunError for one that is missing."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    for path in weight_files(model_dir):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: (str(path), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    index, tied = {}, model.all_tied_weights_keys
    for name in sorted(names):
        source = name if name in tensors else tied.get(name, name)
        if source not in tensors:
            raise RunError(f"weights do not fit its config: missing {source}")
        file_name, shape = tensors[source]
        if tuple(shape) != tuple(model.get_parameter(name).shape):
            raise RunError(f"weights do not fit its config: {source} has the shape {shape}")
        index[name] = {"safetensors_file": file_name, "weight_name": source, "dtype": str(dtype).removeprefix("torch.")}
    return index


def _format_shortage(sizes: Mapping[DeviceName, int], max_memory: Mapping[DeviceName, int]) -> str:
    limits = ", ".join(f"{_format_device(device)} {_format_gib(size)}" for device, size in max_memory.items())
    return (
        f"no room for {_format_gib(sizes['disk'])} of its {_format_gib(sum(sizes.values()))} of weights: {limits}, and room for the largest "
        "layer is kept where others pass; raise teachers.max_memory, or name more there: cpu, or disk, which leaves layers "
        "in their files"
    )


def _format_device(device: DeviceName) -> str:
    return f"GPU {device}" if isinstance(device, int) else device


def _format_gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
