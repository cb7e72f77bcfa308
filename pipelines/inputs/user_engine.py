"""A user's own rollout engine, `rollout.engine: module:Class`: import it, and refuse it if it cannot do what the pipeline needs."""

from __future__ import annotations

from typing import Any

from opd.cluster import LOCAL
from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.interfaces import RolloutEngine
from opd.settings.user_objects import import_user_object

KEY = "rollout.engine"
METHODS = (*(name for name in vars(RolloutEngine) if not name.startswith("_")), "wait_ready")
"""The methods of an engine that a merge calls."""
NEEDED_FOR = {"receive": ("network", "direct"), "receive_directly": ("direct",)}
"""Method that only some ways of new weights call -> these ways, as `PipelineConfig.push_kind` names them."""
DRAFTING = "load_draft"
"""The method that only a pipeline with `rollout.num_speculative_tokens` calls."""
WANTED = "a class with the methods of opd.interfaces.RolloutEngine and wait_ready()"


def import_users_engine(import_path: str) -> Any:
    """Import the user's rollout engine. Raises: ConfigError if it cannot be imported."""
    return import_user_object(import_path, KEY, WANTED)


def refuse_unfit(config: PipelineConfig) -> None:
    """Refuse a user's engine that lacks a method. Only classes are checked; a function that makes an engine shows no methods.

    Raises: ConfigError if it cannot be imported, or lacks a method. The methods of `NEEDED_FOR` are needed with some values
    of `sync.kind` only, and `DRAFTING` with a draft.
    """
    import_path = config.rollout.engine
    engine = import_users_engine(import_path)
    needed = [name for name in METHODS if config.push_kind in NEEDED_FOR.get(name, (config.push_kind,))]
    if not config.rollout.num_speculative_tokens:
        needed.remove(DRAFTING)
    missing = [f"{name}()" for name in needed if isinstance(engine, type) and not _has_own_method(engine, name)]
    if missing:
        problem = f"{import_path} without {', '.join(missing)}"
        if set(missing) <= {f"{name}()" for name in NEEDED_FOR}:
            requirement, fix = (
                f"one that takes the new weights of sync.kind {config.push_kind}",
                "add it, or set sync.kind to shared_memory",
            )
        else:
            requirement, fix = WANTED, "add them: docs/python.md"
        raise ConfigError.at(KEY, found=problem, wanted=requirement, fix=fix)


def _has_own_method(engine: type, name: str) -> bool:
    """Return True if the class itself defines the method. A class that extends the protocol inherits one that does nothing."""
    member = getattr(engine, name, None)
    return callable(member) and member is not getattr(RolloutEngine, name, None)


def refuse_unplaced(config: PipelineConfig) -> None:
    """Refuse `sync.kind: shared_memory` for a user's engine on a cluster of several machines. Raises: ConfigError.

    It is not known where such an engine has its workers, and shared memory reaches only those on the trainer's machine.
    """
    if config.cluster.address != LOCAL and config.push_kind == "shared_memory":
        raise ConfigError.at(
            "sync.kind",
            found=f"shared_memory, with {KEY} {config.rollout.engine} and cluster.address {config.cluster.address}",
            wanted="a way to the workers of an engine of your own, which may be on any node of the cluster",
            fix="set sync.kind to network, which calls the engine's receive(), or cluster.address to local",
        )
