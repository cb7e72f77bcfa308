"""One DeepSpeed rank. Runs in a Ray actor; knows nothing of Ray. Every method is called on all ranks at once."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.errors import RunError
from opd.losses import OBJECTIVES
from opd.stream.heads import head_tensor
from opd.stream.schema import TargetRow, read_stream
from opd.train.batch import MicroBatch, micro_batch, pack_sequences, predict_positions
from opd.train.student import Student

STATE_FILE = "trainer.safetensors"
STATE_META = "trainer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
HEAD_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What a rank is started with; plain values, so they cross process boundaries."""

    model_dir: Path
    dtype: str
    world_size: int
    objective: str
    chunk: int
    vocab_size: int
    """Ids that the tokenizer knows; rows of a head beyond them are padding."""
    adam_betas: tuple[float, float]
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    gradient_checkpointing: bool
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's part of one optimiser step."""

    step: int
    lr: float
    micro_batches: tuple[tuple[str, ...], ...]
    """Sample ids of each micro-batch; every rank has the same number of them."""
    total_tokens: int
    """Trained tokens over all ranks: the loss is their mean."""
    total_rows: int
    """Rows over all streams of the step; fewer means that something was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Sums over one rank's rows."""

    loss_sum: float
    """Sum of KL over trained tokens divided by `total_tokens`."""
    grad_norm: float
    gap_sum: float
    """Sum of |trainer - engine| log-prob over trained tokens."""
    domains: dict[str, tuple[int, float, int]]
    """Domain -> (trained tokens, KL sum, rows)."""


class TrainerRank:
    """Holds a shard of the student and of AdamW's state."""

    def __init__(self, options: RankOptions, rank: int) -> None:
        self._options = options
        self._rank = rank
        self._dtype = getattr(torch, options.dtype)
        self._heads: OrderedDict[str, Tensor] = OrderedDict()

    def meeting_point(self, loopback: bool) -> tuple[str, int]:
        """An address of this machine and a free port; rank 0's is where all ranks meet."""
        address = "127.0.0.1" if loopback else socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, int(probe.getsockname()[1])

    def start(self, address: str, port: int) -> None:
        """Join the other ranks and shard the student. Nothing else may be called before."""
        os.environ.update(
            RANK=str(self._rank),
            LOCAL_RANK="0",
            WORLD_SIZE=str(self._options.world_size),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        self._engine = _start_engine(self._options)
        self._device = self._engine.device

    def train_step(self, work: RankWork, head_keys: Sequence[str], *arrays: np.ndarray) -> RankResult:
        """Accumulate gradients over the micro-batches, then step once. Raises: RunError on a non-finite gradient.

        `arrays` are the heads named by `head_keys`, then the streams: arguments of their own, because that is what Ray
        hands over as views into shared memory.
        """
        heads = dict(zip(head_keys, arrays[: len(head_keys)], strict=True))
        rows, dtype = _select(work, arrays[len(head_keys) :])
        for group in self._engine.optimizer.param_groups:
            group["lr"] = work.lr
        totals = _Totals()
        for index, ids in enumerate(work.micro_batches):
            batch = micro_batch([rows[i] for i in ids], dtype)
            loss_heads = {run.head: self._head(run.head, heads) for run in batch.runs}
            # DeepSpeed averages gradients over ranks; the objective is a mean over the global batch.
            weight_N = batch.mask_N.float() * (self._options.world_size / work.total_tokens)
            self._engine.set_gradient_accumulation_boundary(index == len(work.micro_batches) - 1)
            loss, stats = self._engine(_to(batch, self._device), loss_heads, weight_N.to(self._device))
            self._engine.backward(loss)
            totals.add(batch, stats.kl_N.cpu(), stats.logprob_N.cpu())
        self._engine.step()
        grad_norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(grad_norm):
            raise RunError(
                f"step {work.step}: gradient norm {grad_norm}: a teacher's hidden states or the student's weights are not finite"
            )
        return RankResult(
            loss_sum=totals.kl / work.total_tokens, grad_norm=grad_norm, gap_sum=totals.gap, domains=totals.domains
        )

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """[sequence][token - 1] log-prob of every token after the first, from the current weights."""
        packed = pack_sequences(sequences)
        predict_N = predict_positions(packed, [(1, len(s)) for s in sequences])
        token_N = torch.tensor([t for s in sequences for t in s[1:]])
        with torch.no_grad():
            student = self._engine.module
            hidden_N_D = student.hidden(_to(packed, self._device))[predict_N]
            logprob_N = student.loss_head(hidden_N_D, token_N.to(self._device), None, None)
        return [part.tolist() for part in logprob_N.cpu().split([len(s) - 1 for s in sequences])]

    def export(self, path: Path) -> None:
        """Gather the weights, one parameter at a time, and let rank 0 write config and safetensors into `path`."""
        from huggingface_hub import save_torch_state_dict

        state = {}
        for name, weight in self._gathered():
            if self._rank == 0:
                state[name] = weight
        if self._rank == 0:
            save_torch_state_dict(state, path, max_shard_size="5GB")
            self._engine.module.lm.config.save_pretrained(path)

    def save(self, path: Path) -> None:
        """Write float32 weights and both Adam moments, whole and by name, so any number of ranks can read them."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
        from safetensors.torch import save_file

        tensors = {}
        for name, param in self._engine.module.lm.named_parameters():
            whole = {"param": safe_get_full_fp32_param(param)} | {
                k: safe_get_full_optimizer_state(param, k) for k in MOMENTS
            }
            if self._rank == 0:
                tensors.update(
                    {
                        f"{kind}/{name}": t.detach().float().reshape(param.ds_shape).cpu().clone()
                        for kind, t in whole.items()
                    }
                )
        if self._rank == 0:
            save_file(tensors, path / STATE_FILE)
            (path / STATE_META).write_text(json.dumps({"format": 1, "adam_step": self._adam_step()}))

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, with the ranks of now."""
        from deepspeed import zero
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state
        from safetensors import safe_open

        meta = json.loads((path / STATE_META).read_text())
        self._create_moments(meta["adam_step"])
        with safe_open(path / STATE_FILE, framework="pt") as file:
            for name, param in self._engine.module.lm.named_parameters():
                whole = file.get_tensor(f"param/{name}")
                safe_set_local_fp32_param(param, self._shard(whole, param))
                for kind in MOMENTS:
                    safe_set_local_optimizer_state(param, self._shard(file.get_tensor(f"{kind}/{name}"), param), kind)
                with zero.GatheredParameters([param], modifier_rank=0):
                    param.data.copy_(whole.to(param.dtype))

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed import zero

        for name, param in self._engine.module.lm.named_parameters():
            with zero.GatheredParameters([param]):
                yield name, param.detach().to("cpu", self._dtype, copy=True) if self._rank == 0 else param

    def _shard(self, whole: Tensor, param: Any) -> Tensor:
        # ZeRO-3 pads the flat parameter to a multiple of the number of ranks; its own setter forgets the padding.
        size = param.ds_tensor.ds_numel if hasattr(param.ds_tensor, "ds_numel") else param.ds_tensor.numel()
        flat = torch.zeros(size * self._options.world_size)
        flat[: whole.numel()] = whole.flatten()
        return flat[self._rank * size : (self._rank + 1) * size]

    def _flat_groups(self) -> list[Tensor]:
        return self._engine.optimizer.fp32_partitioned_groups_flat

    def _adam_step(self) -> int:
        states = [self._engine.optimizer.optimizer.state.get(flat, {}) for flat in self._flat_groups()]
        return int(states[0]["step"]) if states[0] else 0

    def _create_moments(self, adam_step: int) -> None:
        # torch's AdamW creates its state in the first step; a restored one must exist before.
        for flat in self._flat_groups():
            self._engine.optimizer.optimizer.state[flat] = {
                "step": torch.tensor(float(adam_step)),
                **{kind: torch.zeros_like(flat) for kind in MOMENTS},
            }

    def _head(self, key: str, heads: Mapping[str, np.ndarray]) -> Tensor:
        """The head as a tensor on this device, kept while the least recently used ones make room."""
        if key not in self._heads:
            self._heads[key] = head_tensor(heads[key]).to(self._device)
            while len(self._heads) > 1 and sum(h.nbytes for h in self._heads.values()) > HEAD_CACHE_BYTES:
                self._heads.popitem(last=False)
        self._heads.move_to_end(key)
        return self._heads[key]


class _Totals:
    """Sums over a rank's micro-batches."""

    def __init__(self) -> None:
        self.kl = 0.0
        self.gap = 0.0
        self.domains: dict[str, tuple[int, float, int]] = {}

    def add(self, batch: MicroBatch, kl_N: Tensor, logprob_N: Tensor) -> None:
        mask_N = batch.mask_N
        self.gap += float((logprob_N - batch.behaviour_N).abs()[mask_N].sum())
        lengths = list(batch.row_lengths)
        for domain, kl_R, mask_R in zip(batch.domains, kl_N.split(lengths), mask_N.split(lengths), strict=True):
            kl = float(kl_R[mask_R].sum())
            tokens, kl_sum, rows = self.domains.get(domain, (0, 0.0, 0))
            self.domains[domain] = (tokens + int(mask_R.sum()), kl_sum + kl, rows + 1)
            self.kl += kl


def _select(work: RankWork, streams: Sequence[np.ndarray]) -> tuple[dict[str, TargetRow], torch.dtype]:
    """This rank's rows of a step by sample id. Raises: RunError if rows are missing."""
    import pyarrow as pa

    decoded = [read_stream(pa.py_buffer(s)) for s in streams]
    num = sum(len(s.rows) for s in decoded)
    if num != work.total_rows:
        raise RunError(f"step {work.step}: {num} scored rows arrived, wanted {work.total_rows}")
    mine = {sample_id for ids in work.micro_batches for sample_id in ids}
    rows = {row.sample_id: row for stream in decoded for row in stream.rows if row.sample_id in mine}
    if len(rows) != len(mine):
        raise RunError(f"step {work.step}: no teacher scored {sorted(mine - set(rows))[:3]}")
    dtypes = {s.dtype for s in decoded}
    assert len(dtypes) == 1, dtypes
    return rows, getattr(torch, dtypes.pop())


def _to(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a (possibly nested) record; a no-op on the CPU."""
    import dataclasses

    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, tuple):
        return tuple(_to(x, device) for x in batch)
    if dataclasses.is_dataclass(batch):
        moved = {f.name: _to(getattr(batch, f.name), device) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **moved)  # type: ignore[type-var]
    return batch


def _start_engine(options: RankOptions) -> Any:
    import deepspeed
    from transformers import AutoModelForCausalLM

    deepspeed.init_distributed(
        dist_backend="nccl" if torch.cuda.is_available() else "gloo",
        timeout=timedelta(seconds=options.timeout_s),
        verbose=False,
    )
    lm = AutoModelForCausalLM.from_pretrained(
        options.model_dir, dtype=getattr(torch, options.dtype), attn_implementation="sdpa", trust_remote_code=False
    )
    if options.gradient_checkpointing:
        lm.gradient_checkpointing_enable()
    objective = functools.partial(OBJECTIVES[options.objective], chunk=options.chunk, vocab_size=options.vocab_size)
    student = Student(lm, objective).train()
    optimizer = torch.optim.AdamW(
        _parameter_groups(student, options.weight_decay), lr=0.0, betas=options.adam_betas, eps=options.adam_epsilon
    )
    engine, *_ = deepspeed.initialize(model=student, optimizer=optimizer, config=_deepspeed_config(options))
    return engine


def _parameter_groups(student: Student, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices only, as usual: not on norms and biases."""
    params = list(student.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def _deepspeed_config(options: RankOptions) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.max_grad_norm,
        "bf16": {"enabled": options.dtype == "bfloat16"},
        "zero_optimization": {"stage": 3, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
