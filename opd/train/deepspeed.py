"""The trainer as the driver sees it: N DeepSpeed ranks in Ray actors, called together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opd import cluster
from opd.config import PipelineConfig
from opd.interfaces import TargetSet
from opd.train.plan import RowSize, plan_micro_batches
from opd.train.rank import RankOptions, RankResult, RankWork, TrainerRank
from opd.train.schedule import learning_rate
from opd.train.totals import row_weights
from opd.types import DomainStats, PositionStats, Rollout, StepReport


class DeepSpeedTrainer:
    """Implements `opd.interfaces.Trainer`."""

    def __init__(self, config: PipelineConfig, vocab_size: int) -> None:
        self._config = config.trainer
        self._normalize = config.objective.normalize
        self._domain_weights = {name: domain.loss_weight for name, domain in config.domains.items()}
        self._timeout_s = config.cluster.phase_timeout_s
        options = _rank_options(config, vocab_size)
        env = cluster.worker_env(config.trainer.ranks)
        if not config.cluster.trainer_gpus:
            env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self._ranks = [
            cluster.spawn(
                TrainerRank, options, rank, name=f"trainer rank {rank}", env=env, gpus=config.cluster.trainer_gpus
            )
            for rank in range(config.trainer.ranks)
        ]
        loopback = config.cluster.address == cluster.LOCAL
        self._starting = self._submit_start(loopback, config.cluster.start_timeout_s)
        self._start_timeout_s = config.cluster.start_timeout_s

    def _submit_start(self, loopback: bool, timeout_s: float) -> list[Any]:
        (meeting,) = cluster.call(self._ranks[:1], "meeting_point", [[loopback]], timeout_s=timeout_s)
        return cluster.submit(self._ranks, "start", [meeting] * len(self._ranks))

    def wait_ready(self) -> None:
        """Block until every rank holds its shard. Raises: RunError past the deadline."""
        cluster.wait(self._ranks, self._starting, "start", timeout_s=self._start_timeout_s)

    def train_step(self, step: int, rollouts: Sequence[Rollout], targets: TargetSet) -> StepReport:
        """One optimiser step over all rows; skipped, and said so, if no token is trained."""
        lr = learning_rate(step, self._config)
        weights = row_weights(rollouts, self._normalize, self._domain_weights)
        if not weights:
            return StepReport(step=step, loss=0.0, grad_norm=0.0, lr=lr, logprob_gap=0.0, domains={}, skipped=True)
        sizes = [RowSize(r.sample_id, r.domain, len(r.prompt_ids) + len(r.response_ids)) for r in rollouts]
        plan = plan_micro_batches(sizes, len(self._ranks), self._config.micro_batch_tokens)
        works = [
            RankWork(
                step=step,
                lr=lr,
                micro_batches=tuple(map(tuple, part)),
                weights={i: weights[i] for ids in part for i in ids},
                left_out=frozenset(targets.quarantined),
                total_rows=targets.rows,
            )
            for part in plan
        ]
        rules = {key: targets.head_rules[key] for key in targets.heads}
        return _report(
            step, lr, self._call("train_step", [[work, rules, dict(targets.heads), *targets.streams] for work in works])
        )

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._call("logprobs", [[token_ids]] * len(self._ranks))[0]

    def export(self, path: Path) -> None:
        self._call("export", [[path]] * len(self._ranks))

    def save(self, path: Path) -> None:
        self._call("save", [[path]] * len(self._ranks))

    def load(self, path: Path) -> None:
        self._call("load", [[path]] * len(self._ranks))

    def _call(self, method: str, argument_lists: Sequence[Sequence[Any]]) -> list[Any]:
        return cluster.call(self._ranks, method, argument_lists, timeout_s=self._timeout_s)


def _rank_options(config: PipelineConfig, vocab_size: int) -> RankOptions:
    trainer = config.trainer
    return RankOptions(
        model_dir=config.student.model.absolute(),
        dtype=trainer.dtype,
        world_size=trainer.ranks,
        objective=config.objective,
        vocab_size=vocab_size,
        adam_betas=(trainer.adam_beta1, trainer.adam_beta2),
        adam_epsilon=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        gradient_checkpointing=trainer.gradient_checkpointing,
        head_memory_bytes=trainer.head_memory,
        timeout_s=config.cluster.phase_timeout_s,
    )


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
