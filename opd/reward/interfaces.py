"""The interface of rewards for the loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opd.records.rewards import PolicyReport, RewardRecord, RewardStep
    from opd.records.types import Prompt, Rollout, RolloutBatch


class Rewards(Protocol):
    """Gives rewards and turns them into what the policy is trained on; what it learns goes into checkpoints.

    The calls of a step: `judged`, unless the step comes from the target log; `step`; `record`.
    """

    def judged(self, batch: RolloutBatch, prompts: Sequence[Prompt]) -> RolloutBatch:
        """Return the batch with a reward on every response of the domains that take part and whose environment gives none."""
        ...

    def step(self, step: int, rollouts: Sequence[Rollout]) -> RewardStep:
        """Return the advantages and the weight that the policy trains on in this step. Raises: RunError if a critic fails."""
        ...

    def record(self, rollouts: Sequence[Rollout], trained: PolicyReport | None) -> RewardRecord:
        """Return the last step's record; `trained` is None if no token was trained on a reward."""
        ...

    def load(self, checkpoint: Path) -> None:
        """Restore the state of the checkpoint in this directory."""
        ...
