"""Teachers' weights on the device that computes: copied there once, and kept within a byte budget.

Weights come to a GPU from mapped files. The copy of a small model takes as long as some thousand tokens of scoring, that of a
large one seconds. On a CPU weights are where they are needed as soon as they are mapped, and nothing is copied or kept.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from teachers.weights import State


class DeviceCache:
    """Keeps the most recently used teachers whose sizes together fit the budget; the newest stays even if it alone exceeds it."""

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device = device
        self._copies_weights = device.type != "cpu"
        self._budget_bytes = budget_bytes
        self._states: OrderedDict[str, State] = OrderedDict()
        self._sizes: dict[str, int] = {}

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
        """Copy the tensors of `state`, the teacher `key`, to the device and return the copies. One tensor under two names stays one.

        Teachers are dropped to make room, but their memory is free only when the model has let go of them too: if `has_room_for` is
        False, the caller moves the model to the meta device first.
        """
        if not self._copies_weights:
            return state
        if (cached := self.find(key)) is not None:
            self._states.move_to_end(key)
            return cached
        nbytes = _count_bytes(state)
        self._shrink_to(self._budget_bytes - nbytes)
        copies: dict[object, Tensor] = {}
        for tensor in state.values():
            if _memory_key(tensor) not in copies:
                copies[_memory_key(tensor)] = tensor.to(self._device, copy=True)
        self._states[key] = {name: copies[_memory_key(tensor)] for name, tensor in state.items()}
        self._sizes[key] = nbytes
        return self._states[key]

    def _shrink_to(self, max_bytes: int) -> None:
        """Drop the least recently used teachers until at most `max_bytes` are left: all of them if it is negative."""
        while self._states and sum(self._sizes.values()) > max_bytes:
            key, _ = self._states.popitem(last=False)
            del self._sizes[key]


def _memory_key(tensor: Tensor) -> object:
    """Return a key that two tensors share if they are the same memory in the same shape, such as a tied head and embedding."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _count_bytes(state: State) -> int:
    """Return the bytes of all tensors; a tensor under two names counts once."""
    return sum({_memory_key(tensor): tensor.nbytes for tensor in state.values()}.values())
