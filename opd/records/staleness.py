"""The ages of a step's tokens. The age of a token is the number of weight pushes between the weights that wrote it and those that are
trained on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from opd.errors import RunError
from opd.records.types import Rollout


def count_ages(rollouts: Sequence[Rollout], policy_version: int) -> dict[int, int]:
    """Return age -> trained tokens, the youngest first; `policy_version` is that of the weights that are trained on them."""
    tokens_by_age = Counter[int]()
    for rollout in rollouts:
        for span in rollout.spans:
            if span.trained and span.length:
                tokens_by_age[policy_version - span.policy_version] += span.length
    return dict(sorted(tokens_by_age.items()))


def find_stale_samples(rollouts: Sequence[Rollout], policy_version: int) -> frozenset[str]:
    """Return the ids of the samples with a trained token that older weights wrote."""
    return frozenset(r.sample_id for r in rollouts if any(age > 0 for age in count_ages([r], policy_version)))


def refuse_stale(rollouts: Sequence[Rollout], policy_version: int, max_staleness: int) -> None:
    """Refuse rows with a trained token that is older than `max_staleness`, or newer than `policy_version`. Raises: RunError."""
    for rollout in rollouts:
        wrong_ages = [age for age in count_ages([rollout], policy_version) if not 0 <= age <= max_staleness]
        if wrong_ages:
            raise RunError(
                f"sample {rollout.sample_id} of domain {rollout.domain}: policy version {policy_version - wrong_ages[-1]} wrote tokens "
                f"of it, and version {policy_version} would be trained on them: an age of {wrong_ages[-1]}, "
                f"schedule.max_staleness is {max_staleness}"
            )
