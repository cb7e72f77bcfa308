"""A teacher's layers on several devices: the GPUs of a scoring worker, the CPU's memory, and its files.

accelerate decides where each layer goes and puts hooks on the modules. A hook moves a layer's inputs to the layer's
device; weights that are on no GPU are moved to the first GPU while their layer computes. One layer computes after the
other, as on one device, so dividing a teacher saves memory and not time.
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
    """The device on which layers compute whose weights are on no GPU: the first GPU, or the CPU if there is no GPU."""
    on_disk: frozenset[str]
    """Parameters that stay in the files until a pass needs them."""

    @classmethod
    def from_skeleton(cls, skeleton: Any, max_memory: Mapping[DeviceName, int], main: DeviceName) -> Division:
        """Divide a causal language model of transformers; `skeleton` needs no weights. `main` becomes `main_device`.

        Raises: RunError if the model does not fit into `max_memory`, or if transformers does not say where it may be
        divided.
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
        # `infer_auto_device_map` assigns modules that fit on no device to the disk.
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
        """Move the layers of a model to their devices. Its weights are on the CPU, except those in `on_disk`.

        Raises: RunError if the files lack weights that are to stay on disk.
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
    """Remove accelerate's hooks from a model. Weights of layers on the CPU are then on the CPU; those on disk are not loaded."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)


def measure_free_memory() -> dict[DeviceName, int]:
    """Return device -> bytes that weights may take, for the CPU and each GPU that this process sees."""
    from accelerate.utils import get_max_memory

    # A tenth of a GPU is left for a pass's activations, the same share that accelerate leaves.
    return {device: size if device == "cpu" else int(0.9 * size) for device, size in get_max_memory().items()}


def _find_device(device_map: Mapping[str, DeviceName], name: str) -> DeviceName:
    """Return the device of a module or parameter: the entry of the module itself or of the nearest module around it.

    Raises: KeyError if there is no such entry.
    """
    parent = name
    while parent and parent not in device_map:
        parent = parent.rpartition(".")[0]
    return device_map[parent]


def _build_offload_index(
    model: Any, names: frozenset[str], model_dir: Path, dtype: torch.dtype
) -> dict[str, dict[str, str]]:
    """Build accelerate's index of these parameters: name -> file, name in the file, type.

    Raises: RunError if a parameter is missing in the files or has another shape there.
    """
    tensors: dict[str, tuple[str, list[int]]] = {}
    for path in weight_files(model_dir):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: (str(path), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    index, tied = {}, model.all_tied_weights_keys
    for name in sorted(names):
        # Files have one name of tied weights only.
        source = name if name in tensors else tied.get(name, name)
        if source not in tensors:
            raise RunError(f"weights do not fit its config: missing {source}")
        file_name, shape = tensors[source]
        if tuple(shape) != tuple(model.get_parameter(name).shape):
            raise RunError(f"weights do not fit its config: {source} has the shape {shape}")
        index[name] = {"safetensors_file": file_name, "weight_name": source, "dtype": str(dtype).removeprefix("torch.")}
    return index


def _format_shortage(sizes: Mapping[DeviceName, int], max_memory: Mapping[DeviceName, int]) -> str:
    limits = ", ".join(f"{_format_device(device)} {_gib(size)}" for device, size in max_memory.items())
    return (
        f"no room for {_gib(sizes['disk'])} of its {_gib(sum(sizes.values()))} of weights: {limits}, and room for the largest "
        "layer is kept where others pass; raise teachers.max_memory, or name more there: cpu, or disk, which leaves layers "
        "in their files"
    )


def _format_device(device: DeviceName) -> str:
    return f"GPU {device}" if isinstance(device, int) else device


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
