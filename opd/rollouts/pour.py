"""Hand new weights to rollout workers as the trainer sends them, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from opd.buckets import WeightStream
from opd.cluster import Pending, Worker, WorkerDied
from opd.rollouts.worker import VLLMWorker


def pour(workers: Sequence[Worker[VLLMWorker]], stream: WeightStream, *, timeout_s: float) -> None:
    """Have workers take all buckets of a stream; `VLLMWorker.finish_stream` is still to be called. All are waited for before the
    next bucket is asked for, so that no more than two are under way.

    A worker that dies misses the rest, and the others go on: vLLM cannot give up a reload in the middle.
    `timeout_s`: deadline of each worker with each bucket. Raises: what `opd.cluster.wait` raises, but for the death of one of
    these workers.
    """
    alive = list(workers)

    def all_do(ask: Callable[[Worker[VLLMWorker]], Pending[None]]) -> None:
        for worker, pending in [(worker, ask(worker)) for worker in alive]:
            try:
                pending.result(timeout_s=timeout_s)
            except WorkerDied as error:
                if error.worker is not worker:
                    raise
                alive.remove(worker)

    def take(handle: Any, worker: Worker[VLLMWorker]) -> Pending[None]:
        return worker.submit(VLLMWorker.take_bucket, handle)

    all_do(lambda worker: worker.submit(VLLMWorker.begin_stream, stream.model_dir, whole=stream.whole))
    for handle in stream.buckets:
        all_do(partial(take, handle))
        if not alive:
            return
