"""A task small enough to list every episode with its probability: what is exact, the critic and the advantages must find.

segment 0   prompt  a1  o  a2        a1, a2, a3 are A or B, sampled by the policy; o is X or Y, by the environment
segment 1   prompt o a2  a3          (compacted: it knows what the reward rests on, and not a1)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.credit.critic import CriticCredit, CriticSpec
from opd.credit.episodes import Episode, group_into_episodes
from opd.credit.gae import GaeSpec, compute_credit
from opd.records.types import Rollout
from opd.train.critic import CriticEngineSpec
from opd.train.schedule import LearningRate
from tests.credit import PlainRank, critic_options, segment

A, B, X, Y = 10, 11, 20, 21
Context = tuple[int, ...]
"""Tokens that the policy sees, but for the prompt."""
CONTEXTS: list[Context] = [(), *product((A, B), (X, Y)), *((o, a, 0) for o, a in product((X, Y), (A, B)))]
"""Those before a1, before a2 and before a3; the last have a 0, for they are of another segment."""
CHANCE_OF_X = {A: 0.75, B: 0.25}
POLICY = dict(zip(CONTEXTS, (0.75, *[0.5] * 4, 0.25, 0.5, 0.75, 0.5), strict=True))
"""Probability of A: quarters, so that 128 episodes have every one as often as it is likely."""
REWARD = {(X, A): (0.9, 0.5), (X, B): (0.2, 0.4), (Y, A): (0.0, 0.4), (Y, B): (0.6, 1.0)}
"""Keys are o and a2; values with a3 = A, with a3 = B."""
NUM = 128


@dataclass(frozen=True)
class Way:
    """One way through the task."""

    a1: int
    o: int
    a2: int
    a3: int
    chance: float

    @property
    def reward(self) -> float:
        return REWARD[self.o, self.a2][(A, B).index(self.a3)]

    @property
    def steps(self) -> list[tuple[Context, int]]:
        """Return what the policy saw, and what it did."""
        return [((), self.a1), ((self.a1, self.o), self.a2), ((self.o, self.a2, 0), self.a3)]

    def segments(self, name: str, **columns: Any) -> list[Rollout]:
        first = segment(
            "aoa", episode=name, prompt_ids=(5, 6), response_ids=(self.a1, self.o, self.a2), next=f"{name}+1",
            reward=self.reward,
        )  # fmt: skip
        second = segment(
            "a", 1, episode=name, prompt_ids=(5, 30, self.o, self.a2), response_ids=(self.a3,), reward=self.reward,
            origin="summary", parent=name,
        )  # fmt: skip
        return [first, second]


def ways(policy: Mapping[Context, float]) -> list[Way]:
    found = []
    for a1, o, a2, a3 in product((A, B), (X, Y), (A, B), (A, B)):
        chance = CHANCE_OF_X[a1] if o == X else 1 - CHANCE_OF_X[a1]
        for context, action in Way(a1, o, a2, a3, 0.0).steps:
            chance *= policy[context] if action == A else 1 - policy[context]
        found.append(Way(a1, o, a2, a3, chance))
    return found


def true_values(policy: Mapping[Context, float]) -> dict[Context, float]:
    """Mean reward behind each context; also behind segment 0, by (a1, o, a2)."""
    sums: dict[Context, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for way in ways(policy):
        for context in ((), (way.a1, way.o), (way.a1, way.o, way.a2), (way.o, way.a2, 0)):
            sums[context][0] += way.chance * way.reward
            sums[context][1] += way.chance
    return {context: total / chance for context, (total, chance) in sums.items()}


def values_by_sample(way: Way, values: Mapping[Context, float], name: str = "e") -> dict[str, np.ndarray]:
    before = [values[context] for context, _ in way.steps]
    behind = values[way.a1, way.o, way.a2]
    return {
        name: np.array([before[0], before[1], behind], np.float32), f"{name}+1": np.array([before[2], 0.0], np.float32)
    }  # fmt: skip


def one_episode(way: Way) -> Episode:
    (found,) = group_into_episodes(way.segments("e"))
    return found


# The policy's gradient


def exact_gradient(policy: Mapping[Context, float]) -> dict[Context, float]:
    """Its entry for the logit of A in each context, from differences of the mean reward."""

    def mean_reward(moved: Context, by: float) -> float:
        share = policy[moved]
        logit = math.log(share / (1 - share)) + by
        changed = {**policy, moved: 1 / (1 + math.exp(-logit))}
        return sum(way.chance * way.reward for way in ways(changed))

    return {c: (mean_reward(c, 1e-5) - mean_reward(c, -1e-5)) / 2e-5 for c in policy}


def gradient_of(
    policy: Mapping[Context, float], values: Mapping[Context, float], spec: GaeSpec
) -> dict[Context, float]:
    """The mean of advantage times score over every episode, each as often as it is likely."""
    found = dict.fromkeys(policy, 0.0)
    for way in ways(policy):
        advantages = compute_credit(one_episode(way), values_by_sample(way, values), spec).advantages
        flat = [*advantages["e"], *advantages["e+1"]]
        for (context, action), advantage in zip(way.steps, flat, strict=True):
            found[context] += way.chance * float(advantage) * ((action == A) - policy[context])
    return found


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0, None])
def test_with_true_values_the_policys_gradient_is_exact_for_any_lambda(lam: float | None) -> None:
    found = gradient_of(POLICY, true_values(POLICY), GaeSpec(policy_lambda=lam))
    assert found == pytest.approx(exact_gradient(POLICY), abs=1e-6)
    assert max(map(abs, found.values())) > 0.01


def test_with_lambda_one_it_is_exact_whatever_the_critic_says() -> None:
    rng = np.random.default_rng(0)
    wrong = {context: float(rng.normal()) for context in true_values(POLICY)}
    assert gradient_of(POLICY, wrong, GaeSpec(policy_lambda=1.0)) == pytest.approx(exact_gradient(POLICY), abs=1e-6)
    biased = gradient_of(POLICY, wrong, GaeSpec(policy_lambda=0.0))
    assert biased != pytest.approx(exact_gradient(POLICY), abs=1e-2), "which the test above could not tell otherwise"


def cut_gradient(spec: GaeSpec) -> dict[Context, float]:
    """That of the contexts of segment 0, if every episode is cut behind it."""
    values, found = true_values(POLICY), {context: 0.0 for context in CONTEXTS if 0 not in context}
    for way in ways(POLICY):
        first, _ = way.segments("e")
        (cut,) = group_into_episodes([replace(first, reward=0.0, stop_reason="tokens", next=None)])
        advantage_N = compute_credit(cut, values_by_sample(way, values), spec).advantages["e"]
        for (context, action), advantage in zip(way.steps[:2], advantage_N, strict=True):
            found[context] += way.chance * float(advantage) * ((action == A) - POLICY[context])
    return found


def test_episodes_that_were_cut_teach_what_whole_ones_teach() -> None:
    exact = {context: slope for context, slope in exact_gradient(POLICY).items() if 0 not in context}
    assert cut_gradient(GaeSpec()) == pytest.approx(exact, abs=1e-6)
    failed = cut_gradient(GaeSpec(bootstrap=frozenset()))
    assert failed != pytest.approx(exact, abs=1e-2), "a cut that counts as a failure teaches another thing"


# The critic


def every_episode() -> list[tuple[Way, list[Rollout]]]:
    """128 episodes, every way as often as it is likely."""
    found = []
    for number, way in enumerate(ways(POLICY)):
        copies = way.chance * NUM
        assert copies == pytest.approx(round(copies))
        found += [(way, way.segments(f"{number}#{copy}")) for copy in range(round(copies))]
    assert len(found) == NUM
    return found


def test_the_critic_learns_the_true_value_of_every_state(tmp_path: Path, make_model_dir: Any, in_process: Any) -> None:
    in_process.replace = PlainRank
    model_dir = make_model_dir(tmp_path / "base", hidden=32, heads=1, layers=2)
    engine = CriticEngineSpec(
        rank=critic_options(model_dir),
        rate=LearningRate(peak=3e-3, steps=40, decay="cosine"), micro_batch_tokens=2048, share_prompts=True,
        start_timeout_s=60.0,
    )  # fmt: skip
    made = CriticCredit(CriticSpec(engine=engine, updates=10))
    made.wait_ready()
    assert made._engine.layout.layout == "shared"
    step_of_all = every_episode()
    rollouts = [r for _, segments in step_of_all for r in segments]
    found = [made.assign(step, rollouts) for step in range(1, 41)]
    values = made._engine.values(rollouts)
    truth = true_values(POLICY)
    for way, (first, second) in step_of_all:
        wanted = values_by_sample(way, truth, first.sample_id)
        assert values[first.sample_id][:2] == pytest.approx(wanted[first.sample_id][:2], abs=1e-2)
        assert values[second.sample_id][:1] == pytest.approx(wanted[second.sample_id][:1], abs=1e-2)
    returns = np.array([way.reward for way, segments in step_of_all for _ in range(3)])
    best = np.array([value for way, _ in step_of_all for value in (truth[c] for c, _ in way.steps)])
    assert found[-1].readings["value_loss"] == pytest.approx(((returns - best) ** 2).mean(), abs=1e-3)
    assert found[-1].readings["explained_variance"] == pytest.approx(
        1 - (returns - best).var() / returns.var(), abs=1e-2
    )
    assert not found[0].warm and found[-1].warm
