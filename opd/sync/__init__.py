"""Weight push to the rollout engines. One file per way, behind one dictionary."""

from opd.sync.network import NetworkSync
from opd.sync.proof import ProvenSync, SyncSpec
from opd.sync.shared_memory import SharedMemorySync

SYNCS: dict[str, type[ProvenSync]] = {"shared_memory": SharedMemorySync, "network": NetworkSync}
"""`sync.kind` -> class of the way."""

__all__ = ["SYNCS", "NetworkSync", "ProvenSync", "SharedMemorySync", "SyncSpec"]
