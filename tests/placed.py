"""A worker that says where Ray has put it. Its module imports nothing else, so that two dozen of them start quickly."""

from __future__ import annotations

import os


class PlacedWorker:
    """A worker that says where it is."""

    def place(self) -> tuple[str, str, list[str]]:
        """Return the id of the node, CUDA_VISIBLE_DEVICES, and the GPUs that Ray counts for this worker."""
        import ray

        return (
            ray.get_runtime_context().get_node_id(),
            os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            [str(gpu) for gpu in ray.get_gpu_ids()],
        )


def read_place(_: object) -> tuple[str, str, list[str]]:
    """Return what `PlacedWorker.place` does, for workers that compute on the CPU: their CUDA_VISIBLE_DEVICES is empty, so only the core of
    Ray still knows the GPU."""
    import ray

    core = ray._private.worker.global_worker.core_worker
    gpus = {str(gpu) for name, parts in core.resource_ids().items() if name.startswith("GPU") for gpu, _ in parts}
    return ray.get_runtime_context().get_node_id(), ",".join(gpus), list(gpus)
