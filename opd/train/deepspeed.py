"""The trainer as the driver sees it: N DeepSpeed ranks in Ray actors, called together."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from opd import cluster
from opd.cluster import Pending
from opd.config.objectives import ObjectiveConfig
from opd.models.buckets import WeightStream
from opd.records.rewards import PolicyReport, RewardStep
from opd.records.sums import sum_by_key
from opd.records.types import Rollout, StepReport, TeacherPrompts
from opd.stream.schema import read_stream
from opd.stream.targets import TargetStream
from opd.traces.selection import watched_samples
from opd.train.batch import DIVERGENCE, POLICY, gather_samples, leave_one_out_baselines
from opd.train.components import Component
from opd.train.direct_source import RanksSource
from opd.train.feed import Feed
from opd.train.policy import make_policy_component
from opd.train.rank import RankOptions, RankResult, RankWork, TrainerRank
from opd.train.ranks import Ranks, RanksSpec
from opd.train.schedule import LearningRate
from opd.train.totals import RankPolicy, mean_drift, mean_gap, refuse_gap, refuse_impossible_means, weigh_rows
from opd.train.turns import count_earlier_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec(RanksSpec):
    """The settings that a trainer is started with."""

    rank: RankOptions
    """Settings of every rank; there are `rank.world_size` ranks."""
    rate: LearningRate
    """Learning rate as a function of the step."""
    domain_weights: Mapping[str, float]
    """Domain -> loss weight of its tokens; 1 for a domain that is not named."""
    teacher_prompts: Mapping[str, Mapping[str, TeacherPrompts]] = field(default_factory=dict)
    """Teacher on the student's base with prompts of its own -> domain -> what it reads there."""
    weighs_turns: bool = False
    """True if ranks weigh tokens by their turns, as `rank.turn_weights` says."""
    queue_bytes: int
    """Most bytes of scored rows that may wait for the trainer."""
    tolerance: float
    """Largest mean |trainer - engine| log-prob of a step's sampled tokens, nats; the run stops at a larger one."""


class DeepSpeedTrainer(Ranks[TrainerRank]):
    """Implements `opd.interfaces.Trainer`."""

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__(TrainerRank, spec.rank, spec, "trainer")
        self._spec = spec
        self._objective = spec.rank.objective
        self._direct = RanksSource(self._ranks, spec.rank.model_dir.absolute(), self._timeout_s)

    def train_step(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        targets: TargetStream,
        stale: frozenset[str] = frozenset(),
        reward: RewardStep | None = None,
    ) -> StepReport:
        """Take one optimiser step over all rows. A step in which no token is trained, or a critic learns alone, is skipped.

        Weights are computed from all rollouts, so that training can begin before it is known which ones are quarantined.
        Quarantined rollouts give no gradient; at the end the gradients are divided by the share of the weight that was scored.
        The divergence and the policy gradient each have a share of their own, because not every token is in both.
        Raises: RunError if a rank fails or the step's numbers are impossible.
        """
        step_work = self._make_step_work(step, rollouts, stale, reward)
        skipped = StepReport(
            step=step, loss=0.0, grad_norm=0.0, lr=step_work.lr, logprob_gap=0.0, domains={}, skipped=True
        )  # fmt: skip
        if not step_work.components:
            targets.wait_for_parts()
            targets.wait_for_sinks()
            return skipped
        plan = self.plan_micro_batches(rollouts)
        scoring = self._spec.rank.base_scoring
        rounds = scoring.plan_rounds(plan, rollouts) if scoring else {}
        baselined = {r.domain for r in rollouts if self._objective_of(r.domain).wants_baseline}
        baselines = compute_baselines(targets, baselined) if baselined else None
        step_work = replace(
            step_work,
            baselines=baselines,
            base_rounds=rounds,
            teacher_prompts=read_teacher_prompts(self._spec.teacher_prompts, rollouts),
        )
        for rank, part in zip(self._ranks, plan, strict=True):
            rank.submit(TrainerRank.begin_step, step_work.select_micro_batches(part), dict(targets.heads))
        # Ranks that share rows get the same parts.
        feed = Feed(targets, plan[:: self._sharing], queue_bytes=self._spec.queue_bytes)
        scored_share = partial(_scored_share, rollouts)
        weights = step_work.components[DIVERGENCE].weights
        trains = self._accumulate_all(feed, len(plan[0]), targets, partial(scored_share, weights))
        targets.wait_for_sinks()
        if not trains:
            return skipped
        left_out = targets.quarantined
        # Weights by turn may depend on the divergence, so their sum over all ranks is known only after the last micro-batch.
        turns = self._spec.weighs_turns
        share = math.fsum(self._call(TrainerRank.sum_weights)) if turns else scored_share(weights, left_out)
        other_shares = {
            name: scored_share(term.weights, left_out)
            for name, term in step_work.components.items()
            if name != DIVERGENCE
        }
        if other_shares and left_out:
            self._rescale(len(plan[0]), share, other_shares)
        companion_shares = {name: scored_share(term.weights, left_out) for name, term in step_work.companions.items()}
        readings = self._call(TrainerRank.step_companions, companion_shares)[0] if companion_shares else {}
        report = _make_step_report(step, step_work.lr, self._call(TrainerRank.finish_step, share))
        self._refuse_broken(report)
        return replace(
            report,
            early_micro_batches=feed.early,
            waited_s=feed.waited_s,
            peak_bytes=feed.peak_bytes,
            companions=readings,
        )

    def _accumulate_all(
        self, feed: Feed, rounds: int, targets: TargetStream, scored_share: Callable[[Collection[str]], float]
    ) -> bool:
        """Have the ranks train every round of micro-batches. A round is one micro-batch on every rank.

        If no sample could be scored, returns False without the last round, else True. `scored_share` takes the samples that
        are left out, and returns the share of the weight that was scored. Raises: RunError if a rank fails.
        """
        running: deque[tuple[int, list[Pending[None]]]] = deque()

        def finish_oldest() -> bool:
            if not running:
                return False
            index, pending = running.popleft()
            cluster.wait_for_all(pending, timeout_s=self._timeout_s)
            feed.mark_trained(index)
            return True

        # Rounds run while this loop fetches more rows. It waits for a round only if the queue is full (`Feed.send_rows`), and
        # at the end of the step.
        for index in range(rounds):
            handles = feed.send_rows(index, finish_oldest)
            left_out = frozenset(targets.quarantined)
            # The last round has waited for all rows, so that `left_out` is complete.
            if index == rounds - 1 and not scored_share(left_out):
                return False
            pending = [
                rank.submit(TrainerRank.accumulate_micro_batch, index, left_out, *handles_of_rank)
                for rank, handles_of_rank in zip(self._ranks, self._repeat_for_ranks(handles), strict=True)
            ]
            running.append((index, pending))
        while finish_oldest():
            pass
        return True

    def _rescale(self, rounds: int, share: float, own_shares: Mapping[str, float]) -> None:
        """Make every component beside the divergence a mean over the samples that were scored.

        The optimiser divides all gradients by `share`, which is the divergence's. A component has to be divided by its own
        share, so the ranks add its gradients a second time, times share / own share - 1. Raises: RunError if a rank fails.
        """
        more = {name: share / own - 1 if own else 0.0 for name, own in own_shares.items()}
        for index in range(rounds):
            self._call(TrainerRank.rescale, index, more)

    def _make_step_work(
        self, step: int, rollouts: Sequence[Rollout], stale: frozenset[str], reward: RewardStep | None
    ) -> RankWork:
        """Return the work of all ranks, not divided into micro-batches yet; `components` is empty if no token is trained."""
        policy = make_policy_component(reward, rollouts, self._spec.domain_weights)
        critic_learns_alone = reward is not None and reward.waits
        has_policy_gradient = policy is not None and policy.factor > 0
        trains = not critic_learns_alone and (has_policy_gradient or self._objective.HAS_DIVERGENCE)
        weights = self._weigh_divergence(rollouts) if trains else {}
        components = {DIVERGENCE: Component(weights=weights)} if weights else {}
        if policy and components:
            components[POLICY] = policy
        tokens = Component(weights=weigh_rows(rollouts, "token_mean", {}))
        return RankWork(
            step=step,
            lr=self._spec.rate.rate_at_step(step),
            micro_batches=(),
            components=components,
            companions={spec.name: tokens for spec in self._spec.rank.companions},
            compare=reward is not None and reward.compare and POLICY in components,
            stale=stale,
            first_turns=count_earlier_turns(rollouts),
            watched=watched_samples(rollouts),
        )

    def _objective_of(self, domain: str) -> ObjectiveConfig:
        return self._spec.rank.domain_objectives.get(domain, self._objective)

    def _weigh_divergence(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return sample id -> weight of each of its trained tokens in the divergence; empty if nothing is trained.

        A token has the weight that it would have if its domain's objective were that of all domains. So a domain's gradient does not
        depend on the other domains' objectives.
        """
        ways = {self._objective_of(rollout.domain).weighting for rollout in rollouts}
        weights = {way: weigh_rows(rollouts, way, self._spec.domain_weights) for way in ways}
        if not all(weights.values()):
            return {}
        return {r.sample_id: weights[self._objective_of(r.domain).weighting][r.sample_id] for r in rollouts}

    def _refuse_broken(self, report: StepReport) -> None:
        """Refuse a step whose numbers are impossible. An estimate from sampled tokens may be negative, so its mean is not checked.

        Raises: RunError.
        """
        for domain, stats in report.domains.items():
            objective = self._objective_of(domain)
            if not objective.IS_ESTIMATE:
                refuse_impossible_means(report.step, objective.kind, {domain: stats})
        refuse_gap(report.step, report.domains, self._spec.tolerance)

    def begin_logprobs(self, token_ids: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        pending = self._submit_to_all(TrainerRank.logprobs, token_ids)
        return lambda: cluster.wait_for_all(pending, timeout_s=self._timeout_s)[0]

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs of `begin_logprobs`, once they are computed."""
        return self.begin_logprobs(token_ids)()

    def export(self, path: Path) -> None:
        self._call(TrainerRank.export, path)

    def export_changed(self, path: Path) -> Path | None:
        complete = self._call(TrainerRank.export, path, only_changed=True)
        return None if all(complete) else self._spec.rank.model_dir

    def stream_changed(self, nbytes: int) -> WeightStream:
        (complete, count), *_ = self._call(TrainerRank.begin_stream, nbytes)
        node = self._ranks[0].node_id().wait_for_result(timeout_s=self._timeout_s)
        model_dir = self._spec.rank.model_dir.absolute()
        return WeightStream(model_dir=model_dir, whole=complete, buckets=self._iterate_buckets(count), node=node)

    def _iterate_buckets(self, count: int) -> Iterator[Any]:
        """Yield a handle to each bucket of a stream; the ranks gather the next bucket meanwhile.

        Raises: what `cluster.wait_for_all` raises.
        """
        gathering = self._submit_to_all(TrainerRank.gather_bucket)
        for remaining in reversed(range(count)):
            cluster.wait_for_all(gathering, timeout_s=self._timeout_s)
            handle = self._ranks[0].submit(TrainerRank.take_bucket).handle
            if remaining:
                gathering = self._submit_to_all(TrainerRank.gather_bucket)
            yield handle

    def direct_source(self, nbytes: int, *, keeps: bool) -> RanksSource:
        self._direct.begin(nbytes, keeps=keeps, stream=partial(self.stream_changed, nbytes))
        return self._direct

    def companion_weights(self, name: str) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = self._call(TrainerRank.companion_weights, name)[0]
        return weights

    def export_companions(self, path: Path) -> None:
        self._call(TrainerRank.export_companions, path)

    def export_adapter(self, path: Path) -> None:
        self._call(TrainerRank.export_adapter, path)


def read_teacher_prompts(
    prompts: Mapping[str, Mapping[str, TeacherPrompts]], rollouts: Sequence[Rollout]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return `RankWork.teacher_prompts` for the samples of a step. `prompts`: `TrainerSpec.teacher_prompts`."""
    return {
        name: {r.sample_id: by_domain[r.domain](r) for r in rollouts if r.domain in by_domain}
        for name, by_domain in prompts.items()
    }


def compute_baselines(targets: TargetStream, domains: Collection[str]) -> dict[str, float]:
    """Wait for all parts, and return sample id -> `leave_one_out_baselines` baseline, for the samples of these domains.

    The driver computes it over the samples of all ranks, so that it does not depend on the number of ranks. Quarantined samples
    have none. Raises: what `TargetStream.take_part` raises.
    """
    targets.wait_for_parts()
    rows = (row for part in targets.collected for row in read_stream(pa.py_buffer(targets.read_part(part))).rows)
    return leave_one_out_baselines(
        gather_samples(
            row for row in rows if row.rollout.domain in domains and row.rollout.sample_id not in targets.quarantined
        )
    )


def _scored_share(rollouts: Sequence[Rollout], weights: Mapping[str, float], left_out: Collection[str]) -> float:
    """Return the share of the trained tokens' weight that is on scored tokens, 0..1; exactly 1 if no sample was left out.

    `weights`: sample id -> weight of each of its trained tokens; other samples have none. `left_out`: samples without scores.
    """
    if not left_out:
        return 1.0
    weight_by_sample = {r.sample_id: weights[r.sample_id] * r.num_trained for r in rollouts if r.sample_id in weights}
    return sum(weight for i, weight in weight_by_sample.items() if i not in left_out) / sum(weight_by_sample.values())


def _make_step_report(step: int, lr: float, results: Sequence[RankResult]) -> StepReport:
    """Add up the results of all ranks. The gradient's norm is the same on every rank."""
    domains = sum_by_key(result.domains for result in results)
    indexer_losses = [result.indexer_loss for result in results if result.indexer_loss is not None]
    return StepReport(
        step=step,
        loss=sum(r.loss for r in results),
        grad_norm=results[0].grad_norm,
        lr=lr,
        logprob_gap=mean_gap(domains),
        drift=mean_drift(domains),
        domains=dict(sorted(domains.items())),
        positions=dict(sorted(sum_by_key(result.positions for result in results).items())),
        turns=dict(sorted(sum_by_key(result.turns for result in results).items())),
        token_losses=_join_token_losses(results),
        policy=_make_policy_report([r.policy for r in results if r.policy is not None]),
        indexer_loss=sum(indexer_losses) if indexer_losses else None,
    )


def _join_token_losses(results: Sequence[RankResult]) -> dict[str, tuple[float, ...]]:
    """Return sample id -> the losses of its trained tokens. Of ranks that share a row, the first has its first tokens."""
    joined: dict[str, tuple[float, ...]] = defaultdict(tuple)
    for result in results:
        for sample_id, losses in result.token_losses.items():
            joined[sample_id] += losses
    return dict(joined)


def _make_policy_report(results: Sequence[RankPolicy]) -> PolicyReport | None:
    """Add up the policy gradient's numbers of all ranks; None without a policy gradient."""
    if not results:
        return None
    domains = sum_by_key(result.domains for result in results)
    compared = [result.compared for result in results if result.compared is not None]
    weight = sum(result.weight for result in results)
    return PolicyReport(
        loss=sum(result.loss for result in results) / weight if weight else 0.0,
        domains=dict(sorted(domains.items())),
        compared=reduce(add, compared) if compared else None,
    )
