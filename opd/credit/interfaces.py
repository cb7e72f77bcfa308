"""The interface that every kind of credit has for the loop and its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from opd.records.types import Rollout, WrittenFile

    Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCredit:
    """The credit of one step's tokens."""

    advantages: Mapping[str, Floats]
    """Sample id -> [N] advantage of each trained token, in the order of `Rollout.trained`. Every rollout with a reward is in
    it, also one without a trained token; a rollout whose reward is None is not."""
    readings: Mapping[str, float] = field(default_factory=dict)
    """Name -> number for the metrics. A number that this step does not have is left out."""
    warm: bool = True
    """True if the policy may train on these advantages; False while a critic still explains nothing."""


class Credit(Protocol):
    """One way to turn rewards into advantages. It may learn from the step, and hold state from step to step.

    The calls of a run: `wait_ready`, `load` if it is a resume, then for each step `assign`, and after some steps `begin_save` and `saved`.
    """

    def assign(self, step: int, rollouts: Sequence[Rollout]) -> StepCredit:
        """Assign credit to the step's tokens, before the policy trains on them. Called once a step, with all its rollouts.

        The result depends on the state and on the rollouts of this step, and on nothing else, so that a resumed run gets the
        same bits. Raises: RunError if a rank of a critic fails or its numbers broke.
        """
        ...

    def wait_ready(self) -> None:
        """Block until `assign` and `load` may be called. Raises: RunError past the deadline."""
        ...

    def begin_save(self, path: Path) -> None:
        """Copy the state as the last `assign` left it, and return; the copy is written into this directory, which exists, while the
        run goes on. Credit without a state writes nothing."""
        ...

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        """Return the files of the last `begin_save`, synced, with names relative to its directory; None if they are not all
        written after `wait_s`. Raises: StorageError."""
        ...

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote into this directory."""
        ...
