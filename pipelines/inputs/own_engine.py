"""The user's rollout engine, `rollout.engine: module:Class`: found, and refused where it cannot do what the pipeline asks of it."""

from __future__ import annotations

from typing import Any

from opd.cluster import LOCAL
from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.interfaces import RolloutEngine
from opd.settings.named import import_user_object

KEY = "rollout.engine"
METHODS = (*(name for name in vars(RolloutEngine) if not name.startswith("_")), "wait_ready")
"""What a pipeline calls of an engine."""
WANTED = "a class with the methods of opd.interfaces.RolloutEngine and wait_ready()"


def import_users_engine(import_path: str) -> Any:
    """Import the user's rollout engine. Raises: ConfigError if it cannot be imported."""
    return import_user_object(import_path, KEY, WANTED)


def refuse_unfit(config: PipelineConfig) -> None:
    """Look for the methods of a user's engine. What is no class, such as a function that makes an engine, shows none.

    Raises: ConfigError if it cannot be imported, or lacks a method; `receive` is needed by `sync.kind: network` alone.
    """
    import_path = config.rollout.engine
    engine = import_users_engine(import_path)
    needed = [name for name in METHODS if name != "receive" or config.sync.kind == "network"]
    missing = [f"{name}()" for name in needed if isinstance(engine, type) and not _has_own_method(engine, name)]
    if missing:
        problem = f"{import_path} without {', '.join(missing)}"
        if missing == ["receive()"]:
            requirement, fix = (
                "one that takes the new weights of sync.kind network",
                "add it, or set sync.kind to shared_memory",
            )
        else:
            requirement, fix = WANTED, "add them: docs/python.md"
        raise ConfigError.at(KEY, found=problem, wanted=requirement, fix=fix)


def _has_own_method(engine: type, name: str) -> bool:
    """Return True if the class has a method of its own; whoever extends the protocol inherits one that does nothing."""
    member = getattr(engine, name, None)
    return callable(member) and member is not getattr(RolloutEngine, name, None)


def refuse_unplaced(config: PipelineConfig) -> None:
    """Refuse to push new weights through one machine's memory to a user's engines that may be on others: where a user's engine has its
    workers is not known. Raises: ConfigError."""
    if config.cluster.address != LOCAL and config.sync.kind == "shared_memory":
        raise ConfigError.at(
            "sync.kind",
            found=f"shared_memory, with {KEY} {config.rollout.engine} and cluster.address {config.cluster.address}",
            wanted="a way to the workers of an engine of your own, which may be on any node of the cluster",
            fix="set sync.kind to network, which calls the engine's receive(), or cluster.address to local",
        )
