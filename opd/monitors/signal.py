"""What every signal is: what it reads, what its number means, and which responses show it best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from statistics import fmean

from opd.records.step import StepRecord, compute_mean_length, select_domain, compute_token_mean
from opd.records.types import Rollout

WHOLE_STEP = ""
"""In the place of a domain, where a reading is of all domains together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalHistory:
    """The steps that one reading is taken from. `over` is the signal's key in the pipeline."""

    first_records: Sequence[StepRecord]
    """The first `over` steps of the run."""
    earlier_records: Sequence[StepRecord]
    """The `over` steps before the newest one, fewer while there are not so many."""
    last: Sequence[StepRecord]
    """The last `over` steps, the newest one at the end."""
    expert_tokens: Mapping[str, float]
    """Domain -> mean tokens of its expert's answers in the exam; without the domains that have none."""
    tolerance: float
    """The gap between engine and trainer that ends the run, nats (`sync.tolerance`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One number to watch. Every number is such that more is worse."""

    says: str
    """What a reading means, with `{value}` where it stands."""
    advice: str
    """What a person may do about it."""
    read: Callable[[SignalHistory], Mapping[str, float]]
    """The readings by domain, or one for the `WHOLE_STEP`; none where the records do not tell."""
    shown_by: Callable[[Rollout], float] | None = None
    """The responses with most of this become the samples; None: responses do not differ in it."""


def share_of_responses(
    steps: Sequence[StepRecord], counted: Callable[[StepRecord], Mapping[str, int]]
) -> dict[str, float]:
    """Return domain -> how many of its responses in these steps are counted ones, 0 to 1."""
    shares = {}
    for domain in _list_domains(steps):
        samples = sum(record.domains[domain].samples for record in steps if domain in record.domains)
        if samples:
            shares[domain] = sum(counted(record).get(domain, 0) for record in steps) / samples
    return shares


def tokens_of_responses(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return domain -> mean trained tokens of a response in these steps."""
    lengths = {domain: compute_mean_length(steps, domain) for domain in _list_domains(steps)}
    return {domain: length for domain, length in lengths.items() if length is not None}


def means_of_tokens(steps: Sequence[StepRecord], key: str) -> dict[str, float]:
    """Return domain -> mean over its trained tokens in these steps; without the domains whose teachers do not tell."""
    means = {domain: compute_token_mean(select_domain(steps, domain), key) for domain in _list_domains(steps)}
    return {domain: mean for domain, mean in means.items() if mean is not None}


def mean_probability(rollout: Rollout) -> float:
    """Return the mean probability of the student's own tokens as it sampled them; 0 for an empty response, which shows nothing."""
    own = zip(rollout.trained_positions, rollout.sampled_mask, strict=True)
    probabilities = [exp(rollout.behaviour_logprobs[index]) for index, sampled in own if sampled]
    return fmean(probabilities) if probabilities else 0.0


def _list_domains(steps: Sequence[StepRecord]) -> list[str]:
    return list(dict.fromkeys(domain for record in steps for domain in record.domains))
