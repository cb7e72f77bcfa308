"""Weight push without host memory or files: from the trainer's ranks straight into the engines' processes; `opd.transfer` shows the way."""

from __future__ import annotations

from opd.sync.network import NetworkSync


class DirectSync(NetworkSync):
    """Weight push by NCCL between GPUs, by CUDA IPC on one GPU, by gloo between CPUs. Ranks and engines may be on any machines of the cluster.

    An engine that misses a push, because it died, takes the weights through the object store. If it dies in the middle of one, all do.
    """

    def send_weights(self, version: int) -> None:
        source = self._spec.trainer.direct_source(self._spec.bucket, keeps=self._spec.keeps_weights)
        problem = self._spec.engine.receive_directly(source)
        if problem:
            self._spec.tell(f"weight push {version} went through the object store: {problem}")
