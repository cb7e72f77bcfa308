"""Ranks of a model that judges rows, and then learns on the rows that it judged last: the driver's side of the critic and of the
discriminator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from opd import cluster
from opd.records.types import Rollout
from opd.train.components import Component, UpdateWork
from opd.train.ranks import Ranks, RanksSpec
from opd.train.schedule import LearningRate
from opd.train.zero import ModelOptions, ZeroEngine

E = TypeVar("E", bound=ZeroEngine)
R = TypeVar("R")


class JudgingRanks(Ranks[E]):
    """Divides rows among the ranks, and keeps the division for the updates that follow."""

    def __init__(self, engine: type[E], options: ModelOptions, spec: RanksSpec, role: str, rate: LearningRate) -> None:
        """Start the ranks. `rate`: learning rate as a function of the step; all updates of a step have the same."""
        super().__init__(engine, options, spec, role)
        self._rate = rate
        self._plan: list[list[list[str]]] = []
        """[rank][micro-batch] sample ids of the rows that were judged last."""

    def _judge_rows(
        self, judge: Callable[[E, Sequence[Sequence[Rollout]]], dict[str, R]], rows: Sequence[Rollout]
    ) -> dict[str, R]:
        """Return sample id -> what `judge` of the row's rank returns for it. Raises: what `opd.cluster.wait_for_all` raises."""
        by_id = {row.sample_id: row for row in rows}
        self._plan = self.plan_micro_batches(rows)
        pending = [
            rank.submit(judge, [[by_id[i] for i in ids] for ids in part])
            for rank, part in zip(self._ranks, self._plan, strict=True)
        ]
        judged: dict[str, R] = {}
        for answer in cluster.wait_for_all(pending, timeout_s=self._timeout_s):
            judged |= answer
        return judged

    def _update_ranks(self, update: Callable[[E, UpdateWork], R], step: int, whole: Component) -> list[R]:
        """Take one optimiser step on the rows that were judged last. Returns the result of each rank. `whole`: the component of all rows.

        Raises: RunError on a non-finite gradient, and what `opd.cluster.wait_for_all` raises.
        """
        lr = self._rate.rate_at_step(step)
        pending = []
        for rank, part in zip(self._ranks, self._plan, strict=True):
            component = whole.select_samples([i for ids in part for i in ids])
            pending.append(rank.submit(update, UpdateWork(step=step, lr=lr, component=component)))
        return cluster.wait_for_all(pending, timeout_s=self._timeout_s)
