"""The driver's part of a policy gradient: every rank gets what is its own, of weights that are the whole step's."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from opd.config import PipelineConfig
from opd.records.rewards import GradientSums, PolicyStats, RewardStep
from opd.train import deepspeed
from opd.train.policy import RankPolicy
from opd.train.rank import RankResult
from pipelines.specs import trainer_spec
from tests.unit.opd.train.test_rank import FakeRank, Targets, config, rollout


class PolicyRank(FakeRank):
    """Says something of the policy gradient where it was asked for one."""

    def __init__(self, options: Any, index: int) -> None:
        super().__init__(options, index)
        self.rescaled: list[tuple[int, float]] = []

    def rescale_policy(self, index: int, more: float) -> None:
        assert len(self.rounds) == len(self.works[-1][0].micro_batches), "after the last micro-batch"
        self.rescaled.append((index, more))

    def finish_step(self, share: float) -> RankResult:
        work, _ = self.works[-1]
        found = super().finish_step(share)
        if work.policy is None:
            return found
        sums = PolicyStats(tokens=2, loss_sum=1.0, masked=1)
        compared = GradientSums(divergence_sq=1.0, policy_sq=1.0, dot=0.5) if work.policy.compare else None
        weight = sum(work.policy.weights[i] * 2 for i in work.policy.weights)
        return dataclasses.replace(
            found, policy=RankPolicy(loss=0.5 * weight, weight=weight, domains={"d": sums}, compared=compared)
        )


def reward(*ids: str, **changes: Any) -> RewardStep:
    advantages = {i: np.full(2, ord(i), np.float32) for i in ids}
    return RewardStep(**{"weight": 0.5, "advantages": advantages} | changes)


def works(in_process: Any) -> list[Any]:
    return [work for fake in in_process.workers for work, _ in fake.works]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_are_the_whole_steps_whatever_the_ranks(ranks: int, in_process: Any) -> None:
    in_process.replace = PolicyRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(ranks=ranks), 9))
    rollouts = [rollout(i) for i in "abc"]
    report = trainer.train_step(1, rollouts, Targets(*"abc"), frozenset(), reward(*"ac", compare=True))  # type: ignore[arg-type]
    found = works(in_process)
    assert {i: w for work in found for i, w in work.policy.weights.items()} == pytest.approx({"a": 0.25, "c": 0.25})
    for work in found:
        mine = {i for ids in work.micro_batches for i in ids}
        assert set(work.policy.weights) == set(work.policy.advantages) == mine & {"a", "c"}
        assert all((work.policy.advantages[i] == ord(i)).all() for i in work.policy.advantages)
        assert (work.policy.weight, work.policy.compare) == (0.5, True)
    assert report.policy is not None and report.policy.loss == pytest.approx(0.5)
    assert report.policy.compared is not None and report.policy.compared.dot == 0.5 * ranks
    assert report.loss == 0.5 * ranks, "the divergence alone"


@pytest.mark.parametrize(
    ("broken", "more"),
    [
        ("c", (2 / 3) / 1 - 1),  # it has no reward: the policy gradient lost nothing
        ("a", (2 / 3) / (1 / 2) - 1),
        ("ab", 0.0),  # nothing is left of the policy gradient
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_policy_gradient_is_divided_by_its_own_share(broken: str, more: float, ranks: int, in_process: Any) -> None:
    in_process.replace = PolicyRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(ranks=ranks, micro_batch_tokens=16), 9))
    targets: Any = Targets(*"abc", broken=tuple(broken))
    rollouts = [dataclasses.replace(rollout(i), prompt_ids=(1,) * 8) for i in "abc"]
    report = trainer.train_step(1, rollouts, targets, frozenset(), reward(*"ab"))
    share = 1 - len(broken) / 3
    for fake in in_process.workers:
        assert fake.share == pytest.approx(share)
        assert len(fake.rounds) == 2
        assert [index for index, _ in fake.rescaled] == list(range(len(fake.rounds)))
        assert [found for _, found in fake.rescaled] == pytest.approx([more] * len(fake.rounds))
    assert not report.skipped


def test_where_all_was_scored_no_policy_gradient_is_added_twice(in_process: Any) -> None:
    in_process.replace = PolicyRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(), 9))
    trainer.train_step(1, [rollout(i) for i in "abc"], Targets(*"abc"), frozenset(), reward(*"ab"))  # type: ignore[arg-type]
    targets: Any = Targets(*"abc", broken=("c",))
    trainer.train_step(2, [rollout(i) for i in "abc"], targets)
    assert [fake.rescaled for fake in in_process.workers] == [[], []]


def test_without_a_reward_ranks_hear_of_none(in_process: Any) -> None:
    in_process.replace = PolicyRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(), 9))
    report = trainer.train_step(1, [rollout("a"), rollout("b")], Targets("a", "b"))  # type: ignore[arg-type]
    assert report.policy is None and all(work.policy is None for work in works(in_process))


@pytest.mark.parametrize(("kind", "trains"), [("none", False), ("reverse_kl", True)])
def test_a_step_without_advantages_trains_what_is_left(kind: str, trains: bool, in_process: Any) -> None:
    in_process.replace = PolicyRank
    data = config().model_dump(mode="json")
    if kind == "none":
        data |= {"experts": {}, "teachers": {"engine": "none"}, "objective": {"kind": "none", "reward": {}}}
        data["domains"] = {"d": {"prompts": "p", "eval": {"holdout": 0.5}}}
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(PipelineConfig.model_validate(data), 9))
    targets: Any = Targets("a", "b")
    report = trainer.train_step(1, [rollout("a"), rollout("b")], targets, frozenset(), reward())
    assert report.skipped is not trains and targets.arrived, "AdamW must not decay weights for nothing"
    assert len(works(in_process)) == (2 if trains else 0)
    if kind == "none":
        weightless = trainer.train_step(1, [rollout("a")], Targets("a"), frozenset(), reward("a", weight=0.0))  # type: ignore[arg-type]
        assert weightless.skipped, "a schedule of the weight begins or ends at 0"
        rewarded = trainer.train_step(1, [rollout("a")], Targets("a"), frozenset(), reward("a"))  # type: ignore[arg-type]
        assert not rewarded.skipped


def test_while_a_critic_is_cold_no_optimiser_step_is_taken(in_process: Any) -> None:
    """A base that teaches its own copy differs from it by rounding alone, and AdamW scales that up to whole steps."""
    in_process.replace = PolicyRank
    trainer = deepspeed.DeepSpeedTrainer(trainer_spec(config(), 9))
    targets: Any = Targets("a", "b")
    cold = RewardStep(weight=0.0, advantages={}, waits=True)
    report = trainer.train_step(1, [rollout("a"), rollout("b")], targets, frozenset(), cold)
    assert report.skipped and targets.arrived and not works(in_process)
    warm = trainer.train_step(2, [rollout("a"), rollout("b")], Targets("a", "b"), frozenset(), reward("a"))  # type: ignore[arg-type]
    assert not warm.skipped and works(in_process)
