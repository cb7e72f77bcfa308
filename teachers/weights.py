"""Teachers' weights in memory: mapped from safetensors, kept within a byte budget, the next one read ahead.

A mapped file costs no copy: a swap is a matter of milliseconds, and the pages of a dropped teacher go back to the
system. Reading ahead touches every page in a thread of its own while the teacher before is still scoring.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from safetensors import safe_open
from torch import Tensor

from opd.types import Teacher

State = dict[str, Tensor]
PAGE_BYTES = 4096


class WeightCache:
    """Least recently used out, as soon as the tensors exceed the budget; the teacher in use always stays.

    Teachers of equal digest share one entry.
    """

    def __init__(self, dtype: torch.dtype, budget_bytes: int, read: Callable[[Teacher, torch.dtype], State]) -> None:
        self._dtype = dtype
        self._budget_bytes = budget_bytes
        self._read = read
        self._states: OrderedDict[str, State] = OrderedDict()
        self._coming: dict[str, Future[State]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self.loads = 0
        """Times that a teacher was read from disk."""

    def prefetch(self, teacher: Teacher) -> None:
        """Begin to read a teacher; returns at once."""
        key = weight_key(teacher)
        if key not in self._states and key not in self._coming:
            self.loads += 1
            self._coming[key] = self._thread.submit(self._read_ahead, teacher)

    def get(self, teacher: Teacher) -> State:
        """The teacher's tensors. Raises: whatever reading its files raised."""
        key = weight_key(teacher)
        if key not in self._states:
            self.prefetch(teacher)
            self._states[key] = self._coming.pop(key).result()
        self._states.move_to_end(key)
        while len(self._states) > 1 and self.nbytes > self._budget_bytes:
            self._states.popitem(last=False)
        return self._states[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held; a tensor that teachers share counts once."""
        sizes = {t.data_ptr(): t.nbytes for state in self._states.values() for t in state.values()}
        return sum(sizes.values())

    def _read_ahead(self, teacher: Teacher) -> State:
        state = self._read(teacher, self._dtype)
        for tensor in state.values():
            flat = tensor.flatten()
            flat[:: max(1, PAGE_BYTES // flat.element_size())].sum()  # one value a page brings it in
        return state


def weight_key(teacher: Teacher) -> str:
    """What decides whether two experts are one teacher."""
    return teacher.digest or f"{teacher.model_dir}:{teacher.adapter_dir}"


def read_weights(teacher: Teacher, dtype: torch.dtype) -> State:
    """All tensors of a directory's safetensors, memory-mapped where they already have `dtype`."""
    state: State = {}
    for path in sorted(teacher.model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            state.update({name: file.get_tensor(name).to(dtype) for name in file.keys()})  # noqa: SIM118 - not a dict
    return state
