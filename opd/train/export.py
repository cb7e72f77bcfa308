"""Export of a sharded model with the names and shapes of its files. All ranks gather a few weights, one rank writes or sends them,
and all go on to the next.

A rank holds at most its shares and one group of gathered weights: a single weight, or those that the files fuse into one tensor.
The rank that writes also holds a copy of the group in the files' form. The rank that sends also holds a bucket, or several if the
group needs several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.errors import StorageError
from opd.files import raise_storage_errors
from opd.models.buckets import Bucket, BucketSlot, BucketWriter, count_padded_bytes, make_slots
from opd.models.files import ModelFiles
from opd.models.weights import FileGroup, State, iterate_persistent_buffers, make_file_groups, whole_shape
from opd.train.lora import PlainWeight


def gather_parameters(params: Sequence[Any]) -> AbstractContextManager[None]:
    """Within, these parameters are whole on every rank. Those that were whole before stay whole afterwards.

    DeepSpeed keeps small parameters whole between steps. Its own context manager would cut them too at its end, and the next
    forward pass would have to gather them one by one.
    """
    from deepspeed import zero
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    absent = [param for param in params if param.ds_status is not ZeroParamStatus.AVAILABLE]
    if not absent:
        return nullcontext()
    context: AbstractContextManager[None] = zero.GatheredParameters(absent)
    return context


class FileTensors:
    """A sharded model's tensors in the form of its files, group by group in the order of the files."""

    def __init__(self, lm: Any, weights: Sequence[PlainWeight], dtype: torch.dtype, *, complete: bool) -> None:
        """Plan the groups. Weights are converted to `dtype`; persistent buffers keep their type. `complete`: `weights` are all
        weights of the model; only then are buffers included."""
        self.lm = lm
        self.complete = complete
        """True if these are all tensors that the model's files have."""
        self._dtype = dtype
        self._sources = {weight.name: weight for weight in weights}
        self._buffers = dict(iterate_persistent_buffers(lm)) if complete else {}
        self.groups = make_file_groups(lm, [*self._sources, *self._buffers])

    def planned_tensors(self) -> Iterator[State]:
        """Yield, for each group, its tensors on the meta device: names, shapes and types of the files, without values."""
        shapes = {name: (whole_shape(weight.param), self._dtype) for name, weight in self._sources.items()}
        shapes |= {name: (buffer.shape, buffer.dtype) for name, buffer in self._buffers.items()}
        empty = {name: torch.empty(shape, dtype=kind, device="meta") for name, (shape, kind) in shapes.items()}
        for group in self.groups:
            file_tensors = group.to_files(self.lm, {part: empty[part] for part in group.names})
            # New tensors, because `file_tensors` may be views, whose storage is that of a larger tensor.
            yield {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in file_tensors.items()}

    def gather_group(self, group: FileGroup) -> AbstractContextManager[None]:
        """Within, `group_tensors` may be called. All ranks enter the context together."""
        return gather_parameters(
            [param for name in group.names if name in self._sources for param in self._sources[name].params]
        )

    def group_tensors(self, group: FileGroup) -> State:
        """Return the tensors of a group on the model's device; they may be views of weights that are gathered."""
        return group.to_files(self.lm, {name: self._gathered_tensor(name) for name in group.names})

    def _gathered_tensor(self, name: str) -> Tensor:
        if name in self._buffers:
            return self._buffers[name]
        return self._sources[name].read_tensor().to(self._dtype)


def write_model(tensors: FileTensors, path: Path | None) -> None:
    """Write config and weights into `path`. A rank whose `path` is None only gathers.

    Raises: StorageError on the rank that writes, but only when everything is gathered: the other ranks do not know of the
    error and would wait for this one.
    """
    files: ModelFiles | None = None
    failed: list[StorageError] = []
    with ExitStack() as stack:
        if path is not None:
            with _note_failed_write(failed, path):
                tensor_by_name = {name: tensor for group in tensors.planned_tensors() for name, tensor in group.items()}
                files = stack.enter_context(ModelFiles(path, tensor_by_name))
        for group in tensors.groups:
            with tensors.gather_group(group):
                if files is not None and not failed:
                    with _note_failed_write(failed, files.path):
                        cpu_tensors = {name: tensor.cpu() for name, tensor in tensors.group_tensors(group).items()}
                        files.write(cpu_tensors)
                        del cpu_tensors  # else they would take memory while the next group is gathered
        if files is not None and not failed:
            with _note_failed_write(failed, files.path):
                files.finish()
                tensors.lm.config.save_pretrained(files.path)
    if failed:
        raise failed[0]


@contextmanager
def _note_failed_write(failed: list[StorageError], path: Path) -> Iterator[None]:
    """Within, append a failed write to `failed` in place of raising it."""
    try:
        with raise_storage_errors(path):
            yield
    except StorageError as error:
        failed.append(error)


class WeightSender:
    """Gathers the tensors of `FileTensors` in buckets. All ranks gather the same bucket at the same time; one of them gets it."""

    def __init__(self, tensors: FileTensors, nbytes: int) -> None:
        """Plan the buckets: see `plan_parts`."""
        self._tensors = tensors
        self._pending_parts = deque(plan_parts(tensors, nbytes))
        self._ready_buckets: deque[Bucket | None] = deque()
        """Buckets that were gathered together with an earlier one, in the order in which they are returned next."""
        self.count = sum(len(part.buckets) for part in self._pending_parts)
        """Number of buckets."""

    def gather_bucket(self, *, sends: bool) -> Bucket | None:
        """Return the next bucket on the rank whose `sends` is true, else None. All ranks call this together."""
        if not self._ready_buckets:
            self._ready_buckets.extend(self._gather_part(self._pending_parts.popleft(), sends))
        return self._ready_buckets.popleft()

    def _gather_part(self, part: GatheredPart, sends: bool) -> list[Bucket | None]:
        writers = [BucketWriter(slots[-1].end) for slots in part.buckets] if sends else []
        for group in part.groups:
            with self._tensors.gather_group(group):
                if sends:
                    values = self._tensors.group_tensors(group)
                    for writer, slots in zip(writers, part.buckets, strict=True):
                        writer.add({slot.name: values[slot.name] for slot in slots if slot.name in values})
        return [writer.finish_bucket() for writer in writers] if sends else [None] * len(part.buckets)


@dataclass(slots=True)
class GatheredPart:
    """Weights that are gathered before the next are: groups that share one bucket, or one group that needs several buckets, such as
    the experts of a layer."""

    groups: list[FileGroup]
    buckets: list[tuple[BucketSlot, ...]]


def plan_parts(tensors: FileTensors, nbytes: int) -> list[GatheredPart]:
    """Plan the buckets without gathering anything. All have the same limit: `nbytes`, or the size of the largest tensor if that is more.

    Machines pass buckets on to each other, and the others would wait for the one that has a bucket larger than theirs.
    """
    states = list(tensors.planned_tensors())
    sizes = [{name: count_padded_bytes(tensor) for name, tensor in state.items()} for state in states]
    room = max((nbytes, *(size for group in sizes for size in group.values())))
    tensor_by_name = {name: tensor for state in states for name, tensor in state.items()}
    return [
        GatheredPart(groups, [make_slots({name: tensor_by_name[name] for name in names}) for names in buckets])
        for groups, buckets in _split_groups(tensors.groups, sizes, room)
    ]


def _split_groups(
    groups: Sequence[FileGroup], group_sizes: Sequence[Mapping[str, int]], room: int
) -> Iterator[tuple[list[FileGroup], list[list[str]]]]:
    """Put groups into buckets in order, as many into each as it has room for. Yield groups that are gathered before the next are, with the
    names of the tensors in their bucket; a group that needs several buckets comes alone.

    `group_sizes` has, for each group, name -> bytes of its tensors. `room`: bytes of a bucket; no tensor is larger.
    """
    held: list[FileGroup] = []
    names: list[str] = []
    bytes_held = 0
    for group, sizes in zip(groups, group_sizes, strict=True):
        size = sum(sizes.values())
        if held and bytes_held + size > room:
            yield held, [names]
            held, names, bytes_held = [], [], 0
        if size > room:
            yield [group], list(_split_group(sizes, room))
        else:
            held.append(group)
            names.extend(sizes)
            bytes_held += size
    if held:
        yield held, [names]


def _split_group(sizes: Mapping[str, int], room: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each bucket of a group that needs several, as many tensors in each as it has room for."""
    held: dict[str, int] = {}
    for name, size in sizes.items():
        if held and sum(held.values()) + size > room:
            yield list(held)
            held = {}
        held[name] = size
    yield list(held)
