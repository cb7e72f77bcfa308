"""Rewards in a step: responses are judged before they are logged, and credit is given before the optimiser steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from opd.loop import Components, run
from opd.records.rewards import DomainReward, PolicyReport, PolicyStats, RewardRecord, RewardStep
from opd.records.types import Prompt, Rollout, RolloutBatch, StepReport
from tests.unit.opd.test_loop import PROMPTS, Events, plan

REPORT = PolicyReport(loss=0.25, domains={"a": PolicyStats(tokens=3, loss_sum=0.75, masked=1)})


@dataclass
class Rewarded(Events):
    """The parts of `Events`, with rewards."""

    asked: RewardStep | None = None

    def judged(self, batch: RolloutBatch, prompts: Sequence[Prompt]) -> RolloutBatch:
        assert list(prompts) == PROMPTS
        self.seen.append("judge")
        return replace(batch, rollouts=tuple(replace(r, reward=0.5) for r in batch.rollouts))

    def record(self, *given: Any) -> Any:
        if isinstance(given[0], int):  # the target log's
            _, _, _, batch, _ = given
            assert {r.reward for r in batch.rollouts} == {0.5}, "the log holds rewards: a replay does not judge again"
            return super().record(*given)
        rollouts, trained = given
        assert trained is REPORT
        return RewardRecord(weight=2.0, loss=trained.loss, domains={"a": DomainReward(episodes=len(rollouts))})

    def train_step(
        self, step: int, rollouts: Sequence[Rollout], targets: Any, stale: frozenset[str], reward: Any = None
    ) -> StepReport:
        assert reward is self.asked is not None
        return replace(super().train_step(step, rollouts, targets, stale), policy=REPORT)

    def load(self, checkpoint: Path) -> None: ...

    def parts(self) -> Components:
        rewards: Any = Credited(self)
        return replace(super().parts(), rewards=rewards)


class Credited:
    """The same object under the protocol of rewards, whose `step` is not a sink's."""

    def __init__(self, events: Rewarded) -> None:
        self._events = events
        self.judged, self.record, self.load = events.judged, events.record, events.load

    def step(self, step: int, rollouts: Sequence[Rollout]) -> RewardStep:
        self._events.seen.append(f"credit {step}")
        self._events.asked = RewardStep(weight=2.0, advantages={r.sample_id: np.ones(3) for r in rollouts})
        return self._events.asked


def test_responses_are_judged_before_anybody_sees_them_and_credit_comes_before_the_update() -> None:
    events = Rewarded()
    run(events.parts(), plan(last_step=1))
    told = [line for line in events.seen if line.split()[0] in ("generate", "judge", "score", "log", "credit", "train")]
    assert told == ["generate 1 v0", "judge", "score 000001/a/0", "log 1", "credit 1", "train 1"]
    (record,) = events.records
    assert record["reward"]["loss"] == 0.25 and record["loss"] == 0.5, "two streams, never one sum"
    assert "credit" in record["phase_s"]


def test_a_replayed_step_is_not_judged_again_but_its_credit_is_given_again() -> None:
    events = Rewarded(logged=frozenset({1}))
    run(events.parts(), plan(last_step=2))
    assert events.of("judge") == ["judge"]
    assert events.of("credit") == ["credit 1", "credit 2"]


def test_without_rewards_a_record_has_no_key_of_them() -> None:
    events = Events()
    run(events.parts(), plan(last_step=1))
    assert "reward" not in events.records[0] and "credit" not in events.records[0]["phase_s"]
