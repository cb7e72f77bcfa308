"""The trainer as the driver sees it: N DeepSpeed ranks in Ray actors, called together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opd import cluster
from opd.config import PipelineConfig
from opd.interfaces import TargetSet
from opd.train.plan import RowSize, plan_micro_batches
from opd.train.rank import RankOptions, RankResult, RankWork, TrainerRank
from opd.train.schedule import learning_rate
from opd.types import DomainStats, Rollout, StepReport


class DeepSpeedTrainer:
    """Implements `opd.interfaces.Trainer`."""

    def __init__(self, config: PipelineConfig, vocab_size: int) -> None:
        self._config = config.trainer
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
        total_tokens = sum(sum(r.loss_mask) for r in rollouts)
        if not total_tokens:
            return StepReport(step=step, loss=0.0, grad_norm=0.0, lr=lr, logprob_gap=0.0, domains={}, skipped=True)
        sizes = [RowSize(r.sample_id, r.domain, len(r.prompt_ids) + len(r.response_ids)) for r in rollouts]
        plan = plan_micro_batches(sizes, len(self._ranks), self._config.micro_batch_tokens)
        works = [
            RankWork(
                step=step,
                lr=lr,
                micro_batches=tuple(map(tuple, part)),
                total_tokens=total_tokens,
                total_rows=len(rollouts),
            )
            for part in plan
        ]
        results = self._call(
            "train_step", [[work, tuple(targets.heads), *targets.heads.values(), *targets.streams] for work in works]
        )
        return _report(step, lr, total_tokens, results)

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
        objective=config.objective.kind,
        chunk=config.objective.chunk,
        vocab_size=vocab_size,
        adam_betas=(trainer.adam_beta1, trainer.adam_beta2),
        adam_epsilon=trainer.adam_epsilon,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        gradient_checkpointing=trainer.gradient_checkpointing,
        timeout_s=config.cluster.phase_timeout_s,
    )


def _report(step: int, lr: float, total_tokens: int, results: Sequence[RankResult]) -> StepReport:
    return StepReport(
        step=step,
        loss=sum(r.loss_sum for r in results),
        grad_norm=results[0].grad_norm,
        lr=lr,
        logprob_gap=sum(r.gap_sum for r in results) / total_tokens,
        domains=_merge_domains([r.domains for r in results]),
    )


def _merge_domains(parts: Sequence[Mapping[str, tuple[int, float, int]]]) -> dict[str, DomainStats]:
    names = sorted({name for part in parts for name in part})
    sums = {
        name: [sum(column) for column in zip(*(p[name] for p in parts if name in p), strict=True)] for name in names
    }
    return {
        name: DomainStats(tokens=int(t), kl_sum=float(kl), samples=int(rows)) for name, (t, kl, rows) in sums.items()
    }
