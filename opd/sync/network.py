"""Weight push between machines: the trainer's ranks gather a bucket, and Ray's object store carries it to every engine.

    ranks        gather 1   gather 2   gather 3
                     └─────────┐└─────────┐
    engines                 take 1     take 2 ...

No port is opened for this: buckets travel like everything else that Ray carries between workers, and a machine with several engines
gets each bucket once. At most two buckets are under way, so neither side holds a second copy of the model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from opd.models.buckets import KeptHandles
from opd.rollouts.worker import can_swap, read_model_shape
from opd.sync.files import stream_files
from opd.sync.proof import ProvenSync


class NetworkSync(ProvenSync):
    """Weight push over the network: trainer ranks and engines may be on any machines of the Ray cluster."""

    def send_weights(self, version: int) -> None:
        send = partial(self._spec.trainer.stream_changed, self._spec.bucket)
        if not self._spec.keeps_weights:
            self._spec.engine.receive(send)
            return
        # If an engine dies later, the trainer may be busy or have newer weights. So the buckets stay in the object store.
        stream = send()
        kept_stream = replace(stream, buckets=KeptHandles(stream.buckets))
        self._spec.engine.receive(lambda: kept_stream)

    def hold(self, model_dir: Path, *, shape_of: Path) -> None:
        shape = read_model_shape(shape_of)
        if can_swap(shape, shape):
            self._spec.engine.receive(partial(stream_files, model_dir, shape_of, self._spec.bucket))
        else:  # the whole model cannot be streamed into engines of this family, so they read the files
            super().hold(model_dir, shape_of=shape_of)
