"""A DeepSpeed engine of one rank: ZeRO-3 around any module whose forward returns a loss.

`ZeroEngine` handles weights, gradients, AdamW and checkpoints; the module alone decides on the loss. The ranks of trainer and
critic are subclasses that add the steps. An engine runs in a Ray actor but does not import Ray. Every method is called on all
ranks at once, because ZeRO-3's ranks gather weights together.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor, nn

from opd.config.sections import SUMMED_AT_ONCE
from opd.errors import RunError
from opd.machine.devices import to_device, trim_memory
from opd.machine.imports import TRANSFORMERS, import_lightly
from opd.machine.network import open_listener
from opd.models.layouts import LAYOUTS, Packed, find_positions_before, layout_error
from opd.models.linear_kernels import use_quick_products
from opd.models.weights import obeys_masks, takes_lengths, whole_shape
from opd.records.types import WrittenFile
from opd.train.compiled_layers import compile_layers
from opd.train.exchange import (
    patch_all_gather,
    patch_flatten,
    patch_post_step,
    patch_reduce_scatter,
)
from opd.train.export import FileTensors, write_model
from opd.train.gathered_layers import find_leaf_classes
from opd.train.lora import PlainWeight, list_plain_weights, select_changed_weights
from opd.train.optimizer import AdamWOptions, build_adamw
from opd.train.process_group import join_ranks
from opd.train.shards import MOMENTS, Shards, compute_part_sizes, write_shard
from opd.train.tiled_mlp import tile_mlps


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOptions:
    """The settings that a ZeRO engine is started with, for any loss; plain values, so they cross process boundaries."""

    name: str
    """Name of the model in errors, such as `student`."""
    world_size: int
    """Ranks that share the model."""
    dtype: str
    """Compute type; the optimiser's copy of the weights is float32."""
    vocab_size: int
    """Ids that the tokenizer knows; rows of a head beyond them are padding."""
    adamw: AdamWOptions
    """Settings of the optimiser; every step brings its own learning rate."""
    max_grad_norm: float
    """Gradients with a larger norm, taken over all ranks, are scaled down to this one."""
    grad_accum_dtype: str
    """Type in which gradients are summed over micro-batches and ranks."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass."""
    activation_offloading: bool = False
    """Keep what activations are recomputed from in the machine's memory, in place of the GPU's. A CPU has no other memory."""
    mlp_tile_tokens: int | None = None
    """Most tokens that an MLP computes at a time, see `opd.train.tiled_mlp`; None: all."""
    compile: bool = False
    """Fuse what layers do between matrix products, see `opd.train.compiled_layers`."""
    timeout_s: float
    """Deadline of each operation that the ranks do together."""
    bucket: int | None = None
    """Numbers that are gathered at a time (of weights) or summed over ranks at a time (of gradients); None: DeepSpeed's
    own bounds."""
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of DeepSpeed that the user chose, as `opd.config.deepspeed` allows them."""
    lends_memory: bool = False
    """Return the GPU memory that torch caches after each step, because an engine on that GPU wakes up next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(ZeroOptions):
    """The settings of a ZeRO engine whose model is read from a directory."""

    model_dir: Path
    """Hugging Face directory that the weights are read from."""
    sequence_parallel_size: int = 1
    """Ranks that share every row, see `opd.train.sequence_parallel`; divides the number of ranks."""
    eager_attention: bool = False
    """Compute attention step by step, which `compile` fuses, in place of torch's own kernel; see `opd.train.compiled_layers`."""


class ZeroEngine:
    """Holds one rank's shard of a model and of AdamW's state, and trains it with the loss of the module around the model."""

    def __init__(self, options: ZeroOptions, rank: int, build: Callable[[], nn.Module]) -> None:
        """Keep the settings; `start` does the work. `build` makes the module once the ranks have joined.

        The module's `lm` is the transformers model that is trained, saved and exported. The module's forward returns the loss,
        and whatever else a step of the subclass needs. Its methods `hidden_states` and `logprobs` are like those of
        `opd.train.student.Student`.
        """
        self._options = options
        self._rank = rank
        self._build = build
        self._dtype = getattr(torch, options.dtype)
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[tuple[WrittenFile, ...]] | None = None
        self._layout = "packed"
        self._listener: socket.socket | None = None
        """Listening socket at which rank 0 waits for the other ranks; None once they have joined."""

    def open_meeting_point(self, address: str) -> tuple[str, int]:
        """Listen on a free port of `address`, which this machine has. Returns address and port.

        Only rank 0 does this; what it returns is what every rank's `start` gets.
        """
        self._listener = open_listener(address)
        return address, int(self._listener.getsockname()[1])

    def start(self, address: str, port: int) -> None:
        """Join the other ranks and shard the model. Nothing else may be called before."""
        os.environ.update(
            RANK=str(self._rank),
            LOCAL_RANK="0",
            WORLD_SIZE=str(self._options.world_size),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        timeout = timedelta(seconds=self._options.timeout_s)
        join_ranks(address, port, self._rank, self._options.world_size, timeout, self._listener)
        self._listener = None
        self._engine = _start_deepspeed(self._options, self._build)
        self._device = self._engine.device

    # Forward passes

    def layout_error(self, layout: str) -> float:
        """Measure the error of a layout for this model: see `opd.models.layouts.layout_error`."""
        module = self._engine.module
        return layout_error(
            lambda packed: self._compute_states(to_device(packed, self._device)),
            layout,
            self._options.vocab_size,
            self._dtype,
            masks_decide=obeys_masks(module.lm),
            lengths_decide=takes_lengths(module.lm),
        )

    def _compute_states(self, packed: Packed) -> Tensor:
        """Return [B*T, D] the last hidden states of a layout, as this engine trains with it."""
        hidden_N_D: Tensor = self._engine.module.compute_hidden_states(packed)
        return hidden_N_D

    def use_layout(self, layout: str) -> None:
        """Use this layout for all sequences from now on."""
        self._layout = layout
        self._trim_memory()

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return [sequence][token - 1] the log-prob of every token after the first, from the current weights."""
        packed = LAYOUTS[self._layout](sequences)
        predict_N = find_positions_before(packed, [(1, len(s)) for s in sequences])
        token_N = torch.tensor([t for s in sequences for t in s[1:]], device=self._device)
        with torch.no_grad():
            logprob_N = self._engine.module.compute_logprobs(to_device(packed, self._device), predict_N, token_N)
        self._trim_memory()
        return [part.tolist() for part in logprob_N.cpu().split([len(s) - 1 for s in sequences])]

    # One optimiser step

    @property
    def model(self) -> Any:
        """DeepSpeed's engine around the module; it is called with the arguments of the module's forward."""
        return self._engine

    def add_gradients(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a loss that `model` returned for one micro-batch.

        DeepSpeed averages gradients over ranks. `last`: True if the optimiser step comes next.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss)
        self._trim_memory()

    def local_gradients(self) -> list[Tensor]:
        """Copy this rank's shard of the gradients that were added since the last step, one tensor per trained parameter."""
        from deepspeed.utils import safe_get_local_grad

        return [safe_get_local_grad(param).clone() for _, param in self._trained_parameters()]

    def take_step(self, step: int, lr: float, share: float = 1.0) -> float:
        """Take an optimiser step with the sum of the gradients divided by `share`. Returns the norm of the quotient before clipping.

        Raises: RunError on a non-finite gradient.
        """
        optimizer = self._engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        if share != 1:
            # DeepSpeed divides gradients by its loss scale before it clips them, so we pass the share as a loss scale.
            optimizer.override_loss_scale(share)
        self._engine.step()
        optimizer.custom_loss_scaler = False  # if it stayed on, the next step's loss would be multiplied by the share
        grad_norm = float(self._engine.get_global_grad_norm())
        if self._options.lends_memory:
            torch.cuda.empty_cache()
        if not math.isfinite(grad_norm):
            raise RunError(
                f"step {step}: gradient norm {grad_norm}: the {self._options.name}'s weights or the learning rate broke"
            )
        return grad_norm

    def _trim_memory(self) -> None:
        """Give freed memory back to the system if weights are gathered by bucket.

        Freed activations leave small blocks, and holes between them that no gathered weight fits.
        """
        if self._options.bucket is not None:
            trim_memory()

    # Weights and state

    def export(self, path: Path, only_changed: bool = False) -> bool:
        """Gather the weights, a few at a time, and let rank 0 write config and safetensors into `path`.

        The files hold a model without adapters: what adapters add is added to the weights. With `only_changed` they hold only
        the weights of `select_changed_weights`. Returns True if all weights were written.
        """
        tensors = self._file_tensors(only_changed)
        write_model(tensors, path if self._rank == 0 else None)
        return tensors.complete

    def _file_tensors(self, only_changed: bool) -> FileTensors:
        """Return the weights in the form of the model's files: all of them, or only those that training changes."""
        every = list_plain_weights(self._engine.module.lm)
        weights = self._pushed_weights if only_changed else every
        return FileTensors(self._engine.module.lm, weights, self._dtype, complete=len(weights) == len(every))

    @cached_property
    def _pushed_weights(self) -> Sequence[PlainWeight]:
        """The weights that a push sends. They are found once: every push sends the same ones."""
        lm = self._engine.module.lm
        return select_changed_weights(lm, list_plain_weights(lm))

    def begin_save(self, path: Path) -> None:
        """Copy this rank's float32 weights and Adam moments; a thread writes them into `path` while the run goes on.

        Frozen weights are not saved: a resume reads them from the model's directory again.
        """
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        if not self._adam_state():
            self._create_moments(0)  # no step has been taken yet: save the zeros with which AdamW would begin
        tensors, more = {}, self._more_shards()
        for name, param in self._trained_parameters():
            num_values = compute_part_sizes(param.ds_numel, self._options.world_size)[self._rank]
            local = {"param": safe_get_local_fp32_param(param)} | {
                k: safe_get_local_optimizer_state(param, k) for k in MOMENTS
            }
            local |= {kind: shards[name] for kind, shards in more.items()}
            # The shards of the last ranks end in padding, which a checkpoint does not have: `[:num_values]` cuts it off.
            tensors.update(
                {f"{kind}/{name}": t[:num_values].to("cpu", torch.float32, copy=True) for kind, t in local.items()}
            )
        self._saving = self._disk.submit(
            write_shard, path, self._rank, self._options.world_size, tensors, int(self._adam_state()["step"])
        )

    def saved(self, wait_s: float) -> tuple[WrittenFile, ...] | None:
        """Return the files of the last `begin_save`; None if they are not all written after `wait_s`. Raises: StorageError."""
        assert self._saving is not None
        wait([self._saving], timeout=wait_s)
        return self._saving.result() if self._saving.done() else None

    def load(self, path: Path) -> None:
        """Restore a checkpoint of any number of ranks: each rank reads its own parts from all files."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        optimizer = self._engine.optimizer
        # DeepSpeed keeps small parameters whole on every rank. The prologue cuts them into shards, which are overwritten
        # here; the epilogue gathers them again.
        optimizer.checkpoint_event_prologue()
        with Shards(path) as shards:
            # A run that branches off another one may keep what that did not.
            more: dict[str, dict[str, Tensor]] = {k: {} for k in self._more_shards() if shards.has_kind(k)}
            self._create_moments(shards.adam_step)
            for name, param in self._trained_parameters():
                size = param.ds_tensor.numel()

                def part(kind: str, name: str = name, numel: int = param.ds_numel, size: int = size) -> Tensor:
                    return shards.read_slice(f"{kind}/{name}", numel, self._rank * size, size)

                weights = part("param")
                safe_set_local_fp32_param(param, weights)
                param.ds_tensor.data.copy_(weights)
                for kind in MOMENTS:
                    safe_set_local_optimizer_state(param, part(kind), kind)
                for kind, own in more.items():
                    own[name] = part(kind)
        self._take_more_shards(more)
        # Copies of the weights that the ranks of one machine share are as old as the weights before.
        optimizer.invalidate_secondary_tensor()
        optimizer.checkpoint_event_epilogue()

    def _more_shards(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return kind -> parameter's name -> shard, for what a checkpoint has beside weights and moments."""
        return {}

    def _take_more_shards(self, more: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `_more_shards` returned when the checkpoint was written; what is not there begins anew from the weights."""

    def _trained_parameters(self) -> list[tuple[str, Any]]:
        """Return name and parameter for every parameter that training changes."""
        return [(name, param) for name, param in self._engine.module.lm.named_parameters() if param.requires_grad]

    def _flat_groups(self) -> list[Tensor]:
        return self._engine.optimizer.fp32_partitioned_groups_flat

    def _adam_state(self) -> Mapping[str, Any]:
        """Return AdamW's state of the first parameter group; empty before the first step."""
        return self._engine.optimizer.optimizer.state.get(self._flat_groups()[0], {})

    def _create_moments(self, adam_step: int) -> None:
        # torch's AdamW creates its state in the first step, but a checkpoint is restored before that.
        for flat in self._flat_groups():
            self._engine.optimizer.optimizer.state[flat] = {
                "step": torch.tensor(float(adam_step), device=flat.device),
                **{kind: torch.zeros_like(flat) for kind in MOMENTS},
            }


def _start_deepspeed(options: ZeroOptions, build: Callable[[], nn.Module]) -> Any:
    """Build the module and DeepSpeed's engine around it, once all ranks have joined."""
    import_lightly("deepspeed", TRANSFORMERS)
    import deepspeed
    from deepspeed.utils import nvtx, set_z3_leaf_modules

    # Without this DeepSpeed looks for compilers and builds a kernel for inference with g++, which takes half a minute. We
    # use no such kernel.
    deepspeed.ops.__compatible_ops__ = {}
    if options.world_size == 1:
        patch_reduce_scatter()
    if not torch.cuda.is_available():
        _make_sums_deterministic()
        nvtx.enable_nvtx = False  # these marks for a GPU's profiler would surround each of thousands of calls
    deepspeed.init_distributed(
        dist_backend="nccl" if torch.cuda.is_available() else "gloo",
        timeout=timedelta(seconds=options.timeout_s),
        verbose=False,
    )
    if not torch.cuda.is_available():
        patch_all_gather()
    module: Any = build()
    _disable_randomness(
        module, options.gradient_checkpointing, options.activation_offloading and torch.cuda.is_available()
    )
    # Each step sets its own rate.
    optimizer = build_adamw(module, options.adamw, lr=0.0)
    leaf_classes = find_leaf_classes(module.lm, options.world_size, compiled=options.compile)
    if options.mlp_tile_tokens is not None:
        leaf_classes += tile_mlps(module.lm, options.mlp_tile_tokens)
    if leaf_classes:
        set_z3_leaf_modules(module.lm, leaf_classes)
        if not all(param.requires_grad for param in module.lm.parameters()):
            # If no gradient reaches the input of a layer that is gathered as one, DeepSpeed releases its weights too early.
            # That is so for layers below the first adapter.
            module.lm.enable_input_require_grads()
    trained = sum(whole_shape(param).numel() for param in module.parameters() if param.requires_grad)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=_deepspeed_config(options, trained))
    patch_flatten(engine.optimizer)
    patch_post_step(engine.optimizer)
    if options.compile:
        compile_layers(module.lm)
    else:
        use_quick_products(module.lm, engine.device, sharded=options.world_size > 1)
    return engine


def _make_sums_deterministic() -> None:
    """Make torch add gradients in a fixed order on the CPU, so that a resume gives the same bits.

    By default torch's threads add the gradients of indexed tensors in the order in which the threads finish. The experts of
    gpt-oss are such tensors; for models without them this setting changes no bit.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling new memory is for debugging only, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _disable_randomness(module: Any, gradient_checkpointing: bool, offloading: bool = False) -> None:
    """Switch dropout and router noise off: the engine that wrote the tokens has neither, and the loss is about that policy.

    Layers recompute their activations only in training mode. So with `gradient_checkpointing` the layers are put into training
    mode, while the modules inside of them stay in evaluation mode. `offloading` moves the inputs of layers, from which they
    recompute, into the machine's memory until then.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    module.eval()
    if gradient_checkpointing:
        module.lm.gradient_checkpointing_enable(offload=offloading)
        for layer in module.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.training = True


_DEEPSPEED_NAME = {"float32": "fp32", "bfloat16": "bf16"}
"""torch's name of a type -> DeepSpeed's."""


def _bucket_settings(options: ZeroOptions, trained: int) -> dict[str, int | bool]:
    """Return DeepSpeed's bucket settings: how many weights a rank gathers at a time, and how many gradients it sums over ranks.

    `trained` is the number of trained values.
    """
    # DeepSpeed allocates the whole bucket, so it is no larger than all gradients together.
    at_most = min(trained, options.bucket or SUMMED_AT_ONCE)
    summed: dict[str, int | bool] = {"reduce_bucket_size": at_most}
    if options.world_size == 1:
        # A single rank has every weight. DeepSpeed would spend seconds on planning which ones to gather ahead and to keep. Its
        # own linear layer, which releases gathered weights early, is slower than torch's.
        at_hand = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "memory_efficient_linear": False}
        return summed | at_hand
    if options.bucket is None:
        return summed
    # Weights that DeepSpeed keeps for their next use would need memory beside the bucket, so it keeps none.
    limits = {"stage3_max_live_parameters": options.bucket, "stage3_max_reuse_distance": 0}
    return summed | limits | {"stage3_prefetch_bucket_size": options.bucket}


def _deepspeed_config(options: ZeroOptions, trained: int) -> dict[str, Any]:
    own = dict(options.deepspeed)
    # A CPU has no second stream on which sums over ranks could overlap with the backward pass.
    zero = {"stage": 3, "overlap_comm": torch.cuda.is_available(), **_bucket_settings(options, trained)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.max_grad_norm,
        "bf16": {"enabled": options.dtype == "bfloat16"},
        # `data_types` sets the type in which a rank sums its micro-batches; `communication_data_type`, that of sums over ranks.
        "data_types": {"grad_accum_dtype": _DEEPSPEED_NAME[options.grad_accum_dtype]},
        "communication_data_type": _DEEPSPEED_NAME[options.grad_accum_dtype],
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW computes on a CPU too, and DeepSpeed's own needs a compiler
        "steps_per_print": 10**9,  # never
        **own,
        "zero_optimization": zero | dict(own.get("zero_optimization", {})),
    }
