"""How new weights reach the rollout engines. One file per way, behind one dictionary."""

from opd.sync.shared_memory import SharedMemorySync

SYNCS = {"shared_memory": SharedMemorySync}
