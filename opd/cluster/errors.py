"""Our errors for a worker or a value that is gone, and the reading of Ray's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from opd.errors import OpdError, RunError

if TYPE_CHECKING:
    from opd.cluster.workers import Worker


class WorkerDied(RunError):
    """A worker's process, or Ray itself, is gone."""

    def __init__(self, message: str, worker: Worker[Any] | None = None, start_error: str = "") -> None:
        super().__init__(message)  # alone, so that it can be pickled; a handle is of use in the driver only
        self.worker = worker
        """The worker that died; None if Ray itself did."""
        self.start_error = start_error
        """Type and text of the exception that its constructor raised; empty if it had started."""


class LostValue(WorkerDied):
    """A value cannot be read any more: the only node that had it is gone. A call that was given it did not begin."""


def parse_start_error(error: Any) -> str:
    """Return type and text of the exception that a worker's constructor raised, from Ray's `RayActorError`; empty if it raised none.

    Ray has it only as text: a line about the actor, a traceback, the exception. Without the numbers before it, two starts that fail
    alike have equal ones.
    """
    if not error.actor_init_failed:
        return ""
    raised = list(re.finditer(r"^[A-Za-z_][\w.]*(?:: .*)?$", str(error), re.MULTILINE))
    return str(error)[raised[-1].start() :].strip() if raised else ""


def unwrap_task_error(error: Any) -> Exception:
    """Return the exception that a worker raised, from Ray's `RayTaskError`.

    An error that we worded ourselves comes back as it is; Ray would wrap the worker's traceback around it.
    """
    return error.cause if isinstance(error.cause, OpdError | RunError) else error.as_instanceof_cause()
