"""Defects of public critics. Each is a law that ours keeps, and the code that breaks it, kept here so that the law can fail.

An implementation gets the values of all states of an episode, those before observations too, as a critic's forward pass
gives them, and returns the advantages of the trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.credit.episodes import Episode
from opd.credit.gae import GaeSpec, adaptive_lambda, compute_credit, compute_gae
from opd.losses.value import value_loss
from tests.credit import chain

Values = Mapping[str, np.ndarray]
"""Sample id -> [R + 1] the value of the state before each response token, and behind the last."""
Implementation = Callable[[Episode, Values, GaeSpec], dict[str, np.ndarray]]
SPEC = GaeSpec(policy_lambda=0.9)


def ours(episode: Episode, values: Values, spec: GaeSpec) -> dict[str, np.ndarray]:
    picked = {s.sample_id: values[s.sample_id][[*s.trained_positions, -1]].astype(np.float32) for s in episode.segments}
    return dict(compute_credit(episode, picked, spec).advantages)


def values_of(episode: Episode, of_observations: float = 0.3, spread: float = 1.0) -> dict[str, np.ndarray]:
    """The k-th trained token of the episode always has the same value, whatever lies around it."""
    number = iter(range(10**6))
    found = {}
    for part in episode.segments:
        mine = [spread * np.sin(1.7 * next(number)) if trained else of_observations for trained in part.loss_mask]
        found[part.sample_id] = np.array([*mine, 0.0])
    return found


def flat(found: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate(list(found.values()))


# GAE runs through tool tokens, whose values nothing trains (slime)


def through_tool_tokens(episode: Episode, values: Values, spec: GaeSpec) -> dict[str, np.ndarray]:
    (part,) = episode.segments
    return {
        part.sample_id: compute_gae(values[part.sample_id][:-1], episode.reward, spec.gamma, 0.9)[
            list(part.trained_positions)
        ]
    }


def untrained_values_say_nothing(made: Implementation) -> None:
    episode = chain("aaooaaa")
    low, high = (made(episode, values_of(episode, v), SPEC) for v in (-5.0, 5.0))
    assert flat(low) == pytest.approx(flat(high), abs=1e-6)


def test_values_of_observations_say_nothing() -> None:
    untrained_values_say_nothing(ours)
    with pytest.raises(AssertionError):
        untrained_values_say_nothing(through_tool_tokens)


# A tool's gap counts as states of value 0, and lambda decays through it (OpenRLHF)


def gap_as_zero(episode: Episode, values: Values, spec: GaeSpec) -> dict[str, np.ndarray]:
    (part,) = episode.segments
    masked = values[part.sample_id][:-1] * np.array(part.loss_mask)
    lam = 0.9 if spec.policy_lambda is None else spec.policy_lambda
    return {part.sample_id: compute_gae(masked, episode.reward, spec.gamma, lam)[list(part.trained_positions)]}


def an_observation_changes_nothing(made: Implementation, lam: float = 0.9) -> None:
    spec = GaeSpec(policy_lambda=lam)
    without, within = chain("aaaaa"), chain("aaoooaaa")
    found = [flat(made(episode, values_of(episode), spec)) for episode in (without, within)]
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_a_tools_gap_is_no_state() -> None:
    an_observation_changes_nothing(ours)
    untrained_values_say_nothing(gap_as_zero)  # this law it keeps
    with pytest.raises(AssertionError):
        an_observation_changes_nothing(gap_as_zero)
    an_observation_changes_nothing(gap_as_zero, lam=1.0)  # which hid it


# The reward lies on the last token of the response, which no action may be (slime, Lego-RL)


def reward_on_the_last_token(episode: Episode, values: Values, spec: GaeSpec) -> dict[str, np.ndarray]:
    (part,) = episode.segments
    rewards = np.zeros(len(part.response_ids))
    rewards[-1] = episode.reward
    chosen = list(part.trained_positions)
    value_N, reward_N = values[part.sample_id][chosen], rewards[chosen]
    found, running = np.zeros(len(chosen)), 0.0
    for t in range(len(chosen) - 1, -1, -1):
        after = value_N[t + 1] if t + 1 < len(chosen) else 0.0
        running = reward_N[t] + spec.gamma * after - value_N[t] + spec.gamma * (spec.policy_lambda or 1.0) * running
        found[t] = running
    return {part.sample_id: found}


def the_reward_arrives(made: Implementation) -> None:
    """With lambda 1 an advantage and its value are the outcome, whatever stands behind the last action."""
    for kinds in ("aaoa", "aaoam", "aaoao"):
        episode = chain(kinds, reward=0.8)
        values = values_of(episode)
        advantage_N = flat(made(episode, values, GaeSpec(policy_lambda=1.0)))
        (part,) = episode.segments
        assert advantage_N + values["e"][list(part.trained_positions)] == pytest.approx(0.8, abs=1e-6)


def test_the_reward_lies_on_the_last_sampled_token() -> None:
    the_reward_arrives(ours)
    with pytest.raises(AssertionError):
        the_reward_arrives(reward_on_the_last_token)


# Every segment is an episode of its own, which ends there and earns the whole outcome (slime's sub-traces)


def segments_as_episodes(episode: Episode, values: Values, spec: GaeSpec) -> dict[str, np.ndarray]:
    lam = 1.0 if spec.policy_lambda is None else spec.policy_lambda
    return {
        part.sample_id: compute_gae(
            values[part.sample_id][list(part.trained_positions)], episode.reward, spec.gamma, lam
        )
        for part in episode.segments
    }


def cutting_changes_nothing(made: Implementation) -> None:
    """An episode in one piece, and the same one compacted twice with the same values."""
    whole, cut = chain("aaoaaoaaa"), chain("aaoaa", "oa", "aa")
    found = [flat(made(episode, values_of(episode), SPEC)) for episode in (whole, cut)]
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_segments_are_no_episodes() -> None:
    cutting_changes_nothing(ours)
    with pytest.raises(AssertionError):
        cutting_changes_nothing(segments_as_episodes)


# Lambda from the length of the row


def lambda_of_the_row(episode: Episode, values: Values, spec: GaeSpec) -> dict[str, np.ndarray]:
    width = 64  # what the longest row of the batch was padded to
    picked = np.concatenate([values[s.sample_id][list(s.trained_positions)] for s in episode.segments])
    return {"e": compute_gae(picked, episode.reward, spec.gamma, adaptive_lambda(width))}


def the_horizon_is_that_of_the_line(made: Implementation) -> None:
    """Check that the outcome gives the first token lambda^(l - 1) times what it gives the last."""
    episode = chain("aaoooooa")
    values = values_of(episode)
    more = Episode(episode.segments, episode.reward + 1)
    gained = flat(made(more, values, GaeSpec())) - flat(made(episode, values, GaeSpec()))
    assert gained == pytest.approx([(1 - 1 / 4.5) ** 2, 1 - 1 / 4.5, 1.0], abs=1e-6)


def test_lambda_goes_by_trained_tokens_and_not_by_the_rows_width() -> None:
    the_horizon_is_that_of_the_line(ours)
    with pytest.raises(AssertionError):
        the_horizon_is_that_of_the_line(lambda_of_the_row)


# The value loss is a mean of each micro-batch's means (Lego-RL), or hangs on a graph that was cut off (CoursIA)


Loss = Callable[[Tensor, Tensor, list[int]], Tensor]
"""It takes values, returns and the sizes of the micro-batches."""
RETURNS = torch.tensor([1.0, 0.0, 0.5, -1.0, 2.0, 0.25], dtype=torch.float64)
HEAD = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
"""Six states; a value is a product with three weights."""


def our_loss(value_N: Tensor, return_N: Tensor, sizes: list[int]) -> Tensor:
    parts = zip(value_N.split(sizes), return_N.split(sizes), strict=True)
    return torch.stack([(value_loss(v, g, v.detach(), None) / len(value_N)).sum() for v, g in parts]).sum()


def mean_of_means(value_N: Tensor, return_N: Tensor, sizes: list[int]) -> Tensor:
    parts = zip(value_N.split(sizes), return_N.split(sizes), strict=True)
    return torch.stack([value_loss(v, g, v.detach(), None).mean() for v, g in parts]).mean()


def cut_off(value_N: Tensor, return_N: Tensor, sizes: list[int]) -> Tensor:
    # `requires_grad_` silences the error that would have told it
    return our_loss(value_N.detach().requires_grad_(), return_N, sizes)


def gradient(loss: Loss, sizes: list[int]) -> Tensor:
    weight_D = torch.tensor([0.3, -0.2, 0.7], dtype=torch.float64, requires_grad=True)
    loss(HEAD @ weight_D, RETURNS, sizes).backward()  # type: ignore[no-untyped-call]
    return torch.zeros(3, dtype=torch.float64) if weight_D.grad is None else weight_D.grad


def any_split_gives_the_same_gradient(loss: Loss) -> None:
    whole = gradient(loss, [6])
    for sizes in ([1, 5], [2, 2, 2], [3, 1, 1, 1]):
        assert torch.allclose(gradient(loss, sizes), whole, rtol=1e-12)


def the_gradient_is_that_of_the_loss(loss: Loss) -> None:
    weight_D, step = torch.tensor([0.3, -0.2, 0.7], dtype=torch.float64), 1e-6

    def at(moved_D: Tensor) -> float:
        return float(loss(HEAD @ moved_D, RETURNS, [4, 2]).detach())

    differences = [(at(weight_D + e) - at(weight_D - e)) / (2 * step) for e in step * torch.eye(3, dtype=torch.float64)]
    assert gradient(loss, [4, 2]).tolist() == pytest.approx(differences, rel=1e-6)


def test_the_value_loss_is_one_mean_over_the_step() -> None:
    any_split_gives_the_same_gradient(our_loss)
    with pytest.raises(AssertionError):
        any_split_gives_the_same_gradient(mean_of_means)


def test_the_value_loss_reaches_the_weights() -> None:
    the_gradient_is_that_of_the_loss(our_loss)
    with pytest.raises(AssertionError):
        the_gradient_is_that_of_the_loss(cut_off)
