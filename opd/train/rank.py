"""One DeepSpeed rank. Runs in a Ray actor; knows nothing of Ray. Every method is called on all ranks at once."""

from __future__ import annotations

import math
import os
import socket
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.devices import to_device
from opd.errors import RunError
from opd.files import storing
from opd.layouts import LAYOUTS, layout_error, predict_positions
from opd.model_weights import persistent_buffers, to_files
from opd.stream.heads import Head, HeadSource
from opd.stream.schema import TargetRow, read_stream
from opd.train.batch import MicroBatch, gather_samples, micro_batch
from opd.train.shards import MOMENTS, Shards, part_sizes, write_shard
from opd.train.totals import Totals, token_weights
from opd.train.zero import RankOptions, start_engine
from opd.types import DomainStats, PositionStats, WrittenFile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's part of one optimiser step."""

    step: int
    lr: float
    micro_batches: tuple[tuple[str, ...], ...]
    """Sample ids of each micro-batch; every rank has the same number of them."""
    weights: Mapping[str, float]
    """Sample id -> weight of each of its trained tokens in the loss; over all ranks they make it a mean."""
    baselines: Mapping[str, float] | None = None
    """Sample id -> what the objective takes off its advantages, `opd.train.batch.leave_one_out` over the whole step; None
    without a baseline."""


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
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[tuple[WrittenFile, ...]] | None = None
        self._layout = "packed"

    def meeting_point(self, address: str) -> tuple[str, int]:
        """`address`, which is this machine's, and a port that is free there; rank 0's is where all ranks meet."""
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
        self._engine = start_engine(self._options)
        self._device = self._engine.device

    def layout_error(self, layout: str) -> float:
        """How far a layout is from right for this student, see `opd.layouts.layout_error`."""
        student = self._engine.module
        return layout_error(
            lambda packed: student.hidden(to_device(packed, self._device)),
            layout,
            self._options.vocab_size,
            self._dtype,
        )

    def use_layout(self, layout: str) -> None:
        """Lay sequences out like this from now on."""
        self._layout = layout

    def begin_step(self, work: RankWork, heads: Mapping[str, HeadSource]) -> None:
        """Take a step's work; heads, by content hash, are read when a micro-batch needs them."""
        self._step = _Step(work, heads, self._options.vocab_size)

    def accumulate(self, index: int, left_out: frozenset[str], *parts: np.ndarray) -> None:
        """Add the gradients of the step's micro-batch `index`; all ranks do at the same time.

        `parts` are streams of this rank's rows that came since the last call; arguments of their own, because that is what
        Ray hands over as views into shared memory. `left_out` could not be scored by one of their teachers: what the others sent does
        not count. Raises: RunError if rows are missing.
        """
        step = self._step
        step.receive(parts)
        ids = [i for i in step.work.micro_batches[index] if i not in left_out]
        batch = step.micro_batch(ids, self._layout)
        # Each once: a head that several blocks share would be fetched again where others drove it out.
        needed = dict.fromkeys(key for block in batch.blocks for key in block.head_keys())
        heads = {key: self._head(step.heads[key]) for key in needed}
        # DeepSpeed averages gradients over ranks; the weights make a sum over the global batch a mean.
        weight_N = token_weights(batch, [step.work.weights[i] for i in ids])
        self._engine.set_gradient_accumulation_boundary(index == len(step.work.micro_batches) - 1)
        scaled_N = (weight_N * self._options.world_size).to(self._device)
        loss, stats = self._engine(to_device(batch, self._device), heads, scaled_N)
        self._engine.backward(loss)
        step.totals.add(batch, weight_N, to_device(stats, torch.device("cpu")))

    def finish_step(self, share: float) -> RankResult:
        """Step the optimiser with the accumulated gradients, divided by the share of the weights that was scored.

        Raises: RunError on a non-finite gradient.
        """
        work, totals = self._step.work, self._step.totals
        del self._step
        for group in self._engine.optimizer.param_groups:
            group["lr"] = work.lr
        optimizer = self._engine.optimizer
        if share != 1:
            optimizer.override_loss_scale(share)  # what DeepSpeed divides gradients by before it clips them
        self._engine.step()
        optimizer.custom_loss_scaler = False  # left on, it would multiply the next step's loss by the share
        grad_norm = float(self._engine.get_global_grad_norm())
        if self._options.lends_memory:
            torch.cuda.empty_cache()
        if not math.isfinite(grad_norm):
            raise RunError(
                f"step {work.step}: gradient norm {grad_norm}: the student's weights or the learning rate broke"
            )
        return RankResult(
            loss=totals.loss / share, grad_norm=grad_norm, domains=totals.domains, positions=totals.positions
        )

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """[sequence][token - 1] log-prob of every token after the first, from the current weights."""
        packed = LAYOUTS[self._layout](sequences)
        predict_N = predict_positions(packed, [(1, len(s)) for s in sequences])
        token_N = torch.tensor([t for s in sequences for t in s[1:]])
        with torch.no_grad():
            student = self._engine.module
            hidden_N_D = student.hidden(to_device(packed, self._device))[predict_N]
            logprob_N = student.loss_head(hidden_N_D, None, (), None, token_N.to(self._device))
        return [part.tolist() for part in logprob_N.cpu().split([len(s) - 1 for s in sequences])]

    def export(self, path: Path) -> None:
        """Gather the weights, one parameter at a time, and let rank 0 write config and safetensors into `path`."""
        from huggingface_hub import save_torch_state_dict

        lm, state = self._engine.module.lm, {}
        for name, weight in self._gathered():
            if self._rank == 0:
                state[name] = weight
        if self._rank == 0:
            state |= {name: buffer.to("cpu", copy=True) for name, buffer in persistent_buffers(lm)}
            with storing(path):
                save_torch_state_dict(to_files(lm, state), path, max_shard_size="5GB")
                lm.config.save_pretrained(path)

    def begin_save(self, path: Path) -> None:
        """Copy this rank's float32 weights and Adam moments; a thread writes them into `path` while the run goes on."""
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        if not self._adam_state():
            self._create_moments(0)  # no step has been taken yet: what AdamW would begin with
        tensors = {}
        for name, param in self._engine.module.lm.named_parameters():
            kept = part_sizes(param.ds_numel, self._options.world_size)[self._rank]
            local = {"param": safe_get_local_fp32_param(param)} | {
                k: safe_get_local_optimizer_state(param, k) for k in MOMENTS
            }
            tensors.update(
                {f"{kind}/{name}": t[:kept].to("cpu", torch.float32, copy=True) for kind, t in local.items()}
            )
        self._saving = self._disk.submit(
            write_shard, path, self._rank, self._options.world_size, tensors, int(self._adam_state()["step"])
        )

    def saved(self, wait_s: float) -> tuple[WrittenFile, ...] | None:
        """The files of the last `begin_save`, or None if they are not there after `wait_s`. Raises: StorageError."""
        assert self._saving is not None
        wait([self._saving], timeout=wait_s)
        return self._saving.result() if self._saving.done() else None

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote, by whatever number of ranks: each reads its parts from all their files."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        optimizer = self._engine.optimizer
        optimizer.checkpoint_event_prologue()  # small parameters live whole on every rank: back into shards
        with Shards(path) as shards:
            self._create_moments(shards.adam_step)
            for name, param in self._engine.module.lm.named_parameters():
                size = param.ds_tensor.numel()

                def part(kind: str, name: str = name, numel: int = param.ds_numel, size: int = size) -> Tensor:
                    return shards.part(f"{kind}/{name}", numel, self._rank * size, size)

                weights = part("param")
                safe_set_local_fp32_param(param, weights)
                param.ds_tensor.data.copy_(weights)
                for kind in MOMENTS:
                    safe_set_local_optimizer_state(param, part(kind), kind)
        optimizer.checkpoint_event_epilogue()  # and whole again

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        from deepspeed import zero

        for name, param in self._engine.module.lm.named_parameters():
            with zero.GatheredParameters([param]):
                yield name, param.detach().to("cpu", self._dtype, copy=True) if self._rank == 0 else param

    def _flat_groups(self) -> list[Tensor]:
        return self._engine.optimizer.fp32_partitioned_groups_flat

    def _adam_state(self) -> Mapping[str, Any]:
        """AdamW's of the first group; empty before the first step."""
        return self._engine.optimizer.optimizer.state.get(self._flat_groups()[0], {})

    def _create_moments(self, adam_step: int) -> None:
        # torch's AdamW creates its state in the first step; a restored one must exist before.
        for flat in self._flat_groups():
            self._engine.optimizer.optimizer.state[flat] = {
                "step": torch.tensor(float(adam_step)),
                **{kind: torch.zeros_like(flat) for kind in MOMENTS},
            }

    def _head(self, source: HeadSource) -> Head:
        """The head on this device, in the type it was sent, kept while the least recently used ones make room."""
        key, budget = source.key, self._options.head_memory_bytes
        if key not in self._heads:
            self._heads[key] = Head(source.read().to(self._device), source.rule)
            while len(self._heads) > 1 and sum(h.weight_V_D.nbytes for h in self._heads.values()) > budget:
                self._heads.popitem(last=False)
        self._heads.move_to_end(key)
        return self._heads[key]


class _Step:
    """A step under way: its work, and the rows that came and were not yet trained."""

    def __init__(
        self,
        work: RankWork,
        heads: Mapping[str, HeadSource],
        vocab_size: int,
    ) -> None:
        self.work = work
        self._vocab_size = vocab_size
        self.heads = heads
        self.totals = Totals()
        self._mine = {sample_id for ids in work.micro_batches for sample_id in ids}
        self._rows: dict[str, list[TargetRow]] = defaultdict(list)
        self._dtype = "float32"
        """That of the parts that came."""

    def receive(self, parts: Sequence[np.ndarray]) -> None:
        """Keep these rows until their micro-batch is trained."""
        import pyarrow as pa

        for part in parts:
            stream = read_stream(pa.py_buffer(part), self._vocab_size)
            self._dtype = stream.dtype
            for row in stream.rows:
                assert row.sample_id in self._mine, f"{row.sample_id} is of another rank"
                self._rows[row.sample_id].append(row)

    def micro_batch(self, ids: Sequence[str], layout: str = "packed") -> MicroBatch:
        """The tensors of these samples, which are forgotten. Raises: RunError if rows of theirs are missing."""
        missing = sorted(set(ids) - set(self._rows))
        if missing:
            raise RunError(f"step {self.work.step}: no teacher scored {missing[:3]}")
        samples = gather_samples(row for sample_id in ids for row in self._rows.pop(sample_id))
        return micro_batch([samples[i] for i in ids], getattr(torch, self._dtype), self.work.baselines, layout)
