"""The trainer as the driver sees it: N DeepSpeed ranks in Ray actors, called together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from opd import cluster
from opd.cluster import Pending, Worker
from opd.layouts import prove_layout
from opd.packing import SHARED
from opd.stream.schema import read_stream
from opd.stream.targets import TargetStream
from opd.train.batch import gather_samples, leave_one_out
from opd.train.feed import Feed
from opd.train.plan import plan_micro_batches, row_sizes
from opd.train.rank import RankOptions, RankResult, RankWork, TrainerRank
from opd.train.schedule import LearningRate
from opd.train.totals import mean_drift, mean_gap, refuse_gap, refuse_impossible_means, row_weights
from opd.train.turns import first_turns
from opd.types import DomainStats, LayoutProof, PositionStats, Rollout, StepReport, TurnStats, WrittenFile

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """The settings that a trainer is started with."""

    rank: RankOptions
    """Settings of every rank; there are `rank.world_size` ranks."""
    rate: LearningRate
    """Learning rate of every step."""
    domain_weights: Mapping[str, float]
    """Domain -> loss weight of its tokens; 1 for a domain that is not named."""
    weighs_turns: bool = False
    """Whether ranks weight tokens by their turns, `rank.turn_weights`."""
    micro_batch_tokens: int
    """Prompt and response tokens of one forward pass of a rank."""
    share_prompts: bool = False
    """Compute what rows have in common once, if that is right for the student."""
    queue_bytes: int
    """Scored rows that may wait for the trainer, in bytes."""
    tolerance: float
    """The run stops if a step's mean difference from the engine's log-probs of sampled tokens is larger, in nats."""
    gpus: float = 0
    """GPUs of each rank; 0: the CPU."""
    roles: int = 1
    """Roles that compute at the same time on these cores, this one among them."""
    one_machine: bool = True
    """True if all ranks are on this machine."""
    start_timeout_s: float
    """Deadline for all ranks to hold their shards; that of every other call is `rank.timeout_s`."""


class DeepSpeedTrainer:
    """Implements `opd.interfaces.Trainer`."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._objective = spec.rank.objective
        self._timeout_s = spec.rank.timeout_s
        options = replace(spec.rank, model_dir=spec.rank.model_dir.absolute())  # a worker starts in another directory
        env = cluster.worker_env(options.world_size, spec.roles)
        if not spec.gpus:
            env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self._ranks: list[Worker[TrainerRank]] = [
            cluster.spawn(TrainerRank, options, rank, name=f"trainer rank {rank}", env=env, gpus=spec.gpus)
            for rank in range(options.world_size)
        ]
        self._starting = self._submit_start(spec.one_machine, spec.start_timeout_s)
        self.layout = LayoutProof(layout="packed", tried={})
        """How rows are laid out; proven in `wait_ready`."""

    def _submit_start(self, one_machine: bool, timeout_s: float) -> list[Pending[None]]:
        rank_0 = self._ranks[0]
        # A machine's own name may stand for an address that no other machine reaches: Debian's hosts file has 127.0.1.1.
        address = "127.0.0.1" if one_machine else rank_0.node_address(timeout_s=timeout_s)
        meeting = rank_0.submit(TrainerRank.meeting_point, address).result(timeout_s=timeout_s)
        return self._submit(TrainerRank.start, *meeting)

    def wait_ready(self) -> None:
        """Block until every rank holds its shard, and find out how rows may be laid out for this student.

        Raises: RunError past the deadline, or if its rows see each other in every layout.
        """
        cluster.wait(self._starting, timeout_s=self._spec.start_timeout_s)
        who = f"{self._spec.rank.name} {self._spec.rank.model_dir}"
        self.layout = prove_layout(self._layout_error, who, share=self._spec.share_prompts)
        self._call(TrainerRank.use_layout, self.layout.layout)

    def _layout_error(self, layout: str) -> float:
        """Largest `layout_error` of all ranks; NaN if one rank has NaN, which Python's `max` could lose."""
        errors = self._call(TrainerRank.layout_error, layout)
        return math.nan if any(math.isnan(error) for error in errors) else max(errors)

    def train_step(
        self, step: int, rollouts: Sequence[Rollout], targets: TargetStream, stale: frozenset[str] = frozenset()
    ) -> StepReport:
        """Take one optimiser step over all rows; skip it, and report that, if no token is trained.

        Weights are those of all rollouts, so training can begin before we know which are quarantined. These give no
        gradient; the optimiser divides by the share that was scored. Raises: RunError if a rank fails or the step is broken.
        """
        lr = self._spec.rate.at(step)
        skipped = StepReport(step=step, loss=0.0, grad_norm=0.0, lr=lr, logprob_gap=0.0, domains={}, skipped=True)
        weights = row_weights(rollouts, self._objective.weighting, self._spec.domain_weights)
        if not weights:
            targets.collect()
            return skipped
        plan = self._plan(rollouts)
        self._begin(_works(step, lr, plan, weights, self._baselines(targets), stale), rollouts, targets)
        feed = Feed(targets, plan, queue_bytes=self._spec.queue_bytes)
        running: deque[tuple[int, list[Pending[None]]]] = deque()

        def finish_oldest() -> bool:
            if not running:
                return False
            index, pending = running.popleft()
            cluster.wait(pending, timeout_s=self._timeout_s)
            feed.trained(index)
            return True

        # Rounds run while this loop fetches more rows: only a full queue (`Feed.parts`) and the end of the step wait.
        for index in range(len(plan[0])):
            handles = feed.parts(index, finish_oldest)
            left_out = frozenset(targets.quarantined)
            if index == len(plan[0]) - 1 and not _scored_share(rollouts, weights, left_out):
                return skipped
            running.append((index, self._accumulate(index, left_out, handles)))
        while finish_oldest():
            pass
        share = self._share(rollouts, weights, targets.quarantined)
        report = _report(step, lr, self._call(TrainerRank.finish_step, share))
        self._refuse_broken(report)
        return replace(report, early_micro_batches=feed.early, waited_s=feed.waited_s, peak_bytes=feed.peak_bytes)

    def _share(self, rollouts: Sequence[Rollout], weights: Mapping[str, float], left_out: Collection[str]) -> float:
        """What the weights of the step's tokens add up to, once all are trained: 1, if turns and quarantine change nothing."""
        if self._spec.weighs_turns:
            return math.fsum(self._call(TrainerRank.weight_sum))
        return _scored_share(rollouts, weights, left_out)

    def _baselines(self, targets: TargetStream) -> dict[str, float] | None:
        """What the objective takes off its samples' advantages, None if it takes nothing. Raises: as `TargetStream.take`."""
        return whole_step_baselines(targets) if self._objective.wants_baseline else None

    def _begin(self, works: Sequence[RankWork], rollouts: Sequence[Rollout], targets: TargetStream) -> None:
        """Tell each rank what it does in this step."""
        firsts = first_turns(rollouts) if self._spec.weighs_turns else {}
        for rank, work in zip(self._ranks, works, strict=True):
            rank.submit(TrainerRank.begin_step, replace(work, first_turns=firsts), dict(targets.heads))

    def _accumulate(
        self, index: int, left_out: frozenset[str], handles: Sequence[Sequence[Any]]
    ) -> list[Pending[None]]:
        """Each rank's micro-batch `index`, with the handles of the parts that came for it."""
        return [
            rank.submit(TrainerRank.accumulate, index, left_out, *own)
            for rank, own in zip(self._ranks, handles, strict=True)
        ]

    def _refuse_broken(self, report: StepReport) -> None:
        """Refuse to go on after a step whose numbers are impossible. Raises: RunError."""
        if not self._objective.IS_ESTIMATE:
            refuse_impossible_means(report.step, self._objective.kind, report.domains)
        refuse_gap(report.step, report.domains, self._spec.tolerance)

    def _plan(self, rollouts: Sequence[Rollout]) -> list[list[list[str]]]:
        """Plan the ranks' micro-batches for the layout that was proven."""
        layout = self.layout.layout
        sizes = row_sizes(rollouts, share=layout == SHARED)
        return plan_micro_batches(sizes, len(self._ranks), self._spec.micro_batch_tokens, padded=layout == "padded")

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._call(TrainerRank.logprobs, token_ids)[0]

    def export(self, path: Path) -> None:
        self._call(TrainerRank.export, path)

    def export_changed(self, path: Path) -> Path | None:
        whole = self._call(TrainerRank.export, path, only_changed=True)
        return None if all(whole) else self._spec.rank.model_dir

    def export_adapter(self, path: Path) -> None:
        self._call(TrainerRank.export_adapter, path)

    def begin_save(self, path: Path) -> None:
        self._call(TrainerRank.begin_save, path)

    def saved(self, wait_s: float) -> list[WrittenFile] | None:
        parts = cluster.wait(self._submit(TrainerRank.saved, wait_s), timeout_s=wait_s + self._timeout_s)
        return None if None in parts else [file for part in parts for file in part or ()]

    def load(self, path: Path) -> None:
        self._call(TrainerRank.load, path)

    def _submit(
        self, method: Callable[Concatenate[TrainerRank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[Pending[R]]:
        """Call a method of all ranks with the same arguments; returns at once."""
        return [rank.submit(method, *args, **kwargs) for rank in self._ranks]

    def _call(self, method: Callable[Concatenate[TrainerRank, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """The answers of all ranks to a call with the same arguments. Raises: what `opd.cluster.wait` raises."""
        return cluster.wait(self._submit(method, *args, **kwargs), timeout_s=self._timeout_s)


def _works(
    step: int,
    lr: float,
    plan: Sequence[Sequence[Sequence[str]]],
    weights: Mapping[str, float],
    baselines: Mapping[str, float] | None,
    stale: frozenset[str],
) -> list[RankWork]:
    """Each rank's part of the step, with the weights and baselines of its own samples only."""
    return [
        RankWork(
            step=step,
            lr=lr,
            micro_batches=tuple(map(tuple, part)),
            stale=stale.intersection(i for ids in part for i in ids),
            weights={i: weights[i] for ids in part for i in ids},
            baselines=None if baselines is None else {i: baselines[i] for ids in part for i in ids if i in baselines},
        )
        for part in plan
    ]


def whole_step_baselines(targets: TargetStream) -> dict[str, float]:
    """Sample id -> `leave_one_out` baseline over the samples of all ranks, so that it does not depend on their number.

    Waits for all parts. Raises: what `TargetStream.take` raises.
    """
    targets.collect()
    rows = (row for part in targets.collected for row in read_stream(pa.py_buffer(cluster.fetch(part.handle))).rows)
    return leave_one_out(gather_samples(row for row in rows if row.rollout.sample_id not in targets.quarantined))


def _scored_share(rollouts: Sequence[Rollout], weights: Mapping[str, float], left_out: Collection[str]) -> float:
    """Share of the trained tokens' weight that lies on scored tokens, 0..1; exactly 1 if nothing was left out."""
    if not left_out:
        return 1.0
    each = {r.sample_id: weights[r.sample_id] * r.num_trained for r in rollouts}
    return sum(weight for i, weight in each.items() if i not in left_out) / sum(each.values())


def _report(step: int, lr: float, results: Sequence[RankResult]) -> StepReport:
    domains: dict[str, DomainStats] = {}
    for name, stats in (item for result in results for item in result.domains.items()):
        domains[name] = domains[name] + stats if name in domains else stats
    positions: dict[int, PositionStats] = {}
    for bits, part in (item for result in results for item in result.positions.items()):
        positions[bits] = positions[bits] + part if bits in positions else part
    turns: dict[tuple[str, int], TurnStats] = {}
    for key, turn in (item for result in results for item in result.turns.items()):
        turns[key] = turns[key] + turn if key in turns else turn
    return StepReport(
        step=step,
        loss=sum(r.loss for r in results),
        grad_norm=results[0].grad_norm,
        lr=lr,
        logprob_gap=mean_gap(domains),
        drift=mean_drift(domains),
        domains=dict(sorted(domains.items())),
        positions=dict(sorted(positions.items())),
        turns=dict(sorted(turns.items())),
    )
