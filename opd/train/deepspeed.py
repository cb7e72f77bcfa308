"""The trainer as the driver sees it: N DeepSpeed ranks in Ray actors, called together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from opd import cluster
from opd.layouts import prove_layout
from opd.stream.schema import read_stream
from opd.stream.targets import TargetStream
from opd.train.batch import gather_samples, leave_one_out
from opd.train.feed import Feed
from opd.train.plan import RowSize, plan_micro_batches
from opd.train.rank import RankOptions, RankResult, RankWork, TrainerRank
from opd.train.schedule import LearningRate
from opd.train.totals import refuse_gap, refuse_impossible_means, row_weights
from opd.types import DomainStats, LayoutProof, PositionStats, Rollout, StepReport, WrittenFile


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What a trainer is started with."""

    rank: RankOptions
    """What every rank is started with; there are `rank.world_size` of them."""
    rate: LearningRate
    """Learning rate of every step."""
    domain_weights: Mapping[str, float]
    """Domain -> loss weight of its tokens; 1 for one that is not named."""
    micro_batch_tokens: int
    """Prompt and response tokens that a rank pushes through the model at a time."""
    queue_bytes: int
    """Scored rows that may wait for the trainer, in bytes."""
    tolerance: float
    """Largest mean difference from the engine's log-probs of the sampled tokens, nats, before the run stops."""
    gpus: float = 0
    """GPUs of each rank; 0: the CPU."""
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
        options = replace(spec.rank, model_dir=spec.rank.model_dir.absolute())  # a worker has another directory
        env = cluster.worker_env(options.world_size)
        if not spec.gpus:
            env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self._ranks = [
            cluster.spawn(TrainerRank, options, rank, name=f"trainer rank {rank}", env=env, gpus=spec.gpus)
            for rank in range(options.world_size)
        ]
        self._starting = self._submit_start(spec.one_machine, spec.start_timeout_s)
        self.layout = LayoutProof(layout="packed", tried={})
        """How rows are laid out; proven in `wait_ready`."""

    def _submit_start(self, one_machine: bool, timeout_s: float) -> list[Any]:
        # What a machine calls itself may be an address of its own alone: Debian's hosts file says 127.0.1.1.
        address = "127.0.0.1" if one_machine else cluster.node_address(self._ranks[0], timeout_s=timeout_s)
        (meeting,) = cluster.call(self._ranks[:1], "meeting_point", [[address]], timeout_s=timeout_s)
        return cluster.submit(self._ranks, "start", [meeting] * len(self._ranks))

    def wait_ready(self) -> None:
        """Block until every rank holds its shard, and find out how rows may be laid out for this student.

        Raises: RunError past the deadline, or if its rows see each other in every layout.
        """
        cluster.wait(self._ranks, self._starting, "start", timeout_s=self._spec.start_timeout_s)
        self.layout = prove_layout(self._layout_error, f"{self._spec.rank.name} {self._spec.rank.model_dir}")
        self._call("use_layout", [[self.layout.layout]] * len(self._ranks))

    def _layout_error(self, layout: str) -> float:
        """The worst of all ranks; NaN if one of them says so."""
        errors = self._call("layout_error", [[layout]] * len(self._ranks))
        return math.nan if any(math.isnan(error) for error in errors) else max(errors)

    def train_step(self, step: int, rollouts: Sequence[Rollout], targets: TargetStream) -> StepReport:
        """One optimiser step over all rows; skipped, and said so, if no token is trained.

        Weights are those of all rollouts, so that training can begin before it is known which cannot be scored. These
        give no gradient, and the optimiser divides by the share that is left: the loss is a mean over what was scored.
        Raises: RunError if a rank fails or the loss is none.
        """
        lr = self._spec.rate.at(step)
        skipped = StepReport(step=step, loss=0.0, grad_norm=0.0, lr=lr, logprob_gap=0.0, domains={}, skipped=True)
        weights = row_weights(rollouts, self._objective.weighting, self._spec.domain_weights)
        if not weights:
            targets.collect()
            return skipped
        plan = self._plan(rollouts)
        baselines = whole_step_baselines(targets) if self._objective.wants_baseline else None
        works = _works(step, lr, plan, weights, baselines)
        self._submit("begin_step", [[work, dict(targets.heads)] for work in works])
        feed = Feed(targets, plan, queue_bytes=self._spec.queue_bytes)
        running: deque[tuple[int, list[Any]]] = deque()

        def finish_oldest() -> bool:
            if not running:
                return False
            index, refs = running.popleft()
            cluster.wait(self._ranks, refs, "accumulate", timeout_s=self._timeout_s)
            feed.trained(index)
            return True

        for index in range(len(plan[0])):
            handles = feed.parts(index, finish_oldest)
            left_out = frozenset(targets.quarantined)
            if index == len(plan[0]) - 1 and not _scored_share(rollouts, weights, left_out):
                return skipped
            running.append((index, self._submit("accumulate", [[index, left_out, *own] for own in handles])))
        while finish_oldest():
            pass
        share = _scored_share(rollouts, weights, targets.quarantined)
        report = _report(step, lr, self._call("finish_step", [[share]] * len(self._ranks)))
        self._refuse_broken(report)
        return replace(report, early_micro_batches=feed.early, peak_bytes=feed.peak_bytes)

    def _refuse_broken(self, report: StepReport) -> None:
        """Raises: RunError for a step that no more should follow."""
        if not self._objective.IS_ESTIMATE:
            refuse_impossible_means(report.step, self._objective.kind, report.domains)
        refuse_gap(report.step, report.domains, self._spec.tolerance)

    def _plan(self, rollouts: Sequence[Rollout]) -> list[list[list[str]]]:
        """As `plan_micro_batches`, for the layout that was proven."""
        sizes = [RowSize(r.sample_id, r.domain, len(r.prompt_ids) + len(r.response_ids)) for r in rollouts]
        padded = self.layout.layout == "padded"
        return plan_micro_batches(sizes, len(self._ranks), self._spec.micro_batch_tokens, padded=padded)

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._call("logprobs", [[token_ids]] * len(self._ranks))[0]

    def export(self, path: Path) -> None:
        self._call("export", [[path]] * len(self._ranks))

    def begin_save(self, path: Path) -> None:
        self._call("begin_save", [[path]] * len(self._ranks))

    def saved(self, wait_s: float) -> list[WrittenFile] | None:
        timeout_s = wait_s + self._timeout_s
        parts = cluster.call(self._ranks, "saved", [[wait_s]] * len(self._ranks), timeout_s=timeout_s)
        return None if None in parts else [file for part in parts for file in part]

    def load(self, path: Path) -> None:
        self._call("load", [[path]] * len(self._ranks))

    def _submit(self, method: str, argument_lists: Sequence[Sequence[Any]]) -> list[Any]:
        return cluster.submit(self._ranks, method, argument_lists)

    def _call(self, method: str, argument_lists: Sequence[Sequence[Any]]) -> list[Any]:
        return cluster.call(self._ranks, method, argument_lists, timeout_s=self._timeout_s)


def _works(
    step: int,
    lr: float,
    plan: Sequence[Sequence[Sequence[str]]],
    weights: Mapping[str, float],
    baselines: Mapping[str, float] | None,
) -> list[RankWork]:
    """Each rank's part of the step, with what belongs to its own samples."""
    return [
        RankWork(
            step=step,
            lr=lr,
            micro_batches=tuple(map(tuple, part)),
            weights={i: weights[i] for ids in part for i in ids},
            baselines=None if baselines is None else {i: baselines[i] for ids in part for i in ids if i in baselines},
        )
        for part in plan
    ]


def whole_step_baselines(targets: TargetStream) -> dict[str, float]:
    """`leave_one_out` over all ranks' samples: a mean over the step's other responses, which must not depend on how many
    ranks there are. Waits for all parts. Raises: as `TargetStream.take`."""
    targets.collect()
    rows = (row for part in targets.collected for row in read_stream(pa.py_buffer(cluster.fetch(part.handle))).rows)
    return leave_one_out(gather_samples(row for row in rows if row.rollout.sample_id not in targets.quarantined))


def _scored_share(rollouts: Sequence[Rollout], weights: Mapping[str, float], left_out: Collection[str]) -> float:
    """How much of the weight of all trained tokens is on those that were scored, 0..1; exactly 1 if nothing is left out."""
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
    tokens = sum(stats.tokens for stats in domains.values())
    return StepReport(
        step=step,
        loss=sum(r.loss for r in results),
        grad_norm=results[0].grad_norm,
        lr=lr,
        logprob_gap=sum(stats.gap_sum for stats in domains.values()) / tokens,
        domains=dict(sorted(domains.items())),
        positions=dict(sorted(positions.items())),
    )
