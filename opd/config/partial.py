"""What `schedule.partial_rollout` means for a step, and what it does not go with in the other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from opd.config.domains import DomainConfig
    from opd.config.pipeline import PipelineConfig


def cuts_of(config: PipelineConfig) -> int:
    """Return how often one response may be cut; 0 without `schedule.partial_rollout`."""
    partial = config.schedule.partial_rollout
    return partial.cuts if partial else 0


def most_samples(config: PipelineConfig) -> int:
    """Return the most responses that a step trains: where some were cut, the last step trains what waits as well."""
    return config.trainer.samples_per_step * (1 + cuts_of(config))


def partial_rollout_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return why responses of this pipeline cannot be cut; None if they can, or are not."""
    partial, objective = config.schedule.partial_rollout, config.objective
    where, limit = "schedule.partial_rollout", config.rollout.max_new_tokens
    if partial is None:
        return None
    if partial.cut_at >= limit:
        where, found = f"{where}.cut_at", f"{partial.cut_at}, with rollout.max_new_tokens {limit}"
        wanted = f"fewer than {limit}: else no response is ever cut"
    elif objective.reward is not None or objective.IS_ESTIMATE:
        found = "objective.reward" if objective.reward is not None else f"objective.kind {objective.kind}"
        # The mean over the other tries of a step would depend on which of them were short enough to be in it.
        wanted = "an objective that is an exact divergence, such as reverse_kl, without a reward; or leave partial_rollout out"
    elif config.balance.kind == "gap":
        where, found = "balance", "gap, with schedule.partial_rollout"
        wanted = "samples or tokens: in the first steps no response can reach its limit yet, which gap takes for the usual share"
    elif all(_has_episodes(domain) for domain in config.domains.values()):
        found, wanted = "domains with episodes only", "a domain whose student answers once: episodes are not cut"
    else:
        return None
    return PydanticCustomError("partial_rollout", "{wanted}", {"wanted": wanted, "where": where, "found": found})


def _has_episodes(domain: DomainConfig) -> bool:
    """Return True if the domain has episodes in training."""
    return bool(domain.agent or (domain.environment and not domain.environment.replay))
