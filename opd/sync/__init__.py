"""Pushing weights from the trainer to the rollout engines. Each way to do it has a file, and one dictionary names them all."""

from opd.sync.direct import DirectSync
from opd.sync.network import NetworkSync
from opd.sync.proof import ProvenSync, SyncSpec
from opd.sync.shared_memory import SharedMemorySync

SYNCS: dict[str, type[ProvenSync]] = {
    "shared_memory": SharedMemorySync,
    "network": NetworkSync,
    "direct": DirectSync,
}
"""Way of a push, as `opd.config.devices.PushKind` names it -> class that pushes weights in that way."""

__all__ = ["SYNCS", "DirectSync", "NetworkSync", "ProvenSync", "SharedMemorySync", "SyncSpec"]
