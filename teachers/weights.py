"""Teachers' weights in memory: mapped from safetensors, kept within a byte budget, the next one read ahead.

A mapped file costs no copy: a swap is a matter of milliseconds, and the pages of a dropped teacher go back to the
system. Reading ahead touches every page in a thread of its own while the teacher before is still scoring.

A LoRA expert is two entries, its base and its adapter: ten adapters of one base are one base and ten adapters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from opd.types import Teacher

State = dict[str, Tensor]
PAGE_BYTES = 4096


class WeightCache:
    """Least recently used out, as soon as the tensors exceed the budget; the teacher in use always stays.

    Teachers of equal digest share their entries, adapters of equal bases the base's.
    """

    def __init__(self, dtype: torch.dtype, budget_bytes: int, read: Callable[[Path, torch.dtype], State]) -> None:
        self._dtype = dtype
        self._budget_bytes = budget_bytes
        self._read = read
        self._states: OrderedDict[str, State] = OrderedDict()
        self._coming: dict[str, Future[State]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self.loads = 0
        """Times that a model or an adapter was read from disk."""

    def prefetch(self, teacher: Teacher) -> None:
        """Begin to read a teacher; returns at once."""
        for key, directory in _parts(teacher).items():
            if key not in self._states and key not in self._coming:
                self.loads += 1
                self._coming[key] = self._thread.submit(self._read_ahead, directory)

    def get(self, teacher: Teacher) -> list[State]:
        """Tensors of the (base) model, then those of the adapter if it has one.

        Raises: whatever reading its files raised.
        """
        self.prefetch(teacher)
        keys = list(_parts(teacher))
        for key in keys:
            if key not in self._states:
                self._states[key] = self._coming.pop(key).result()
            self._states.move_to_end(key)
        while len(self._states) > len(keys) and self.nbytes > self._budget_bytes:
            self._states.popitem(last=False)
        return [self._states[key] for key in keys]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held; a tensor that teachers share counts once."""
        sizes = {t.data_ptr(): t.nbytes for state in self._states.values() for t in state.values()}
        return sum(sizes.values())

    def _read_ahead(self, directory: Path) -> State:
        state = self._read(directory, self._dtype)
        for tensor in state.values():
            flat = tensor.flatten()
            flat[:: max(1, PAGE_BYTES // flat.element_size())].sum()  # one value a page brings it in
        return state


def weight_key(teacher: Teacher) -> str:
    """What decides whether two experts are one teacher."""
    return teacher.digest or f"{teacher.model_dir}:{teacher.adapter_dir}"


def base_key(teacher: Teacher) -> str:
    """What decides whether two experts are one model, adapters apart."""
    return weight_key(
        replace(teacher, adapter_dir=None, digest=teacher.base_digest) if teacher.adapter_dir else teacher
    )


def _parts(teacher: Teacher) -> dict[str, Path]:
    """Key → directory of what is read and kept for it: the (base) model, then the adapter if it has one."""
    parts = {base_key(teacher): teacher.model_dir}
    return parts | ({f"{weight_key(teacher)}:adapter": teacher.adapter_dir} if teacher.adapter_dir else {})


def read_weights(directory: Path, dtype: torch.dtype) -> State:
    """All tensors of a directory's safetensors, memory-mapped where they already have `dtype`."""
    state: State = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            state.update({name: file.get_tensor(name).to(dtype) for name in file.keys()})  # noqa: SIM118 - not a dict
    return state
