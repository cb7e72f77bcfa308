"""Our errors for a worker or a value that is gone, and functions that read Ray's errors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from opd.errors import OpdError, RunError

if TYPE_CHECKING:
    from opd.cluster.workers import Worker


class WorkerDied(RunError):
    """A worker's process, or Ray itself, is gone."""

    def __init__(self, message: str, worker: Worker[Any] | None = None, start_error: str = "") -> None:
        # With the message alone, so that the error can be pickled; the handle is of use only in the driver.
        super().__init__(message)
        self.worker = worker
        """The worker that died; None if Ray itself did."""
        self.start_error = start_error
        """Type and text of the exception that its constructor raised; empty if it had started."""


class LostValue(WorkerDied):
    """A value cannot be read any more, because the only node that had it is gone. If it was an argument of a call, the call did not
    begin."""


def parse_start_error(error: Any) -> str:
    """Return type and text of the exception that a worker's constructor raised; empty if it raised none. `error`: a `RayActorError`.

    Ray has the exception only as text: a line about the actor, a traceback, and last the exception. The text before the exception
    has numbers that differ from start to start; without it, two starts that fail alike have equal texts.
    """
    if not error.actor_init_failed:
        return ""
    raised = list(re.finditer(r"^[A-Za-z_][\w.]*(?:: .*)?$", str(error), re.MULTILINE))
    return str(error)[raised[-1].start() :].strip() if raised else ""


def unwrap_task_error(error: Any) -> Exception:
    """Return the exception that a worker raised, given Ray's `RayTaskError`.

    Our own errors are returned as they are; around others Ray wraps the worker's traceback.
    """
    return error.cause if isinstance(error.cause, OpdError | RunError) else error.as_instanceof_cause()
