"""One DeepSpeed rank. Runs in a Ray actor; knows nothing of Ray. Every method is called on all ranks at once."""

from __future__ import annotations

import json
import math
import os
import socket
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd import cluster
from opd.config import ObjectiveConfig
from opd.errors import RunError
from opd.losses import build_objective
from opd.losses.chunked import LogitRule
from opd.stream.heads import Head, head_tensor
from opd.stream.schema import read_stream
from opd.train.batch import (
    HiddenRun,
    Scored,
    gather_samples,
    leave_one_out,
    micro_batch,
    pack_sequences,
    predict_positions,
)
from opd.train.student import Student
from opd.train.totals import Totals, token_weights
from opd.types import DomainStats, PositionStats

STATE_FILE = "trainer.safetensors"
STATE_META = "trainer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What a rank is started with; plain values, so they cross process boundaries."""

    model_dir: Path
    dtype: str
    world_size: int
    objective: ObjectiveConfig
    vocab_size: int
    """Ids that the tokenizer knows; rows of a head beyond them are padding."""
    adam_betas: tuple[float, float]
    adam_epsilon: float
    weight_decay: float
    max_grad_norm: float
    gradient_checkpointing: bool
    head_memory_bytes: int
    """Budget of the teachers' heads that stay on this rank."""
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's part of one optimiser step."""

    step: int
    lr: float
    micro_batches: tuple[tuple[str, ...], ...]
    """Sample ids of each micro-batch; every rank has the same number of them."""
    weights: Mapping[str, float]
    """Sample id -> weight of each of its trained tokens in the loss; over all ranks they make it a mean."""
    left_out: frozenset[str]
    """Samples that one of their teachers could not score: rows that its other teachers sent do not count."""
    total_rows: int
    """Rows over all streams of the step, one for each teacher of a sample; fewer means that something was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Sums over one rank's rows."""

    loss: float
    """This rank's share of the optimised mean."""
    grad_norm: float
    domains: dict[str, DomainStats]
    positions: dict[int, PositionStats]


class TrainerRank:
    """Holds a shard of the student and of AdamW's state."""

    def __init__(self, options: RankOptions, rank: int) -> None:
        self._options = options
        self._rank = rank
        self._dtype = getattr(torch, options.dtype)
        self._heads: OrderedDict[str, Head] = OrderedDict()

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

    def train_step(
        self, work: RankWork, head_rules: Mapping[str, LogitRule], head_handles: Mapping[str, Any], *streams: np.ndarray
    ) -> RankResult:
        """Accumulate gradients over the micro-batches, then step once. Raises: RunError on a non-finite gradient.

        The streams are arguments of their own, because that is what Ray hands over as views into shared memory; heads
        are fetched when a micro-batch needs them.
        """
        wants_baseline = getattr(self._options.objective, "baseline", "none") != "none"
        stream = _select(work, streams, wants_baseline)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = work.lr
        totals = Totals()
        for index, ids in enumerate(work.micro_batches):
            batch = micro_batch([stream.samples[i] for i in ids], stream.payload, stream.dtype, stream.baselines)
            # Each once: a head that several runs share would be fetched again where others drove it out.
            needed = dict.fromkeys(key for run in batch.runs if isinstance(run, HiddenRun) for key in run.heads)
            heads = {key: self._head(key, head_handles, head_rules) for key in needed}
            # DeepSpeed averages gradients over ranks; the weights make a sum over the global batch a mean.
            weight_N = token_weights(batch, [work.weights[i] for i in ids])
            self._engine.set_gradient_accumulation_boundary(index == len(work.micro_batches) - 1)
            scaled_N = (weight_N * self._options.world_size).to(self._device)
            loss, stats = self._engine(_to(batch, self._device), heads, scaled_N)
            self._engine.backward(loss)
            totals.add(batch, weight_N, _to(stats, torch.device("cpu")))
        self._engine.step()
        grad_norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(grad_norm):
            raise RunError(
                f"step {work.step}: gradient norm {grad_norm}: the student's weights or the learning rate broke"
            )
        return RankResult(loss=totals.loss, grad_norm=grad_norm, domains=totals.domains, positions=totals.positions)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """[sequence][token - 1] log-prob of every token after the first, from the current weights."""
        packed = pack_sequences(sequences)
        predict_N = predict_positions(packed, [(1, len(s)) for s in sequences])
        token_N = torch.tensor([t for s in sequences for t in s[1:]])
        with torch.no_grad():
            student = self._engine.module
            hidden_N_D = student.hidden(_to(packed, self._device))[predict_N]
            logprob_N = student.loss_head(hidden_N_D, None, (), None, token_N.to(self._device))
        return [part.tolist() for part in logprob_N.cpu().split([len(s) - 1 for s in sequences])]

    def export(self, path: Path) -> None:
        """Gather the weights, one parameter at a time, and let rank 0 write config and safetensors into `path`."""
        from huggingface_hub import save_torch_state_dict

        state = {}
        for name, weight in self._gathered():
            if self._rank == 0:
                state[name] = weight
        if self._rank == 0:
            with _writing(path):
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
            with _writing(path):
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

    def _head(self, key: str, handles: Mapping[str, Any], rules: Mapping[str, LogitRule]) -> Head:
        """The head on this device, in the type it was sent, kept while the least recently used ones make room."""
        budget = self._options.head_memory_bytes
        if key not in self._heads:
            self._heads[key] = Head(head_tensor(cluster.fetch(handles[key])).to(self._device), rules[key])
            while len(self._heads) > 1 and sum(h.weight_V_D.nbytes for h in self._heads.values()) > budget:
                self._heads.popitem(last=False)
        self._heads.move_to_end(key)
        return self._heads[key]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full disk in plain words: safetensors hides the error number in an exception of its own."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: could not be written: {error}; what was finished before is intact") from None


@dataclass(frozen=True, slots=True)
class _Stream:
    """The samples of a step."""

    samples: Mapping[str, Scored]
    baselines: Mapping[str, float] | None
    payload: str
    dtype: torch.dtype


def _select(work: RankWork, arrays: Sequence[np.ndarray], wants_baseline: bool) -> _Stream:
    """This rank's samples of a step by id. Raises: RunError if rows are missing."""
    import pyarrow as pa

    decoded = [read_stream(pa.py_buffer(s)) for s in arrays]
    rows = [row for stream in decoded for row in stream.rows if row.sample_id not in work.left_out]
    if len(rows) != work.total_rows:
        raise RunError(f"step {work.step}: {len(rows)} scored rows arrived, wanted {work.total_rows}")
    samples = gather_samples(rows)
    mine = {sample_id for ids in work.micro_batches for sample_id in ids}
    if mine - set(samples):
        raise RunError(f"step {work.step}: no teacher scored {sorted(mine - set(samples))[:3]}")
    kinds = {(s.payload, s.dtype) for s in decoded}
    assert len(kinds) == 1, kinds
    payload, dtype = kinds.pop()
    # Over the whole step, not this rank's part of it: the update must not depend on the number of ranks.
    baselines = leave_one_out(samples) if wants_baseline else None
    return _Stream(samples, baselines, payload, getattr(torch, dtype))


def _to(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a (possibly nested) record; tensors that are there already are not copied."""
    import dataclasses

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
    objective = build_objective(options.objective)
    student = Student(
        lm, objective, chunk=options.objective.chunk, vocab_size=options.vocab_size, compiled=options.objective.compile
    ).train()
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
