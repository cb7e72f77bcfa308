"""Teachers' weights on the device that computes: copied there once, and kept within a byte budget.

Weights come to a GPU from mapped files. The copy of a small model takes as long as some thousand tokens of scoring, that of a
large one seconds. So the next teacher is copied while one scores, if the budget has room for both. On a CPU weights are where they are
needed as soon as they are mapped, and nothing is copied or kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
from torch import Tensor

from teachers.staged_copies import StagedCopies
from teachers.weights import State


class DeviceCache:
    """Keeps the most recently used teachers whose sizes together fit the budget; the newest stays even if it alone exceeds it."""

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device = device
        self._copies_weights = device.type != "cpu"
        self._budget_bytes = budget_bytes
        self._states: OrderedDict[str, State] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._copying: tuple[str, Future[State]] | None = None
        """Key of the teacher that is copied ahead, and its copies to come."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy ahead")

    @cached_property
    def _copies(self) -> StagedCopies:
        return StagedCopies(self._device)

    @cached_property
    def _copies_ahead(self) -> StagedCopies:
        return StagedCopies(self._device)

    def find(self, key: str) -> State | None:
        """Return the tensors of the teacher `key`; None if they are not here."""
        return self._states.get(key)

    def has_room_for(self, key: str, state: State) -> bool:
        """Return True if the teacher `key` is on the device, or fits into the budget beside the teacher that was used last.

        The model still holds that one's tensors, so dropping it here would free nothing. The first teacher always has room.
        """
        if not self._copies_weights or not self._states or key in self._states:
            return True
        return self._sizes[next(reversed(self._states))] + _count_bytes(state) <= self._budget_bytes

    def copy_to_device(self, key: str, state: State) -> State:
        """Copy the tensors of `state`, the teacher `key`, to the device and return the copies, or those that were copied ahead. One tensor
        under two names stays one.

        Teachers are dropped to make room, but their memory is free only when the model has let go of them too: if `has_room_for` is
        False, the caller moves the model to the meta device first.
        """
        if not self._copies_weights:
            return state
        if (cached := self.find(key)) is not None:
            self._states.move_to_end(key)
            return cached
        nbytes = _count_bytes(state)
        copied = self._take_copied(key)
        if copied is None:
            self._shrink_to(self._budget_bytes - nbytes)
            copied = _copy_state(state, self._copies)
        self._states[key], self._sizes[key] = copied, nbytes
        return copied

    def copy_ahead(self, key: str, state: Future[State], nbytes: int) -> None:
        """Begin to copy the teacher `key`, which comes next, if there is room for it beside the one that was used last; returns at once.

        `state` is being read; its tensors take `nbytes`.
        """
        if not self._copies_weights or key in self._states or self._copying is not None:
            return
        newest = self._sizes[next(reversed(self._states))] if self._states else 0
        if newest + nbytes > self._budget_bytes:
            return
        self._shrink_to(self._budget_bytes - nbytes)
        self._copying = key, self._thread.submit(self._copy_in_thread, state)

    def _copy_in_thread(self, state: Future[State]) -> State:
        if self._device.type != "cuda":
            return _copy_state(state.result(), self._copies_ahead)
        # A stream of its own: in the stream that scores, the copies would wait for what was submitted there before.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            copied = _copy_state(state.result(), self._copies_ahead)
            torch.cuda.current_stream(self._device).synchronize()
        return copied

    def _take_copied(self, key: str) -> State | None:
        """Return the copies of the teacher that was copied ahead, once they are there.

        None, with nothing left, if it is another teacher or could not be copied: its files may have been dropped from memory meanwhile.
        """
        if self._copying is None:
            return None
        (copied_key, copying), self._copying = self._copying, None
        if copying.exception() is not None or copied_key != key:
            return None
        copied = copying.result()
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for tensor in copied.values():
                tensor.record_stream(stream)  # else their memory could be given away while this stream still reads it
        return copied

    def _shrink_to(self, max_bytes: int) -> None:
        """Drop the least recently used teachers until at most `max_bytes` are left: all of them if it is negative."""
        while self._states and sum(self._sizes.values()) > max_bytes:
            key, _ = self._states.popitem(last=False)
            del self._sizes[key]


def _memory_key(tensor: Tensor) -> object:
    """Return a key that two tensors share if they are the same memory in the same shape, such as a tied head and embedding."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _copy_state(state: Mapping[str, Tensor], copies: StagedCopies) -> State:
    """Copy all tensors; one that has two names stays one."""
    copied: dict[object, Tensor] = {}
    for tensor in state.values():
        if _memory_key(tensor) not in copied:
            copied[_memory_key(tensor)] = copies.copy(tensor)
    return {name: copied[_memory_key(tensor)] for name, tensor in state.items()}


def _count_bytes(state: State) -> int:
    """Return the bytes of all tensors; a tensor under two names counts once."""
    return sum({_memory_key(tensor): tensor.nbytes for tensor in state.values()}.values())
