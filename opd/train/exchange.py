"""Exchange of weights and gradients between ranks, without copies that DeepSpeed and torch would make.

Each `patch_` function replaces one function of DeepSpeed, which calls the replacement from then on; `opd.train.zero` says when.
Each asserts that the function is there: one that a newer release calls otherwise would be patched in vain, and nobody would
notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor


def patch_reduce_scatter() -> None:
    """Have DeepSpeed take gradients as they are, without a sum over ranks: the caller does this where there is one rank.

    Else DeepSpeed would copy all gradients three times, to sum over that one rank.
    """
    from deepspeed.runtime.zero import stage3

    assert callable(stage3.reduce_scatter_coalesced)
    stage3.reduce_scatter_coalesced = lambda tensors, group=None: [tensor.view(-1) for tensor in tensors]


def patch_flatten(optimizer: Any) -> None:
    """Have DeepSpeed's ZeRO optimiser hand AdamW the gradients in the memory in which they were summed.

    Else it copies all of them into one tensor in each step. They lie side by side already, and the next step's gradients overwrite
    them. What DeepSpeed flattens while it starts is copied as ever, because this is called later.
    """
    assert callable(optimizer.flatten)
    optimizer.flatten = partial(_join_adjacent, copy_flat=optimizer.flatten)


def _join_adjacent(tensors: Sequence[Tensor], copy_flat: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """Return the numbers of all tensors in order, [N]: a view if they lie side by side in one piece of memory, else a copy."""
    first_tensor = tensors[0]
    memory, end = first_tensor.untyped_storage().data_ptr(), first_tensor.storage_offset()
    for tensor in tensors:
        is_adjacent = tensor.untyped_storage().data_ptr() == memory and tensor.storage_offset() == end
        if not (is_adjacent and tensor.dtype == first_tensor.dtype and tensor.is_contiguous()):
            return copy_flat(tensors)
        end += tensor.numel()
    return first_tensor.as_strided((end - first_tensor.storage_offset(),), (1,))


def patch_post_step(optimizer: Any) -> None:
    """Have DeepSpeed's ZeRO optimiser gather all weights that stay whole between steps in one exchange, like those of a layer.

    Else it gathers each by itself after a step: with the 38 of a tiny model on two ranks an optimiser step took 35 ms, not 20.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    finish = optimizer._post_step
    assert callable(finish)

    def gather_and_finish(*args: Any, **kwargs: Any) -> None:
        # DeepSpeed drops the copies within groups (hpZ) only after this gather, which would read the old weights from them.
        optimizer.invalidate_secondary_tensor()
        absent = [p for p in optimizer.persistent_parameters if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        # Frozen weights keep their copies within groups. One gather takes either copies or the parts of all ranks.
        for has_copy in (False, True):
            together = [p for p in absent if (p.ds_secondary_tensor is not None) == has_copy]
            if together:
                together[0].all_gather_coalesced(together).wait()
        finish(*args, **kwargs)  # finds these weights whole and gathers none

    optimizer._post_step = gather_and_finish


def patch_all_gather() -> None:
    """Have DeepSpeed gather with `gather_in_place`. For gloo, after `deepspeed.init_distributed`, which makes `comm.cdb`."""
    from deepspeed.comm import comm

    assert callable(comm.cdb.all_gather_function)
    comm.cdb.all_gather_function = gather_in_place


def gather_in_place(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Broadcasts | None:
    """Gather like torch's `all_gather_into_tensor`, for gloo: each rank broadcasts its part into the others' output tensor.

    gloo's own gathers into a tensor that it allocates, in a thread, and copies that: each weight would be in memory twice.
    """
    from torch import distributed

    rank = distributed.get_rank(group)
    # DeepSpeed pads each weight so that all ranks' parts are of one size.
    parts = output_tensor.view(-1).chunk(distributed.get_world_size(group))
    parts[rank].copy_(input_tensor.view(-1))
    # One rank has all of it already; gloo would copy it with one thread.
    senders = enumerate(parts) if len(parts) > 1 else ()
    works = [distributed.broadcast(part, group=group, async_op=True, group_src=i) for i, part in senders]
    broadcasts = Broadcasts(works)
    if async_op:
        return broadcasts
    broadcasts.wait()
    return None


@dataclass(frozen=True, slots=True)
class Broadcasts:
    """Broadcasts under way, which DeepSpeed waits for as for one piece of work."""

    works: Sequence[Any]

    def wait(self) -> None:
        """Wait for all broadcasts. Raises: RuntimeError past the group's deadline, or if a rank is gone."""
        for work in self.works:
            work.wait()
