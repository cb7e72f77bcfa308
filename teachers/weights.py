"""Teachers' weights in memory: mapped from safetensors and kept within a budget in bytes; the next teacher is read ahead.

Mapping a file copies nothing: a swap takes milliseconds, and the pages of a dropped teacher go back to the system. While
one teacher scores, a thread reads the next one ahead by touching every page. Weights that are read ahead count towards
the budget. If the budget holds only one teacher, the next one's files are merely read into the system's page cache.

A LoRA expert takes two entries, its base and its adapter, so ten adapters of one base take eleven entries.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from opd.models.files import weight_files
from opd.records.types import Teacher
from teachers.weight_keys import base_key, weight_key

State = dict[str, Tensor]
"""Name -> tensor: the weights of a model or an adapter, as torch's `load_state_dict` takes them."""
PAGE_BYTES = 4096


class WeightCache:
    """Keeps weights within the budget by dropping the least recently used ones first; the teacher in use always stays.

    Teachers with equal digests share their entries, and adapters of equal bases share the entry of the base.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        budget_bytes: int,
        read: Callable[[Path, torch.dtype], State],
        measure: Callable[[Path, torch.dtype], int],
    ) -> None:
        """`read` returns the tensors of a directory in a type; `measure` returns their bytes without reading them."""
        self._dtype = dtype
        self._budget_bytes = budget_bytes
        self._read = read
        self._measure = measure
        self._states: OrderedDict[str, State] = OrderedDict()
        self._prefetching: dict[str, Future[State]] = {}
        self._sizes: dict[str, int] = {}
        self._in_use: set[str] = set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self.loads = 0
        """Number of times that a model or an adapter was read from disk."""

    def prefetch(self, teacher: Teacher) -> None:
        """Begin to read a teacher ahead if there is room for it beside the one in use; returns at once."""
        # The entries in `keep` must be in memory at the same time, so their sizes decide whether the next teacher fits.
        # All other entries can be dropped.
        missing, keep = self._find_missing(teacher), {*self._in_use, *self._prefetching, *_weight_parts(teacher)}
        fits = sum(self._sizes[key] for key in keep) <= self._budget_bytes
        if fits:
            self._make_room(missing, keep)
        for key, directory in missing.items():
            if fits:
                self.loads += 1
                self._prefetching[key] = self._thread.submit(self._read_ahead, directory)
            else:
                self._thread.submit(_warm_page_cache, directory)

    def find_base(self, teacher: Teacher) -> tuple[Future[State], int] | None:
        """Return the tensors of the (base) model, which may still be read, and their bytes; None if nobody reads them."""
        key = base_key(teacher)
        reading = self._prefetching.get(key)
        if reading is None and key in self._states:
            reading = Future[State]()
            reading.set_result(self._states[key])
        return None if reading is None else (reading, self._sizes[key])

    def has(self, teacher: Teacher) -> bool:
        """Return True if every part of the teacher is in memory or being read ahead.

        It then fits into the budget together with the teacher in use.
        """
        return all(key in self._states or key in self._prefetching for key in _weight_parts(teacher))

    def get(self, teacher: Teacher) -> list[State]:
        """Return the tensors of the (base) model, then those of the adapter if it has one.

        Raises: whatever reading its files raised.
        """
        missing, keys = self._find_missing(teacher), list(_weight_parts(teacher))
        self._in_use = set(keys)
        self._make_room(missing, keys)
        for key in keys:
            if key in missing:
                self.loads += 1
                self._states[key] = self._read(missing[key], self._dtype)
            elif key in self._prefetching:
                self._states[key] = self._prefetching.pop(key).result()
            self._states.move_to_end(key)
        return [self._states[key] for key in keys]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held; a tensor that teachers share counts once."""
        sizes = {t.data_ptr(): t.nbytes for state in self._states.values() for t in state.values()}
        return sum(sizes.values())

    def _find_missing(self, teacher: Teacher) -> dict[str, Path]:
        """Return key -> directory of the teacher's parts that are neither in memory nor being read."""
        missing = {
            k: d for k, d in _weight_parts(teacher).items() if k not in self._states and k not in self._prefetching
        }
        for key, directory in missing.items():
            if key not in self._sizes:  # measuring opens every file: once is enough
                self._sizes[key] = self._measure(directory, self._dtype)
        return missing

    def _make_room(self, missing: Collection[str], keep: Collection[str]) -> None:
        """Drop entries that are not in `keep` until the missing parts fit into the budget.

        Entries in memory go before those that are still being read.
        """
        excess = sum(self._sizes[key] for key in (*self._states, *self._prefetching, *missing)) - self._budget_bytes
        # `self._states` begins with the least recently used entry, because `get` moves what it returns to the end.
        for key in [key for key in (*self._states, *self._prefetching) if key not in keep]:
            if excess <= 0:
                break
            if self._states.pop(key, None) is None:
                self._prefetching.pop(key).cancel()
            excess -= self._sizes[key]

    def _read_ahead(self, directory: Path) -> State:
        state = self._read(directory, self._dtype)
        for tensor in state.values():
            flat = tensor.flatten()
            # Reading one value of each page brings the page into memory.
            flat[:: max(1, PAGE_BYTES // flat.element_size())].sum()
        return state


def _weight_parts(teacher: Teacher) -> dict[str, Path]:
    """Return key → directory of each part of a teacher: the (base) model, then the adapter if it has one."""
    parts = {base_key(teacher): teacher.model_dir}
    if teacher.adapter_dir:
        parts[f"{weight_key(teacher)}:adapter"] = teacher.adapter_dir
    return parts


def read_tensors(directory: Path) -> State:
    """Return all tensors of a model's or an adapter's files, memory-mapped."""
    state: State = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            state.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a dict
    return state


def weights_nbytes(directory: Path, dtype: torch.dtype, leave_out: Collection[str] = ()) -> int:
    """Return the bytes that the tensors of `read_tensors` take in a type, without those in `leave_out`; reads headers only."""
    numbers = 0
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys()).difference(leave_out)
            numbers += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return numbers * dtype.itemsize


def _warm_page_cache(directory: Path) -> None:
    """Ask the system to read the files into its page cache, from which it may drop them when memory is short."""
    for path in weight_files(directory):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
