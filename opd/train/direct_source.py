"""The trainer's side of direct pushes as the driver sees it: all ranks, called together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from opd import cluster
from opd.cluster import Pending, Worker
from opd.models.buckets import WeightStream
from opd.train.rank import TrainerRank
from opd.transfer.channel import give_up
from opd.transfer.routes import SENDER, DirectPush, MeetingPoint, PushPlan, Route, plan_routes

LOOPBACK_ADDRESS = "127.0.0.1"
MAX_WAIT_S = 600.0
"""Most seconds for which processes of a channel wait for each other in one place: for a connection, or for a bucket."""


class RanksSource:
    """Implements `opd.interfaces.DirectSource` for the ranks of a trainer. One object, and mostly one channel, lasts for all pushes."""

    def __init__(self, ranks: Sequence[Worker[TrainerRank]], model_dir: Path, timeout_s: float) -> None:
        """`model_dir` has the student's own weights. `timeout_s` is the deadline of every wait."""
        self._ranks = ranks
        self._model_dir = model_dir
        self._timeout_s = timeout_s
        self._engines: list[Worker[Any]] = []
        """The engines in the channel; empty if there is no channel."""
        self._meeting: MeetingPoint | None = None
        self._routes: list[Route] = []
        self._number = 0
        self._plan = PushPlan(whole=True, buckets=())

    def begin(self, nbytes: int, *, keeps: bool, stream: Callable[[], WeightStream]) -> None:
        """Take the settings of the next push: buckets of about `nbytes`, which rank 0 keeps in the host's memory if `keeps` is true.
        `stream` streams the trainer's weights, as they are when it is called, through the object store."""
        self._nbytes, self._keeps, self._stream_changed = nbytes, keeps, stream

    def is_joined(self, engines: Sequence[Worker[Any]]) -> bool:
        return bool(self._engines) and self._engines == list(engines)

    def open_channel(
        self, engines: Sequence[Worker[Any]], memory_ids: Sequence[Sequence[str]]
    ) -> tuple[MeetingPoint, list[list[Route]]]:
        self.give_up()
        rank_ids = self._wait([rank.submit(TrainerRank.memory_id) for rank in self._ranks])
        routes = plan_routes(rank_ids, memory_ids)
        rank_0 = self._ranks[SENDER]
        nodes = {self._wait([worker.node_id()])[0] for worker in (rank_0, *engines)}
        address = LOOPBACK_ADDRESS if len(nodes) == 1 else rank_0.node_address(timeout_s=self._timeout_s)
        (port,) = self._wait([rank_0.submit(TrainerRank.listen, address)])
        self._routes = list(chain(*routes))
        in_group = sum(route.group_rank is not None for route in self._routes)
        self._meeting = MeetingPoint(
            address=address, port=port, group_size=1 + in_group, timeout_s=min(self._timeout_s, MAX_WAIT_S)
        )
        self._engines = list(engines)
        return self._meeting, routes

    def join(self) -> list[Pending[str]]:
        assert self._meeting is not None
        return [
            rank.submit(
                TrainerRank.join_channel,
                self._meeting,
                tuple(route.process for route in self._routes if route.trainer_rank == number),
            )
            for number, rank in enumerate(self._ranks)
        ]

    def plan(self) -> tuple[Path, DirectPush]:
        plans = self._wait([rank.submit(TrainerRank.plan_direct, self._nbytes) for rank in self._ranks])
        self._plan = plans[SENDER][0]
        self._number += 1
        handles = {process: buffers for _, by_process in plans for process, buffers in by_process.items()}
        return self._model_dir, DirectPush(number=self._number, plan=self._plan, handles=handles)

    def send(self) -> list[Pending[str]]:
        return [rank.submit(TrainerRank.send_directly, self._number, keeps=self._keeps) for rank in self._ranks]

    def give_up(self) -> None:
        if self._meeting is not None:
            give_up(self._meeting)
        self._meeting, self._engines = None, []

    def stream(self) -> WeightStream:
        if not self._keeps:
            return self._stream_changed()
        (node,) = self._wait([self._ranks[SENDER].node_id()])
        return WeightStream(model_dir=self._model_dir, whole=self._plan.whole, buckets=self._iterate_kept(), node=node)

    def _iterate_kept(self) -> Iterator[Any]:
        """Yield a handle to each bucket that rank 0 has kept."""
        for index in range(len(self._plan.buckets)):
            yield self._ranks[SENDER].submit(TrainerRank.kept_bucket, index).handle

    def _wait(self, pending: Sequence[Pending[Any]]) -> list[Any]:
        return cluster.wait_for_all(pending, timeout_s=self._timeout_s)
