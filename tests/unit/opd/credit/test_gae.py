"""Advantages along an episode: against sums written out, over segments, sub-agents, gaps and cuts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opd.credit.episodes import Episode, group_into_episodes
from opd.credit.gae import CUT_REASONS, GaeSpec, compute_credit, compute_gae, adaptive_lambda, split_into_lines
from tests.credit import chain, segment

RNG = np.random.default_rng(0)


def some_values(episode: Episode) -> dict[str, np.ndarray]:
    """[N + 1] of each segment."""
    rng = np.random.default_rng(len(episode.segments))
    return {s.sample_id: rng.normal(size=s.num_trained + 1).astype(np.float32) for s in episode.segments}


def by_brute_force(values: list[float], outcome: float, gamma: float, lam: float) -> list[float]:
    """The double sum, with every temporal difference written out."""
    num = len(values)
    deltas = []
    for t in range(num):
        reward = outcome if t == num - 1 else 0.0
        after = values[t + 1] if t < num - 1 else 0.0
        deltas.append(reward + gamma * after - values[t])
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, num)) for t in range(num)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.0), (0.9, 0.8), (1.0, 0.95)])
def test_gae_is_its_double_sum(gamma: float, lam: float) -> None:
    value_N = RNG.normal(size=7)
    found = compute_gae(value_N, 0.7, gamma, lam)
    assert found == pytest.approx(by_brute_force(value_N.tolist(), 0.7, gamma, lam))


def test_credit_over_three_segments_is_the_double_sum_over_all_sampled_tokens() -> None:
    """Masks of every kind, a summary at the end of each segment, another discount than 1."""
    episode = chain("aaooaa", "aoma", "aa", reward=0.3)
    values = some_values(episode)
    spec = GaeSpec(gamma=0.97, critic_lambda=0.5)
    found = compute_credit(episode, values, spec)
    flat = [float(v) for s in episode.segments for v in values[s.sample_id][:-1]]
    assert len(flat) == 8
    lam = 1 - 1 / (1.5 * 8)
    wanted = by_brute_force(flat, 0.3, 0.97, lam)
    assert np.concatenate([found.advantages[s.sample_id] for s in episode.segments]) == pytest.approx(wanted, abs=1e-6)
    wanted = [v + a for v, a in zip(flat, by_brute_force(flat, 0.3, 0.97, 0.5), strict=True)]
    assert np.concatenate([found.returns[s.sample_id] for s in episode.segments]) == pytest.approx(wanted, abs=1e-6)
    assert [len(found.advantages[s.sample_id]) for s in episode.segments] == [s.num_trained for s in episode.segments]


def test_the_end_reaches_a_segment_with_the_discount_of_all_later_trained_tokens() -> None:
    """CompactionRL's rule: (gamma lambda)^N_after times what the segment's own place gives."""
    episode = chain("aaoa", "aam", "aoaa")
    gamma, lam = 0.99, 0.9
    spec = GaeSpec(gamma=gamma, policy_lambda=lam)
    values = some_values(episode)
    more = Episode(episode.segments, episode.reward + 1)
    low, high = compute_credit(episode, values, spec).advantages, compute_credit(more, values, spec).advantages
    after = {"e": 5, "e+1": 3, "e+2": 0}
    for part in episode.segments:
        inside = (gamma * lam) ** np.arange(part.num_trained - 1, -1, -1)
        gained = high[part.sample_id] - low[part.sample_id]
        assert gained == pytest.approx((gamma * lam) ** after[part.sample_id] * inside, abs=1e-6)


def test_at_lambda_one_an_advantage_is_the_outcome_less_the_value() -> None:
    episode = chain("aao", "aa", reward=0.25)
    values = some_values(episode)
    found = compute_credit(episode, values, GaeSpec(policy_lambda=1.0))
    for name, advantage_N in found.advantages.items():
        assert advantage_N + values[name][:-1] == pytest.approx(0.25, abs=1e-6)
        assert found.returns[name] == pytest.approx(0.25, abs=1e-6)


def test_lambda_goes_by_trained_tokens() -> None:
    assert [adaptive_lambda(num) for num in (1, 2, 100)] == pytest.approx([1 / 3, 2 / 3, 1 - 1 / 150])
    assert adaptive_lambda(0) == pytest.approx(1 / 3)


# Cuts


@pytest.mark.parametrize("stop", sorted(CUT_REASONS))
def test_an_episode_that_was_cut_goes_on_with_the_value_at_the_cut(stop: str) -> None:
    episode = chain("aa", "aoa", reward=0.0, stop_reason=stop)
    values = some_values(episode)
    at_cut = float(values["e+1"][-1])
    found = compute_credit(episode, values, GaeSpec(gamma=0.9))
    flat = [*values["e"][:-1].tolist(), *values["e+1"][:-1].tolist()]
    wanted = by_brute_force(flat, 0.9 * at_cut, 0.9, adaptive_lambda(4))
    assert np.concatenate([found.advantages[n] for n in ("e", "e+1")]) == pytest.approx(wanted, abs=1e-6)
    failed = compute_credit(episode, values, GaeSpec(gamma=0.9, bootstrap=frozenset())).advantages["e+1"]
    assert failed[-1] == pytest.approx(-values["e+1"][1], abs=1e-6)


@pytest.mark.parametrize(
    ("stop", "reward"), [("done", 0.0), ("turns", 0.0), ("stop", 0.0), ("length", 0.5), ("tokens", -1.0)]
)
def test_an_outcome_that_is_known_is_not_replaced(stop: str, reward: float) -> None:
    """A value on top of a reward would feed itself: right answers that are always cut would be worth 2, then 3."""
    episode = chain("aa", reward=reward, stop_reason=stop)
    found = compute_credit(episode, some_values(episode), GaeSpec())
    assert found.returns["e"] == pytest.approx([reward, reward], abs=1e-6)


# Lines


def branching() -> Episode:
    """A segment that starts a sub-agent, which is compacted; then the first is compacted, and forked."""
    (found,) = group_into_episodes(
        [
            segment("aaoa"),
            segment("aa", 1, origin="sub_agent", parent="e"),
            segment("a", 2, origin="summary", parent="e+1"),
            segment("aa", 3, origin="summary", parent="e"),
            segment("a", 4, parent="e+3"),
        ]
    )
    return found


def test_a_sub_agent_is_a_line_of_its_own_and_compaction_goes_on_in_its_line() -> None:
    names = [[s.sample_id for s in line] for line in split_into_lines(branching())]
    assert names == [["e", "e+3", "e+4"], ["e+1", "e+2"]]


def test_a_dialogue_beside_one_that_goes_on_takes_nothing_of_its_reward() -> None:
    """An agent's program asks another question between two turns; then the first dialogue ends with the answer."""
    (episode,) = group_into_episodes(
        [segment("aaoaa"), segment("aaa", 1, origin="aside", parent="e"), segment("a", 2, parent="e+1")]
    )
    assert [[s.sample_id for s in line] for line in split_into_lines(episode)] == [["e"], ["e+1", "e+2"]]
    values = some_values(episode)
    found = compute_credit(episode, values, GaeSpec(policy_lambda=0.0))
    for name in ("e", "e+2"):
        assert found.advantages[name][-1] + values[name][-2] == pytest.approx(1.0)


def test_sub_agents_share_the_outcome_and_nothing_of_the_line_that_started_them() -> None:
    episode = branching()
    values = some_values(episode)
    found = compute_credit(episode, values, GaeSpec())
    for line, num in ((("e", "e+3", "e+4"), 6), (("e+1", "e+2"), 3)):
        flat = [float(v) for name in line for v in values[name][:-1]]
        assert len(flat) == num
        wanted = by_brute_force(flat, 1.0, 1.0, adaptive_lambda(num))
        assert np.concatenate([found.advantages[name] for name in line]) == pytest.approx(wanted, abs=1e-6)


def test_a_cut_ends_every_line_with_the_value_of_the_episodes_own_line() -> None:
    (episode,) = group_into_episodes(
        [replace(part, reward=0.0, stop_reason="context") for part in branching().segments]
    )
    values = some_values(episode)
    found = compute_credit(episode, values, GaeSpec())
    assert found.returns["e+2"] == pytest.approx(values["e+4"][-1:], abs=1e-6)


def test_segments_without_a_trained_token_are_passed_over() -> None:
    episode = chain("aa", "mo", "a")
    values = some_values(episode)
    found = compute_credit(episode, values, GaeSpec())
    whole = compute_credit(chain("aa", "a"), {"e": values["e"], "e+1": values["e+2"]}, GaeSpec())
    assert found.advantages["e"].tolist() == whole.advantages["e"].tolist()
    assert found.advantages["e+1"].tolist() == []
