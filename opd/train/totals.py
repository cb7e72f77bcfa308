"""The weights of tokens that make the loss a mean, and the sums of per-token numbers that a step reports.

The driver computes the weights once from all rows of the step. So the mean does not depend on how the rows are divided among
ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opd.errors import RunError
from opd.losses.chunked import RewardedStats, TokenStats
from opd.records.rewards import GradientSums, PolicyStats
from opd.records.sums import add_to_sums
from opd.records.types import DomainStats, PositionStats, Rollout, TurnStats
from opd.train.batch import DIVERGENCE, POLICY, MicroBatch

LEAST_MEAN, MOST_MEAN = -1e-3, 50.0
"""Bounds of a domain's mean divergence, nats a token. A divergence is not negative; the lower bound leaves room for rounding.
Above the upper bound the teacher finds nearly every token of the student impossible."""


def weigh_rows(rollouts: Sequence[Rollout], normalize: str, domain_weights: Mapping[str, float]) -> dict[str, float]:
    """Return sample id -> weight of each of its trained tokens; 0 for a sample without one. Empty if nothing is trained.

    `normalize` decides on the weight of a token of response i:

    token_mean:    d_i / sum_j d_j T_j                   T_j: trained tokens of response j
    leave_one_out: d_i / (d_i U_i + sum_j!=i d_j T_j)    U_i: mean T of the step's other responses of the domain, or T_i
                                                         if there is no other
    sequence_mean: d_i / (T_i sum_j d_j)                 j: responses with a trained token

    d is the loss weight of the response's domain. A response is an episode with all its segments. If these belong to several
    domains, the d_i above is that of the token's own segment, and d_j is the mean d over the tokens of response j.

    An estimate from sampled tokens needs `leave_one_out`: the length of a response depends on the very tokens whose gradient
    the weight multiplies, so a weight that depends on that length would bias the estimate.
    """
    tokens = {r.sample_id: r.num_trained for r in rollouts}
    share = {r.sample_id: domain_weights.get(r.domain, 1.0) for r in rollouts if tokens[r.sample_id]}
    if not share:
        return {}
    total = sum(d * tokens[i] for i, d in share.items())
    divisors: dict[str, float] = {}
    """Episode -> number by which the d of its tokens are divided; `total` for an episode that is not in it."""
    if normalize == "leave_one_out":
        changes = _length_changes(rollouts, domain_weights)
        divisors = {episode: total + change for episode, change in changes.items()}
    elif normalize == "sequence_mean":
        lengths = {episode: of for episode, of in _lengths_of_episodes(rollouts).items() if of.total()}
        means = [
            sum(domain_weights.get(domain, 1.0) * (num / of.total()) for domain, num in of.items())
            for of in lengths.values()
        ]
        divisors = {episode: of.total() * sum(means) for episode, of in lengths.items()}
    return {
        r.sample_id: share[r.sample_id] / divisors.get(r.episode, total) if r.sample_id in share else 0.0
        for r in rollouts
    }


def _lengths_of_episodes(rollouts: Sequence[Rollout]) -> dict[str, Counter[str]]:
    """Return episode -> domain -> trained tokens of the episode's segments."""
    lengths: dict[str, Counter[str]] = defaultdict(Counter)
    for rollout in rollouts:
        lengths[rollout.episode][rollout.domain] += rollout.num_trained
    return lengths


def _length_changes(rollouts: Sequence[Rollout], domain_weights: Mapping[str, float]) -> dict[str, float]:
    """Return episode -> change of the step's weighted token count, if the episode had the mean length of others of its domain.

    The others are the step's other episodes that began in the same domain. The change is 0 if these have no trained token.
    """
    lengths = _lengths_of_episodes(rollouts)
    began: dict[str, str] = {}
    for rollout in rollouts:
        began.setdefault(rollout.episode, rollout.domain)
    members: dict[str, list[str]] = defaultdict(list)
    for episode, domain in began.items():
        members[domain].append(episode)
    changes = dict.fromkeys(began, 0.0)
    for ids in members.values():
        sums = sum((lengths[episode] for episode in ids), Counter[str]())
        for episode in ids:
            tokens = lengths[episode]
            if sums.total() > tokens.total():
                changes[episode] = sum(
                    domain_weights.get(domain, 1.0) * ((num - tokens[domain]) / (len(ids) - 1) - tokens[domain])
                    for domain, num in sums.items()
                )
    return changes


def refuse_impossible_means(step: int, kind: str, domains: Mapping[str, DomainStats]) -> None:
    """Refuse a domain whose mean loss cannot be a divergence. Raises: RunError, which names the first such domain."""
    for name, stats in domains.items():
        mean = stats.kl_sum / max(1, stats.tokens)
        if not LEAST_MEAN <= mean <= MOST_MEAN:  # written so that NaN fails too
            raise RunError(
                f"step {step}: {kind} of domain {name} is {mean:.4g} nats a token, wanted {LEAST_MEAN:g} to {MOST_MEAN:g}: "
                "its teacher's scores or the student's weights are broken; targets/ of the run holds the step's rows, "
                "the last checkpoint was before it"
            )


def mean_gap(domains: Mapping[str, DomainStats]) -> float:
    """Return the mean |trainer - engine| log-prob over sampled tokens that are not stale, nats; 0 if there are none."""
    fresh = sum(stats.tokens - stats.taught_tokens - stats.stale_tokens for stats in domains.values())
    return sum(stats.gap_sum for stats in domains.values()) / max(1, fresh)


def mean_drift(domains: Mapping[str, DomainStats]) -> float:
    """Return the mean |trainer - engine| log-prob over the stale tokens, nats; 0 if there are none."""
    stale = sum(stats.stale_tokens for stats in domains.values())
    return sum(stats.drift_sum for stats in domains.values()) / max(1, stale)


def refuse_gap(step: int, domains: Mapping[str, DomainStats], tolerance: float) -> None:
    """Refuse a step in which the mean gap of trainer and engine is above `tolerance`, nats. Raises: RunError.

    The policy that is trained would not be the one that wrote the tokens. Stale tokens do not count: older weights wrote
    them, so that a gap is expected.
    """
    gap = mean_gap(domains)
    if not gap <= tolerance:  # written so that NaN fails too
        means = {name: mean_gap({name: stats}) for name, stats in domains.items()}
        worst = max(means, key=lambda name: (math.isnan(means[name]), means[name]))
        raise RunError(
            f"step {step}: engine and trainer differ by {gap:.4f} nats a sampled token, sync.tolerance is {tolerance:g}, most "
            f"in domain {worst} ({means[worst]:.4f}): they compute different distributions; the last checkpoint was before it"
        )


def token_weights(batch: MicroBatch, weights: Sequence[float]) -> Tensor:
    """Return [N] the weight of each token; `weights` has one number for each row of the batch, which all of its tokens get."""
    lengths = torch.tensor(batch.trained_lengths, dtype=torch.long)
    return torch.repeat_interleave(torch.tensor(weights), lengths).float()


@dataclass(slots=True, kw_only=True)
class RankPolicy:
    """Sums over one rank's tokens that have an advantage."""

    loss: float = 0.0
    """Weighted sum of the policy gradient's values over this rank's tokens."""
    weight: float = 0.0
    """Sum of the weights of this rank's tokens; over all ranks it is 1 if every row was scored."""
    domains: dict[str, PolicyStats] = field(default_factory=dict)
    compared: GradientSums | None = None
    """Sums that compare the two gradients; None in a step in which they are not compared."""

    def add(self, batch: MicroBatch, weight_N: Tensor, stats: RewardedStats) -> None:
        """Add one micro-batch; `weight_N` are the policy gradient's weights, before its factor. Tokens with weight 0 do not
        count."""
        rewarded_N = weight_N != 0
        value_N = torch.where(rewarded_N, stats.policy_N.float(), 0.0)
        self.loss += float((value_N * weight_N).sum())
        self.weight += float(weight_N.sum())
        lengths = list(batch.trained_lengths)
        masked_N = (stats.masked_N != 0) & rewarded_N
        parts = zip(value_N.split(lengths), masked_N.split(lengths), rewarded_N.split(lengths), strict=True)
        for domain, (value, masked, rewarded) in zip(batch.domains, parts, strict=True):
            tokens = int(rewarded.sum())
            if tokens:
                row = PolicyStats(tokens=tokens, loss_sum=float(value.sum()), masked=int(masked.sum()))
                add_to_sums(self.domains, domain, row)


class Totals:
    """Sums over the micro-batches of one rank in one step."""

    def __init__(self, end_token_ids: Sequence[int] = ()) -> None:
        """`end_token_ids`: tokens whose losses are added up by themselves, too."""
        self._end_ids_E = torch.tensor(end_token_ids, dtype=torch.long)
        self.loss = 0.0
        self.weight = 0.0
        """Sum of the divergence's weights over all tokens."""
        self.domains: dict[str, DomainStats] = {}
        self.positions: dict[int, PositionStats] = {}
        self.turns: dict[tuple[str, int], TurnStats] = {}
        self.token_losses: dict[str, tuple[float, ...]] = {}
        """Sample id -> the objective's value at each trained token, nats; only of samples that `keep_token_losses` was given."""
        self.policy: RankPolicy | None = None
        """Sums of the policy gradient; None without one."""

    def add(
        self, batch: MicroBatch, weights: Mapping[str, Tensor], stats: TokenStats, stale: frozenset[int] = frozenset()
    ) -> None:
        """Add one micro-batch. `weights`: component -> [N] weights of its own mean, before any factor. `stale`: indices of the
        rows in the batch that older weights wrote."""
        weight_N = weights[DIVERGENCE]
        if POLICY in weights:
            assert isinstance(stats, RewardedStats)
            self.policy = self.policy or RankPolicy()
            self.policy.add(batch, weights[POLICY], stats)
        self.loss += float(torch.where(weight_N != 0, stats.kl_N.float() * weight_N, 0.0).sum())
        self.weight += float(weight_N.double().sum())
        columns = {
            "kl_sum": stats.kl_N,
            "gap_sum": torch.where(batch.sampled_N, (stats.logprob_N - batch.behaviour_N).abs(), 0.0),
            "entropy_sum": stats.entropy_N,
            "teacher_entropy_sum": stats.teacher_entropy_N,
            "agree_sum": stats.agree_N,
            "teacher_top1_sum": stats.teacher_top1_N,
            "clipped_sum": stats.clipped_N,
            "student_mass_sum": stats.student_mass_N,
            "teacher_mass_sum": stats.teacher_mass_N,
        }
        lengths_B = torch.tensor(batch.trained_lengths, dtype=torch.long)
        fresh_B = torch.tensor([row not in stale for row in range(len(lengths_B))], dtype=torch.bool)
        fresh_N = torch.repeat_interleave(fresh_B, lengths_B)
        columns["drift_sum"] = torch.where(fresh_N, 0.0, columns["gap_sum"])
        columns["gap_sum"] = torch.where(fresh_N, columns["gap_sum"], 0.0)
        columns |= {"taught_tokens": ~batch.sampled_N, "stale_tokens": ~fresh_N & batch.sampled_N}
        if len(self._end_ids_E):
            ends_N = torch.isin(batch.token_N, self._end_ids_E)
            columns |= {"end_tokens": ends_N, "end_sum": torch.where(ends_N, stats.kl_N, 0.0)}
        self._add_domains(batch, lengths_B, columns)
        self._add_positions(batch, stats.kl_N)
        self._add_turns(batch, stats.kl_N, columns["gap_sum"], fresh_N & batch.sampled_N)

    def keep_token_losses(self, batch: MicroBatch, stats: TokenStats, samples: Mapping[int, str]) -> None:
        """Keep the losses of single tokens; `samples`: index of a row in the batch -> its sample id."""
        if samples:
            rows = stats.kl_N.split(list(batch.trained_lengths))
            self.token_losses |= {sample_id: tuple(rows[row].tolist()) for row, sample_id in samples.items()}

    def _add_domains(self, batch: MicroBatch, lengths_B: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the columns up by domain, for all rows at once: one row after the other takes longer than the loss itself."""
        names = list(dict.fromkeys(batch.domains))
        domain_B = torch.tensor([names.index(domain) for domain in batch.domains], dtype=torch.long)
        domain_N = torch.repeat_interleave(domain_B, lengths_B)
        # A sample counts once, where its first trained token is: ranks may share its row.
        begins_B = (lengths_B > 0) & (torch.tensor(batch.earlier_tokens, dtype=torch.long) == 0)
        tokens, samples = (
            torch.bincount(indices, minlength=len(names)).tolist() for indices in (domain_N, domain_B[begins_B])
        )
        sums = {
            name: torch.zeros(len(names), dtype=torch.float64).index_add_(0, domain_N, column.double()).tolist()
            for name, column in columns.items()
        }
        for index, domain in enumerate(names):
            columns_of_domain: dict[str, Any] = {name: values[index] for name, values in sums.items()}
            counts = [name for name in ("taught_tokens", "stale_tokens", "end_tokens") if name in columns]
            columns_of_domain |= {name: round(columns_of_domain[name]) for name in counts}
            row = DomainStats(tokens=tokens[index], samples=samples[index], **columns_of_domain)
            add_to_sums(self.domains, domain, row)

    def _add_positions(self, batch: MicroBatch, kl_N: Tensor) -> None:
        """Add the values up by the number of bits of a token's place: see `StepReport.positions`."""
        bits_N = torch.frexp(batch.place_N.double()).exponent  # the exponent of an integer is its number of bits
        tokens = torch.bincount(bits_N).tolist()
        sums = torch.bincount(bits_N, weights=kl_N.double()).tolist()
        for bits, (count, total) in enumerate(zip(tokens, sums, strict=True)):
            if count:
                add_to_sums(self.positions, bits, PositionStats(tokens=count, kl_sum=total))

    def _add_turns(self, batch: MicroBatch, kl_N: Tensor, gap_N: Tensor, fresh_N: Tensor) -> None:
        """Add the values up by domain and turn; `fresh_N` is True for sampled tokens that are not stale, whose gap counts."""
        names = list(dict.fromkeys(batch.domains))
        # One number stands for domain and turn: `domain * most + turn`.
        domains_B = torch.tensor([names.index(domain) for domain in batch.domains], dtype=torch.long)
        most = int(batch.turn_N.max()) + 1 if len(batch.turn_N) else 1
        key_N = (
            torch.repeat_interleave(domains_B, torch.tensor(batch.trained_lengths, dtype=torch.long)) * most
            + batch.turn_N
        )
        columns = (kl_N, torch.where(fresh_N, gap_N, 0.0), ~fresh_N)
        kls, gaps, stale = (torch.bincount(key_N, weights=column.double()).tolist() for column in columns)
        for key, count in enumerate(torch.bincount(key_N).tolist()):
            if count:
                name = (names[key // most], key % most)
                row = TurnStats(tokens=count, kl_sum=kls[key], gap_sum=gaps[key], stale_tokens=round(stale[key]))
                add_to_sums(self.turns, name, row)
