"""N ranks of one ZeRO engine in Ray actors, started and called together: the driver's side of every trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

from opd import cluster
from opd.cluster import FEW_ARENAS, Pending, Worker
from opd.models.layouts import prove_layout
from opd.models.packing import SHARED
from opd.records.types import LayoutProof, Rollout, WrittenFile
from opd.train.plan import measure_row_sizes, plan_micro_batches
from opd.train.zero import ModelOptions, ZeroEngine

E = TypeVar("E", bound=ZeroEngine)
P = ParamSpec("P")
R = TypeVar("R")

KEEPS_MEMORY = FEW_ARENAS | {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Environment of a rank on the CPU that keeps the memory it has freed.

Every micro-batch takes and frees gigabytes. By default malloc returns them to the system, which clears every page when it is
taken again. Keeping the memory, in large pages, saved 7 % of the time of a step with a 135M student, and changes no bit.

Neighbouring blocks that were freed have to be joined, however small they are. malloc's lists of small blocks (tcache, fast bins)
do not join them, and cut the memory into pieces that do not fit the next step's rows, which have other sizes. With these lists a
rank of SmolLM2 that takes 4,700 tokens at once had 14 GiB after ten steps and went on growing; without them it stays at 9.6 GiB."""
FREES_MEMORY = FEW_ARENAS | {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=0",
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(4 << 20),
}
"""Environment of a rank on the CPU with `trainer.bucket`, which returns large blocks to the system.

Here gathered weights come and go among activations that stay. If malloc kept their memory, it would have holes that the next
weights do not fit: a rank of two had twice the memory. So blocks of 128 KiB and more go back to the system (those of 2 MiB lie in
large pages), and smaller ones are kept, such as the activations of a few tokens.

tcache is off because torch asks for aligned blocks, for which malloc cuts a few bytes off each. tcache would keep these bytes, and
the freed blocks on either side would never be joined: for 8 MiB of tensors that come and go the heap had 54 MiB, and without
tcache it has 8 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSpec:
    """The settings of an engine's ranks that the driver uses; those that each rank gets are `ModelOptions`."""

    micro_batch_tokens: int
    """Prompt and response tokens of one forward pass of a rank."""
    share_prompts: bool = False
    """Compute a beginning that several rows share only once, if the model gives the right states then (`opd.models.layouts`)."""
    short_first: bool = False
    """Make the first round of micro-batches short (`plan_micro_batches`)."""
    gpus: float = 0
    """GPUs of each rank; 0: it computes on the CPU."""
    roles: int = 1
    """Number of roles that compute at the same time on these cores, this one included."""
    one_machine: bool = True
    """True if all ranks are on this machine."""
    start_timeout_s: float
    """Seconds in which all ranks have to hold their shards. Every other call has `ModelOptions.timeout_s`."""


class Ranks(Generic[E]):
    """Starts the ranks of an engine of class E in Ray actors, and calls them together."""

    def __init__(self, engine: type[E], options: ModelOptions, spec: RanksSpec, role: str) -> None:
        """Start the ranks. This waits until rank 0 runs, because the others need its address; `wait_ready` waits for the rest. `role` is their
        name in errors, such as `trainer`."""
        self._cls = engine
        self._ranks_spec = spec
        self._model_label = f"{options.name} {options.model_dir}"
        self._timeout_s = options.timeout_s
        self._sharing = options.sequence_parallel_size
        options = replace(options, model_dir=options.model_dir.absolute())  # a worker starts in another directory
        env = cluster.worker_env(options.world_size, spec.roles)
        if not spec.gpus:
            env |= KEEPS_MEMORY if options.bucket is None else FREES_MEMORY
            env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self._ranks: list[Worker[E]] = [
            cluster.spawn_worker(engine, options, rank, name=rank_name(role, rank), env=env, gpus=spec.gpus)
            for rank in range(options.world_size)
        ]
        self._starting = self._submit_start(spec.one_machine, spec.start_timeout_s)
        self.layout = LayoutProof(layout="packed", tried={})
        """Layout of rows in a forward pass; `wait_ready` proves one and puts it here."""

    def _submit_start(self, one_machine: bool, timeout_s: float) -> list[Pending[None]]:
        rank_0 = self._ranks[0]
        # Not the machine's own name: that may resolve to an address that no other machine reaches, such as Debian's 127.0.1.1.
        address = "127.0.0.1" if one_machine else rank_0.node_address(timeout_s=timeout_s)
        meeting = rank_0.submit(self._cls.open_meeting_point, address).wait_for_result(timeout_s=timeout_s)
        return self._submit_to_all(self._cls.start, *meeting)

    def wait_ready(self) -> None:
        """Wait until every rank holds its shard, then prove a layout of rows for this model and have all ranks use it.

        Raises: RunError past the deadline, or if rows influence each other in every layout.
        """
        cluster.wait_for_all(self._starting, timeout_s=self._ranks_spec.start_timeout_s)
        spec = self._ranks_spec
        self.layout = prove_layout(
            self._layout_error, self._model_label, share=spec.share_prompts, varlen=spec.gpus > 0
        )
        self._call(self._cls.use_layout, self.layout.layout)

    def _layout_error(self, layout: str) -> float:
        """Return the largest `layout_error` of all ranks; NaN if a rank has NaN. Python's `max` alone could lose the NaN."""
        errors = self._call(self._cls.layout_error, layout)
        return math.nan if any(math.isnan(error) for error in errors) else max(errors)

    def plan_micro_batches(self, rollouts: Sequence[Rollout]) -> list[list[list[str]]]:
        """Return [rank][micro-batch] the sample ids, for the layout that was proven. Ranks that share rows have the same."""
        layout = self.layout.layout
        sizes = measure_row_sizes(rollouts, share=layout == SHARED)
        plan = plan_micro_batches(
            sizes,
            len(self._ranks) // self._sharing,
            self._ranks_spec.micro_batch_tokens,
            padded=layout == "padded",
            short_first=self._ranks_spec.short_first,
        )
        return self._repeat_for_ranks(plan)

    def _repeat_for_ranks(self, parts: Sequence[R]) -> list[R]:
        """Return the part of each rank, from one for each group of ranks that share rows."""
        return [part for part in parts for _ in range(self._sharing)]

    def begin_save(self, path: Path) -> None:
        """Copy weights and optimiser state, and begin to write them into an existing directory."""
        self._call(self._cls.begin_save, path)

    def saved(self, wait_s: float) -> list[WrittenFile] | None:
        """Return the files of the last `begin_save`; None if they are not all written after `wait_s`. Raises: StorageError."""
        parts = cluster.wait_for_all(self._submit_to_all(self._cls.saved, wait_s), timeout_s=wait_s + self._timeout_s)
        return None if None in parts else [file for part in parts for file in part or ()]

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote; the number of ranks may have been another one then."""
        self._call(self._cls.load, path)

    def _submit_to_all(
        self, method: Callable[Concatenate[E, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[Pending[R]]:
        """Call a method of all ranks with the same arguments; returns at once."""
        return [rank.submit(method, *args, **kwargs) for rank in self._ranks]

    def _call(self, method: Callable[Concatenate[E, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of all ranks with the same arguments, and wait. Raises: what `cluster.wait_for_all` raises."""
        return cluster.wait_for_all(self._submit_to_all(method, *args, **kwargs), timeout_s=self._timeout_s)


def rank_name(role: str, rank: int) -> str:
    """Return the name of a rank in errors and in reservations of the cluster."""
    return f"{role} rank {rank}"
