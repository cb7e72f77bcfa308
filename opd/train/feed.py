"""Delivery of a step's scored rows to the trainer ranks, micro-batch by micro-batch. The driver hands each rank the handles of the parts
that have rows of its own; the rank reads these rows from shared memory or a file, and decodes no others.

The parts that the driver took and that are not trained yet may have a limited number of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from opd.stream.targets import StreamPart, TargetStream


class Feed:
    """Takes parts as rounds of micro-batches need them. A round is one micro-batch on every rank.

    The rows of each round were decided before anything was scored, so the order of arrival does not change the result.
    """

    def __init__(self, targets: TargetStream, plan: Sequence[Sequence[Sequence[str]]], *, queue_bytes: int) -> None:
        """Plan the rounds. `plan` is the result of `plan_micro_batches`; `queue_bytes` is the most bytes of untrained parts."""
        self._targets = targets
        self._rank_of = {i: rank for rank, part in enumerate(plan) for ids in part for i in ids}
        self._num_ranks = len(plan)
        self._rounds = [[i for part in plan for i in part[index]] for index in range(len(plan[0]))]
        self._round_of = {i: index for index, ids in enumerate(self._rounds) for i in ids}
        self._queue_bytes = queue_bytes
        self._unsent_parts: list[StreamPart] = []
        self._untrained: list[StreamPart] = []
        self._running_rounds = 0
        """Number of rounds that were sent to the ranks and have not ended."""
        self.waited_s = 0.0
        """Seconds in which this waited for a part while no round was running."""
        self.early = 0
        """Number of rounds that were sent before the last row was scored."""
        self.peak_bytes = 0
        """Most bytes of parts that were taken and not yet trained."""

    def send_rows(self, index: int, finish_oldest: Callable[[], bool]) -> list[list[Any]]:
        """Wait until the rows of round `index` are there. Returns, for each rank, handles to the parts with its rows that came since the
        last call.

        For the last round, this waits for all rows. While the queue is full, it calls `finish_oldest`, which waits for the
        oldest round to end and calls `mark_trained`, or returns False if no round is running. In the latter case parts are
        taken although the queue is full, because no round could empty it. Raises: what `TargetStream.take_part` raises.
        """
        every = index == len(self._rounds) - 1
        while every or not self._targets.has_samples(self._rounds[index]):
            if self._count_untrained_bytes() >= self._queue_bytes and finish_oldest():
                continue
            began = time.monotonic()
            part = self._targets.take_part()
            self.waited_s += 0.0 if self._running_rounds else time.monotonic() - began
            if part is None:
                break
            self._unsent_parts.append(part)
            self._untrained.append(part)
            self.peak_bytes = max(self.peak_bytes, self._count_untrained_bytes())
        self.early += not self._targets.arrived
        new, self._unsent_parts = self._unsent_parts, []
        handles: list[list[Any]] = [[] for _ in range(self._num_ranks)]
        for part in new:
            for rank in sorted({self._rank_of[i] for i in part.samples}):
                handles[rank].append(part.handle)
        self._running_rounds += 1
        return handles

    def mark_trained(self, index: int) -> None:
        """Note that round `index` has ended. Rounds end in order, so parts without rows for a later round leave the queue."""
        self._running_rounds -= 1
        self._untrained = [p for p in self._untrained if any(self._round_of.get(i, -1) > index for i in p.samples)]

    def _count_untrained_bytes(self) -> int:
        return sum(part.nbytes for part in self._untrained)
