"""Load a model so that each rank keeps its share of every weight, and no rank ever holds the whole model.

transformers makes the model on the meta device. It then reads one tensor after the other, converts those that its modules have
under other names or in other shapes, and gives each to its module. At that moment we cut the weight among the ranks and keep one
part, before the next tensor is read. All ranks do this at the same time.

A rank holds at most its shares, a few times the largest weight while that is read and converted, and the weights with a row for
every token id, which are cut last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opd.models.files import weight_files
from opd.models.weights import Naming, choose_attention

if TYPE_CHECKING:
    from opd.train.zero import ModelOptions


def load_model_share(options: ModelOptions) -> Any:
    """Load a rank's share of its model, as the rank's options say: see `load_share`."""
    return load_share(
        options.model_dir,
        getattr(torch, options.dtype),
        bucket=options.bucket,
        eager_attention=options.eager_attention,
        deepspeed=options.deepspeed,
    )


def load_share(
    model_dir: Path,
    dtype: torch.dtype,
    *,
    bucket: int | None = None,
    eager_attention: bool = False,
    deepspeed: Mapping[str, Any] | None = None,
) -> Any:
    """Load this rank's share of a directory's causal language model: see `opd.models.weights.load_causal_lm`.

    All ranks call this at the same time, once they have joined. If `bucket` (`ZeroOptions.bucket`) is set, each weight is later
    gathered by itself. By default DeepSpeed gathers the weights of a module in one piece, copies them out of it, and keeps the
    piece until the last of them is used. `deepspeed`: `ZeroOptions.deepspeed`, which may say where the shares are kept.
    """
    from transformers import AutoConfig

    empty = Naming(AutoConfig.from_pretrained(model_dir, trust_remote_code=False), dtype).model
    config, cut = empty.config, _Cut(dtype, deepspeed or {}, one_by_one=bucket is not None)
    rows = config.get_text_config(decoder=True).vocab_size
    attends = "eager" if eager_attention else choose_attention(config, cut.device, dtype)
    with _tensor_readers(model_dir) as tensors, _read_one_at_a_time(), _cut_when_it_comes(cut, rows):
        lm = type(empty).from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, attn_implementation=attends
        )
    for param in lm.parameters():
        cut(param)
    cut.number_parameters(lm)
    lm.config.name_or_path = str(model_dir)
    return lm.to(cut.device)


class _Cut:
    """Cuts parameters among the ranks in place, one at a time; DeepSpeed itself cuts a whole model."""

    def __init__(self, dtype: torch.dtype, deepspeed: Mapping[str, Any], *, one_by_one: bool) -> None:
        from deepspeed import zero

        self._dtype = dtype
        section = {"stage": 3} | dict(deepspeed.get("zero_optimization", {}))
        # DeepSpeed wants a batch size in every configuration; nothing here depends on it.
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": section}
        self._zero = zero.Init(module=nn.Module(), dtype=dtype, config_dict_or_path=config if deepspeed else None)
        self._zero.allgather_sequential = one_by_one
        self.device: torch.device = self._zero.local_device

    def __call__(self, param: Any) -> None:
        """Cut this parameter if it is not cut yet, and convert it to the compute type: transformers keeps some in another type."""
        if hasattr(param, "ds_id"):
            return
        if param.is_floating_point():
            param.data = param.data.to(self._dtype)
        # DeepSpeed sends rank 0's values to the other ranks as bytes, so they have to be contiguous.
        param.data = param.data.contiguous()
        self._zero._convert_to_zero_parameters([param])

    def number_parameters(self, lm: nn.Module) -> None:
        """Number the parameters in the model's order: they were cut in the order of the files, and DeepSpeed sums gradients by number."""
        params: list[Any] = list(lm.parameters())
        for param, number in zip(params, sorted(param.ds_id for param in params), strict=True):
            param.ds_id = number


@contextmanager
def _cut_when_it_comes(cut: _Cut, rows: int) -> Iterator[None]:
    """Within, each weight that comes from a file is cut when its module gets it.

    Two kinds stay whole until the end. A weight with `rows` rows may be tied to another one; if the files have both, transformers
    compares them at the end. And weights that no file has are still to be filled.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def hook(module: nn.Module, name: str, param: nn.Parameter) -> None:
        if not param.is_meta and getattr(param, "_is_hf_initialized", False) and param.shape[:1] != (rows,):
            cut(param)

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _tensor_readers(model_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield name -> slice object, which reads a tensor from the files when it is indexed.

    The files are read and not mapped into memory, because a process that maps a file keeps all pages that it has touched.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        paths = weight_files(model_dir)
        files = [stack.enter_context(safe_open(path, framework="pt", backend="pread")) for path in paths]
        yield {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 - no mapping


@contextmanager
def _read_one_at_a_time() -> Iterator[None]:
    """Within, transformers reads a tensor only when it needs it. By default its threads read all tensors ahead."""
    key = "HF_DEACTIVATE_ASYNC_LOAD"
    old_value = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if old_value is None:
            del os.environ[key]
        else:
            os.environ[key] = old_value
