"""Write a sharded model as files: the ranks gather a few weights, one rank writes them, and all go on to the next.

What a rank holds beside its shares is the largest weight, or weights that the files have fused into one tensor; the writing
rank a copy of that in the files' form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.errors import StorageError
from opd.files import storing
from opd.model_files import ModelFiles
from opd.model_weights import FileGroup, State, file_groups, persistent_buffers, whole_shape
from opd.train.lora import PlainWeight


def gathered(params: Sequence[Any]) -> AbstractContextManager[None]:
    """Within, these parameters are whole on every rank; those that were whole before stay so.

    DeepSpeed keeps small parameters whole between steps. Its own context would cut them into shards at the end, and the next
    forward pass would have to gather them one by one.
    """
    from deepspeed import zero
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    absent = [param for param in params if param.ds_status is not ZeroParamStatus.AVAILABLE]
    context: AbstractContextManager[None] = zero.GatheredParameters(absent)
    return context


def write_model(lm: Any, weights: Sequence[PlainWeight], dtype: torch.dtype, path: Path | None, *, whole: bool) -> None:
    """Write config and weights into `path`, by the names and in the shapes of a model's files; a rank that has None only gathers.

    The weights get this type. Persistent buffers keep theirs and are written if the weights are `whole`: all that the model has.
    Raises: StorageError on the rank that writes, when all is gathered, because the other ranks do not know of it.
    """
    sources = {weight.name: weight for weight in weights}
    buffers = dict(persistent_buffers(lm)) if whole else {}
    groups = file_groups(lm, [*sources, *buffers])
    files: ModelFiles | None = None
    failed: list[StorageError] = []
    with ExitStack() as stack:
        if path is not None:
            with _noted(failed, path):
                files = stack.enter_context(ModelFiles(path, _planned(lm, groups, sources, buffers, dtype)))
        for group in groups:
            own = [sources[name] for name in group.names if name in sources]
            with gathered([param for weight in own for param in weight.params]):
                if files is not None and not failed:
                    values = {weight.name: weight.value().to("cpu", dtype) for weight in own}
                    values |= {name: buffers[name].cpu() for name in group.names if name in buffers}
                    with _noted(failed, files.path):
                        files.write(group.to_files(lm, values))
        if files is not None and not failed:
            with _noted(failed, files.path):
                files.finish()
                lm.config.save_pretrained(files.path)
    if failed:
        raise failed[0]


@contextmanager
def _noted(failed: list[StorageError], path: Path) -> Iterator[None]:
    """Within, a write that the disk refuses is noted."""
    try:
        with storing(path):
            yield
    except StorageError as error:
        failed.append(error)


def _planned(
    lm: Any,
    groups: Sequence[FileGroup],
    weights: Mapping[str, PlainWeight],
    buffers: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> State:
    """The tensors of the files without values."""
    shapes = {name: (whole_shape(weight.own), dtype) for name, weight in weights.items()}
    shapes |= {name: (buffer.shape, buffer.dtype) for name, buffer in buffers.items()}
    empty = {name: torch.empty(shape, dtype=kind, device="meta") for name, (shape, kind) in shapes.items()}
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # a part has the memory of the whole
        for group in groups
        for name, tensor in group.to_files(lm, {part: empty[part] for part in group.names}).items()
    }
