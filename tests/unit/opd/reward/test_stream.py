"""The reward in a step: who takes part, how much it weighs, and what is recorded of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from opd.config.reward import RewardConfig
from opd.credit.ema import EmaCredit
from opd.credit.interfaces import StepCredit
from opd.credit.leave_one_out import LeaveOneOut
from opd.records.json_fields import make_record
from opd.records.rewards import GradientSums, PolicyReport, PolicyStats, RewardRecord
from opd.records.types import Prompt, Rollout, RolloutBatch
from opd.reward.stream import RewardStream
from opd.reward.verified import VerifiedRewards
from opd.verifiers.exact import ExactMatch
from tests.rows import make_rollout
from tests.steps import Letters


def rollout(name: str, domain: str = "a", **more: Any) -> Rollout:
    return make_rollout(
        sample_id=name, step=1, domain=domain, prompt_ids=(1,), **{"response_ids": (1, 2), "reward": 1.0} | more
    )


def stream(credit: Any = None, *, domains: tuple[str, ...] = ("a",), **config: Any) -> RewardStream:
    verified = VerifiedRewards({"a": ExactMatch()}, Letters(), (), 5.0)
    return RewardStream(RewardConfig(**config), domains, verified, credit or LeaveOneOut())


def test_only_episodes_that_began_in_a_domain_that_takes_part_have_advantages() -> None:
    """A sub-agent's segment may lie in another domain, whose expert scores it; the reward is that of its episode."""
    rollouts = [
        rollout("e", reward=1.0), rollout("e.1", "b", episode="e", reward=1.0), rollout("f", reward=0.0),
        rollout("x", "b", reward=1.0), rollout("g", reward=None),
    ]  # fmt: skip
    asked = stream().step(1, rollouts)
    assert {i: list(values) for i, values in asked.advantages.items()} == {
        "e": [1.0, 1.0], "e.1": [1.0, 1.0], "f": [-1.0, -1.0],
    }  # fmt: skip


def test_an_episodes_reward_is_that_of_the_domain_where_it_began() -> None:
    made = stream()
    rollouts = [rollout("e", reward=0.5), rollout("e.1", "b", episode="e", reward=0.5)]
    made.step(1, rollouts)
    found = made.record(rollouts, trained()).domains
    assert (found["a"].episodes, found["a"].reward) == (1, 0.5)
    assert (found["b"].episodes, found["b"].tokens) == (0, 2), "its tokens are trained all the same"


def test_a_sub_agents_segment_is_not_judged_by_the_domain_that_scores_it() -> None:
    """`a` has a verifier, which would give the segment 0: it answers what the episode of `b` asked."""
    rollouts = (
        rollout("e", "b", response_ids=(1, 2), reward=1.0),
        rollout("e+1", "a", episode="e", group="e", response_ids=(9,), reward=1.0, origin="sub_agent", parent="e"),
        rollout("e+2", "a", episode="e", group="e", response_ids=(9,), reward=1.0, origin="summary", parent="e+1"),
    )
    made = stream(domains=("a", "b"))
    judged = made.judged(RolloutBatch(rollouts=rollouts, quarantined=()), []).rollouts
    assert [r.reward for r in judged] == [1.0, 1.0, 1.0]
    assert set(made.step(1, judged).advantages) == {"e", "e+1", "e+2"}
    assert {one.failed for one in made.record(judged, None).domains.values()} == {0}


def test_the_weight_is_a_function_of_the_step() -> None:
    linear = RewardConfig.model_validate({"weight": 2.0, "schedule": {"to": 0.5, "steps": 4}})
    assert [linear.weight_at(step) for step in (1, 2, 3, 4, 5, 99)] == [2.0, 1.5, 1.0, 0.5, 0.5, 0.5]
    assert [RewardConfig(weight=0.25).weight_at(step) for step in (1, 7)] == [0.25, 0.25]
    risen = stream(**linear.model_dump() | {"weight": 0.0})
    assert [risen.step(step, [rollout("e")]).weight for step in (1, 4)] == [0.0, 0.5]


def test_gradients_are_compared_every_so_often() -> None:
    assert [step for step in range(1, 8) if stream(compare_every=3).step(step, [rollout("e")]).compare] == [3, 6]
    assert not any(stream().step(step, [rollout("e")]).compare for step in range(1, 8))


class Cold:
    """A critic that explains nothing yet."""

    def assign(self, step: int, rollouts: Any) -> StepCredit:
        advantages = {r.sample_id: np.ones(r.num_trained, np.float32) for r in rollouts}
        return StepCredit(advantages=advantages, readings={"explained": -0.5}, warm=False)


def test_while_a_critic_is_cold_the_policy_gradient_waits() -> None:
    made = stream(Cold(), compare_every=1)
    asked = made.step(1, [rollout("e")])
    assert (asked.weight, dict(asked.advantages), asked.compare, asked.waits) == (0.0, {}, False, True)
    assert not stream().step(1, [rollout("e")]).waits
    record = made.record([rollout("e")], None)
    assert (record.weight, record.credit, record.domains["a"].reward) == (0.0, {"explained": -0.5}, 1.0)


def trained() -> PolicyReport:
    return PolicyReport(
        loss=0.75,
        domains={
            "a": PolicyStats(tokens=8, loss_sum=4.0, masked=2),
            "b": PolicyStats(tokens=2, loss_sum=5.0, masked=0),
        },
        compared=GradientSums(divergence_sq=4.0, policy_sq=9.0, dot=-3.0),
    )


def test_the_record_tells_both_streams_apart_and_survives_the_file() -> None:
    made = stream(domains=("a", "b"), weight=0.5)
    rollouts = [rollout("e", reward=1.0), rollout("e.1", episode="e", reward=1.0), rollout("f", reward=0.0)]
    rollouts += [rollout("x", "b", reward=0.25), rollout("z", "c", reward=9.0)]
    made.step(1, rollouts)
    record = made.record(rollouts, trained())
    assert (record.weight, record.loss, record.masked) == (0.5, 0.75, 0.2)
    a, b = record.domains["a"], record.domains["b"]
    assert (a.episodes, a.reward, a.tokens, a.loss, a.masked) == (2, 0.5, 8, 0.5, 0.25)
    assert (b.episodes, b.reward, b.loss) == (1, 0.25, 2.5)
    assert set(record.domains) == {"a", "b"}
    assert (record.cosine, record.divergence_norm, record.policy_norm) == (-0.5, 2.0, 3.0)
    data = json.loads(json.dumps(record.to_json()))
    assert make_record(RewardRecord, data) == record
    assert make_record(RewardRecord, data | {"of a newer release": 1}) == record
    assert "failed" not in data["domains"]["a"] and "error" not in data["domains"]["a"]
    assert not {"cosine", "divergence_norm"} & set(made.record(rollouts, None).to_json())


def test_a_gradient_of_zero_has_no_cosine() -> None:
    made = stream()
    nothing = PolicyReport(loss=0.0, domains={}, compared=GradientSums(divergence_sq=4.0, policy_sq=0.0, dot=0.0))
    record = made.record([], nothing)
    assert (record.cosine, record.divergence_norm, record.policy_norm) == (None, 2.0, 0.0)


def test_failures_are_those_of_the_step() -> None:
    made = stream()
    unfit = Prompt(id="a/0", domain="a", token_ids=(1,), answer="")
    batch = RolloutBatch(rollouts=(rollout("000001/a/0", group="000001/a/0", reward=None),), quarantined=())
    (given,) = made.judged(batch, [unfit]).rollouts
    assert given.reward == 0.0
    record = made.record([given], None)
    assert (record.domains["a"].failed, record.domains["a"].error) == (1, "ValueError: a/0: no `answer`")
    assert made.record([given], None).domains["a"].failed == 0, "a step that is replayed was not judged again"


def test_what_a_baseline_has_learned_goes_on_after_a_resume(tmp_path: Path) -> None:
    steps = [[rollout(f"{n}{i}", reward=float((n * i) % 3)) for i in range(3)] for n in range(1, 6)]
    whole = stream(EmaCredit(decay=0.5))
    want = [whole.step(n, rollouts) for n, rollouts in enumerate(steps, 1)]
    first, second = EmaCredit(decay=0.5), EmaCredit(decay=0.5)
    for n, rollouts in enumerate(steps[:2], 1):
        stream(first).step(n, rollouts)
    (tmp_path / "credit").mkdir()
    first.begin_save(tmp_path / "credit")
    assert first.saved(1.0)
    resumed = stream(second)
    resumed.load(tmp_path)
    for n, rollouts in enumerate(steps[2:], 3):
        found = resumed.step(n, rollouts)
        for name, advantages in want[n - 1].advantages.items():
            assert np.array_equal(found.advantages[name], advantages), "bit for bit"


def test_no_reward_at_all_asks_for_nothing() -> None:
    asked = stream().step(1, [rollout("e", reward=None)])
    assert dict(asked.advantages) == {}


def test_an_episode_that_earned_nothing_is_worth_0_and_one_that_broke_has_no_reward() -> None:
    """A game says something when it is won. If only those that were won counted, all rewards were 1 and nothing was learned."""
    rollouts = (
        rollout("e", reward=None, stop_reason="turns"), rollout("e.1", "b", episode="e", reward=None, stop_reason="turns"),
        rollout("f", reward=1.0, stop_reason="done"), rollout("g", reward=None, stop_reason="raised"),
        rollout("x", "b", reward=None, stop_reason="turns"), rollout("h", reward=0.0, stop_reason="timeout"),
        rollout("i", reward=0.5, stop_reason="raised"),
    )  # fmt: skip
    made = RewardStream(RewardConfig(), ["a"], VerifiedRewards({}, Letters(), (), 5.0), LeaveOneOut())
    judged = made.judged(RolloutBatch(rollouts=rollouts, quarantined=()), []).rollouts
    assert [r.reward for r in judged] == [0.0, 0.0, 1.0, None, None, None, None], (
        "a broken one that had won does not count alone"
    )
    assert {i: list(v) for i, v in made.step(1, judged).advantages.items()} == {
        "e": [-1.0, -1.0], "e.1": [-1.0, -1.0], "f": [1.0, 1.0],
    }  # fmt: skip
