"""The policy gradient of a reward: against finite differences of its surrogate, against exact enumeration, and beside a
divergence, whose gradient it must not touch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.credit.leave_one_out import LeaveOneOut
from opd.losses import chunked
from opd.losses.chunked import Loss, LossHead, RewardedStats, Tokens, TokenStats
from opd.losses.none import NoDivergence
from opd.losses.policy_gradient import PolicyGradient
from opd.losses.reverse_kl import ReverseKL
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.payloads.hidden_states import TeacherBlock
from opd.payloads.none import UnscoredBlock
from tests.rows import make_rollout
from tests.unit.opd.losses.test_chunked import FLOAT, Memory

BAND = PolicyGradient(low=0.3, high=5.0)
WIDE = PolicyGradient(low=1.0, high=1e9)
N, D, V = 7, 5, 11


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(**changes: Any) -> Tokens:
    """Ratios around 1, inside of the band and outside of it on both sides."""
    values = {
        "token_N": torch.arange(N) % V,
        "weight_N": torch.zeros(N, dtype=torch.float64),
        "behaviour_N": -2.0 + 0.3 * rand(N, seed=3),
        "advantage_N": rand(N, seed=4),
        "policy_weight_N": 0.1 + torch.arange(N, dtype=torch.float64) / 10,
    }
    return Tokens(**values | changes)


def run(
    given: Tokens, hidden: Tensor, head: Tensor, *, divergence: Any = None, rule: LogitRule = IDENTITY, **options: Any
) -> tuple[Tensor, TokenStats]:
    """`divergence`: teacher's states and head; None: no teacher."""
    block: Any = UnscoredBlock(len(hidden)) if divergence is None else TeacherBlock(*divergence)
    objective: Any = NoDivergence() if divergence is None else ReverseKL()
    settings = {"chunk": 3, "vocab_size": V, "rule": rule, "policy": BAND} | options
    loss, stats = LossHead(head, Loss(objective=objective, **settings))(hidden, given, [block])
    return loss, stats


def differences(surrogate: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, head: Tensor) -> list[Tensor]:
    """Central finite differences in float64, by hidden states and head."""
    found = []
    for place, at in enumerate((hidden, head)):
        grad = torch.zeros_like(at)
        for index in itertools.product(*map(range, at.shape)):
            values = []
            for step in (1e-6, -1e-6):
                moved = [hidden.clone(), head.clone()]
                moved[place][index] += step
                values.append(float(surrogate(moved[0], moved[1])))
            grad[index] = (values[0] - values[1]) / 2e-6
        found.append(grad)
    return found


@pytest.mark.parametrize("rule", [IDENTITY, LogitRule(scale=0.5, softcap=3.0)], ids=["plain", "scaled and capped"])
@pytest.mark.parametrize("detached", [True, False], ids=["-f(r) A log p", "-A r inside of the band"])
def test_the_gradient_is_that_of_both_surrogates(rule: LogitRule, detached: bool) -> None:
    hidden, head, given = rand(N, D, seed=0), rand(V, D, seed=1), tokens()
    assert given.advantage_N is not None and given.policy_weight_N is not None

    def logp(h: Tensor, w: Tensor) -> Tensor:
        return rule.apply(h @ w.T).log_softmax(-1).gather(1, given.token_N[:, None])[:, 0]

    at = logp(hidden, head)
    given = tokens(behaviour_N=at + torch.tensor([0.2, -0.2, 0.0, 0.5, -2.5, 0.3, -0.9]))
    ratio = (at - given.behaviour_N).exp()
    inside = (ratio > 0.7) & (ratio < 6.0)
    assert inside.tolist() == [True, True, True, False, False, True, True]
    advantage, weight = given.advantage_N, given.policy_weight_N

    def surrogate(h: Tensor, w: Tensor) -> Tensor:
        now = logp(h, w)
        value = ratio * now if detached else (now - given.behaviour_N).exp()
        return -(weight * torch.where(inside, advantage * value, 0.0)).sum()

    hidden.requires_grad_(), head.requires_grad_()
    loss, stats = run(given, hidden, head, rule=rule)
    found = torch.autograd.grad(loss, (hidden, head))
    for grad, want in zip(found, differences(surrogate, hidden.detach(), head.detach()), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-6, atol=1e-8)
    assert isinstance(stats, RewardedStats) and stats.masked_N.tolist() == (~inside).double().tolist()
    want = -torch.where(inside, ratio * advantage, 0.0) * at
    torch.testing.assert_close(stats.policy_N, want)
    assert float(loss.detach()) == pytest.approx(float((want * weight).sum()))


def test_it_adds_to_the_divergence_and_changes_nothing_of_it() -> None:
    hidden, head, teacher = rand(N, D, seed=0), rand(V, D, seed=1), (rand(N, D, seed=7), rand(V, D, seed=8))
    weight = torch.linspace(0.0, 0.6, N, dtype=torch.float64)  # the first token has no divergence
    nobody = {"advantage_N": None, "policy_weight_N": None}

    def grads(given: Tokens, **options: Any) -> tuple[list[Tensor], TokenStats]:
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss, stats = run(given, h, w, **options)
        return list(torch.autograd.grad(loss, (h, w))), stats

    alone, before = grads(tokens(weight_N=weight, **nobody), divergence=teacher, policy=None)
    rewarded, _ = grads(tokens())
    both, after = grads(tokens(weight_N=weight), divergence=teacher)
    for one, other, total in zip(alone, rewarded, both, strict=True):
        assert float(other.norm()) > 0.01
        torch.testing.assert_close(total, one + other)
    assert torch.equal(after.kl_N, before.kl_N), "the reward is not in the divergence"
    nothing, _ = grads(tokens(weight_N=weight, policy_weight_N=torch.zeros(N, dtype=torch.float64)), divergence=teacher)
    assert all(torch.equal(one, other) for one, other in zip(alone, nothing, strict=True)), "bit for bit"
    assert type(before) is TokenStats and type(after) is RewardedStats


def test_what_carries_no_weight_has_no_effect() -> None:
    """An advantage that is not a number, and a teacher's, where nothing is trained."""
    hidden, head = rand(N, D, seed=0).requires_grad_(), rand(V, D, seed=1)
    advantage, weight = tokens().advantage_N, tokens().policy_weight_N
    assert advantage is not None and weight is not None
    advantage[2], weight[2] = torch.nan, 0.0
    broken = (torch.full((N, D), torch.nan, dtype=torch.float64), rand(V, D, seed=8))
    loss, _ = run(tokens(advantage_N=advantage, policy_weight_N=weight), hidden, head, divergence=broken, policy=WIDE)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert torch.isfinite(grad).all() and not grad[2].any() and bool(grad[1].any())
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("ratio", "masked"), [(0.69, True), (0.71, False), (1.0, False), (5.9, False), (6.1, True), (torch.inf, True)]
)
def test_the_band_is_around_one(ratio: float, masked: bool) -> None:
    logp = torch.zeros(1, dtype=torch.float64)
    factor, outside = BAND.ratio_factor(logp, logp, -torch.tensor([ratio], dtype=torch.float64).log())
    assert outside.item() is masked
    assert factor.item() == pytest.approx(0.0 if masked else ratio)


def test_a_chunk_of_logits_stays_the_largest_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, vocab, width, num = 64, 501, 4, 128
    monkeypatch.setattr(chunked, "SLICE_VALUES", 2 * vocab)
    peaks = []
    for rewarded in (False, True):
        hidden, head = (torch.randn(n, width, requires_grad=True) for n in (num, vocab))
        teacher = (torch.randn(num, width), torch.randn(vocab, width))
        ones = torch.ones(num)
        more = {"advantage_N": ones, "policy_weight_N": ones} if rewarded else {}
        given = Tokens(token_N=torch.zeros(num, dtype=torch.long), weight_N=ones, behaviour_N=-ones, **more)
        with Memory(hidden, head, *teacher, given.token_N, ones) as memory:
            loss, _ = run(given, hidden, head, divergence=teacher, chunk=chunk, vocab_size=vocab)
            loss.backward()
        assert memory.largest == chunk * vocab
        peaks.append(memory.peak)
    assert peaks[1] - peaks[0] <= 2 * num * FLOAT + 4 * vocab * FLOAT, "two numbers a token and rows of a slice"


# Against the exact policy gradient: two tokens of three, logits as a table, a reward for each response


STATES = [(), (0,), (1,), (2,)]
TEXTS = list(itertools.product(range(3), repeat=2))
REWARD = dict(zip(TEXTS, (0.0, 1.0, 0.2, 0.7, 0.0, 0.1, 1.0, 0.5, 0.3), strict=True))


def table() -> Tensor:
    return rand(len(STATES), 3, seed=11)


def value(logits: Tensor) -> Tensor:
    """Mean reward of a response."""
    logp = logits.log_softmax(-1)
    chances = [(logp[0, a] + logp[1 + a, b]).exp() * REWARD[a, b] for a, b in TEXTS]
    return torch.stack(chances).sum()


def by_loss(logits: Tensor, states: Sequence[int], **given: Any) -> Tensor:
    """The loss's gradient by the table, in which a state's hidden vector is its row and the head is the identity."""
    hidden = logits[list(states)].clone().requires_grad_()
    weight = torch.zeros(len(states), dtype=torch.float64)
    filled = Tokens(**{"weight_N": weight} | given)
    loss, _ = run(filled, hidden, torch.eye(3, dtype=torch.float64), vocab_size=3, policy=WIDE, chunk=64)
    (grad,) = torch.autograd.grad(loss, hidden)
    return torch.zeros_like(logits).index_add_(0, torch.tensor(states), grad)


def test_the_mean_of_sampled_gradients_is_the_exact_policy_gradient() -> None:
    logits = table().requires_grad_()
    exact = -torch.autograd.grad(value(logits), logits)[0] / 2  # a mean over the two tokens of a response
    logits = logits.detach()
    logp, rng, found = logits.log_softmax(-1), np.random.default_rng(0), []
    for _ in range(1500):
        rollouts, states, ids, behaviour = [], [], [], []
        for number in range(4):
            a = int(rng.choice(3, p=logp[0].exp().numpy()))
            b = int(rng.choice(3, p=logp[1 + a].exp().numpy()))
            rollouts.append(
                make_rollout(
                    sample_id=str(number),
                    group="0",
                    step=1,
                    domain="d",
                    prompt_ids=(1,),
                    response_ids=(a, b),
                    reward=REWARD[a, b],
                )
            )
            states += [0, 1 + a]
            ids += [a, b]
            behaviour += [float(logp[0, a]), float(logp[1 + a, b])]
        assigned = LeaveOneOut().assign(1, rollouts).advantages
        advantages = np.concatenate([assigned[str(i)] for i in range(4)])
        found.append(
            by_loss(
                logits,
                states,
                token_N=torch.tensor(ids),
                behaviour_N=torch.tensor(behaviour, dtype=torch.float64),
                advantage_N=torch.from_numpy(advantages).double(),
                policy_weight_N=torch.full((8,), 1 / 8, dtype=torch.float64),
            )
        )
    every = torch.stack(found)
    error = every.std(0) / len(found) ** 0.5
    assert float(exact.abs().max()) > 20 * float(error.max()), "the test could see a wrong gradient"
    assert float(((every.mean(0) - exact) / error).abs().max()) < 4.5


def test_an_older_policys_tokens_give_the_exact_gradient_at_their_state() -> None:
    """Summed over every token that mu could have sampled: no sampling error hides a bias."""
    logits, mu = table()[:1], rand(1, 3, seed=12).log_softmax(-1)
    worth = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    exact = logits.clone().requires_grad_()
    (want,) = torch.autograd.grad(-(exact.softmax(-1) * worth).sum(), exact)
    found = by_loss(
        logits, [0, 0, 0], token_N=torch.arange(3), behaviour_N=mu[0], advantage_N=worth, policy_weight_N=mu[0].exp()
    )
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_what_was_just_written_is_in_the_band_at_any_temperature(temperature: float) -> None:
    """A likely token, and rare ones: p / mu lies far outside of the band for some of them, the gradient is exact all the same."""
    logits = 3 * table()[:1]
    mu = (logits / temperature).log_softmax(-1)
    off = (logits.log_softmax(-1) - mu).exp()
    assert ((off <= 0.7) | (off >= 1.2)).any(), "the test could see a band of p / mu"
    worth = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    exact = logits.clone().requires_grad_()
    (want,) = torch.autograd.grad(-(exact.softmax(-1) * worth).sum(), exact)
    given = {"behaviour_N": mu[0], "advantage_N": worth, "policy_weight_N": mu[0].exp()}
    loss, stats = run(
        Tokens(token_N=torch.arange(3), weight_N=torch.zeros(3, dtype=torch.float64), **given),
        hidden := logits.repeat(3, 1).requires_grad_(),
        torch.eye(3, dtype=torch.float64),
        vocab_size=3,
        policy=PolicyGradient(low=0.3, high=0.2),
        temperature=temperature,
    )
    assert isinstance(stats, RewardedStats) and not stats.masked_N.any()
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0].sum(0, keepdim=True), want)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(("aged", "masked"), [(0.69, True), (0.71, False), (5.9, False), (6.1, True)])
def test_the_band_is_of_what_age_changed(temperature: float, aged: float, masked: bool) -> None:
    logits = 3 * table()[:1]
    behaviour = (logits / temperature).log_softmax(-1)[0] - float(np.log(aged))
    ones = torch.ones(3, dtype=torch.float64)
    given = Tokens(
        token_N=torch.arange(3), weight_N=0 * ones, behaviour_N=behaviour, advantage_N=ones, policy_weight_N=ones
    )
    head = torch.eye(3, dtype=torch.float64)
    _, stats = run(given, logits.repeat(3, 1), head, vocab_size=3, temperature=temperature)
    assert isinstance(stats, RewardedStats) and (stats.masked_N != 0).tolist() == [masked] * 3


# Divergence and reward together: the optimum of the whole objective


def descend(logits: Tensor, teacher: Tensor, worth: Callable[[Tensor], Tensor], weight: float) -> Tensor:
    """Gradient descent through the loss, with every token of every state in place of a sample."""
    states, ids = zip(*itertools.product(range(len(logits)), range(3)), strict=True)
    head = torch.eye(3, dtype=torch.float64)
    for _ in range(1200):
        hidden = logits[list(states)].clone().requires_grad_()
        logp = logits.log_softmax(-1)
        chance = logp.exp().flatten()
        given = Tokens(
            token_N=torch.tensor(ids), behaviour_N=logp.flatten(), weight_N=chance,
            advantage_N=worth(logp.exp()).flatten(), policy_weight_N=weight * chance,
        )  # fmt: skip
        loss, _ = run(given, hidden, head, divergence=(teacher[list(states)], head), vocab_size=3, chunk=64)
        (grad,) = torch.autograd.grad(loss, hidden)
        logits = logits - 2.0 * torch.zeros_like(logits).index_add_(0, torch.tensor(states), grad)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("weight", [0.5, 3.0])
@pytest.mark.parametrize("baseline", [0.0, 0.4])
def test_the_optimum_is_the_teacher_times_the_exponential_of_the_reward(weight: float, baseline: float) -> None:
    """One token: softmax of log q + weight * reward, whatever the baseline is."""
    reward, teacher = torch.tensor([[1.0, 0.0, 0.25]], dtype=torch.float64), rand(1, 3, seed=21)
    found = descend(rand(1, 3, seed=20), teacher, lambda p: reward - baseline, weight)
    torch.testing.assert_close(found, (teacher + weight * reward).log_softmax(-1), atol=1e-6, rtol=0)


def test_the_optimum_of_two_tokens_weighs_what_comes_after_them() -> None:
    """The divergence is taken at given states: a token is worth the mean reward of what follows, and not its divergence."""
    reward = torch.tensor([[REWARD[a, b] for b in range(3)] for a in range(3)], dtype=torch.float64)
    teacher, weight = rand(4, 3, seed=22), 2.0

    def worth(p: Tensor) -> Tensor:
        return torch.cat([(p[1:] * reward).sum(-1)[None], reward])

    last = (teacher[1:] + weight * reward).log_softmax(-1)
    first = (teacher[0] + weight * (last.exp() * reward).sum(-1)).log_softmax(-1)
    found = descend(rand(4, 3, seed=23), teacher, worth, weight)
    torch.testing.assert_close(found, torch.cat([first[None], last]), atol=1e-6, rtol=0)
