"""adaptive_kl: its gradient at a fixed share, its two ends, several teachers, and what it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.interfaces import Objective
from opd.losses.adaptive_kl import AdaptiveKL
from opd.losses.chunked import TokenStats
from opd.losses.forward_kl import ForwardKL
from opd.losses.reverse_kl import ReverseKL
from opd.machine.compiler import can_compile, find_compiler
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.payloads.hidden_states import MixtureBlock, TeacherBlock
from tests.losses import chunked_objective

V, D, N = 19, 5, 12
RULES = [(IDENTITY, IDENTITY), (LogitRule(scale=0.7, softcap=3.0), LogitRule(scale=1.3, softcap=2.5))]
RULE_NAMES = ["plain", "scaled and capped"]
WEIGHTS = (0.5, 0.2, 0.3)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """[N] of two [N, V] log-probs."""
    return (p.exp() * (p - q)).sum(-1)


def share(p: Tensor, q: Tensor, bound: float) -> Tensor:
    overlap = torch.stack([p, q]).amin(0).exp().sum(-1)
    return torch.where(overlap < bound, 1 - overlap / bound, 0.0)


@dataclass
class Case:
    """A student, what teaches it at all N tokens, and how much each token counts."""

    hidden: Tensor
    head: Tensor
    teachers: tuple[TeacherBlock, ...]
    weight: Tensor
    rule: LogitRule = IDENTITY

    def logp(self) -> Tensor:
        return self.rule.apply(self.hidden @ self.head.T).log_softmax(-1)

    def logqs(self) -> list[Tensor]:
        return [t.rule.apply(t.hidden_N_E @ t.head_V_E.T).log_softmax(-1) for t in self.teachers]

    def product(self) -> Tensor:
        """Log-probs of the normalised product prod_k q_k^w_k."""
        return sum((w * q for w, q in zip(WEIGHTS, self.logqs(), strict=True)), torch.zeros(())).log_softmax(-1)

    def run(self, objective: Objective, chunk: int = 5, **options: Any) -> tuple[Tensor, TokenStats]:
        block = self.teachers[0] if len(self.teachers) == 1 else MixtureBlock(self.teachers, WEIGHTS)
        token = torch.zeros(len(self.weight), dtype=torch.long)
        return chunked_objective(
            objective, self.hidden, self.head, [block], self.weight, token, chunk=chunk, vocab_size=len(self.head),
            rule=self.rule, **options,
        )  # fmt: skip

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, (self.hidden, self.head)))


def case(dtype: torch.dtype = torch.float64, teachers: int = 1, rules: tuple[LogitRule, LogitRule] = RULES[0]) -> Case:
    """Every fourth token carries no loss."""
    gen = torch.Generator().manual_seed(4)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    weight = (torch.rand(N, generator=gen, dtype=torch.float64) + 0.1).to(dtype)
    weight[::4] = 0
    blocks = tuple(TeacherBlock(rand(N, D + i), rand(V, D + i), rules[1]) for i in range(teachers))
    return Case(rand(N, D).requires_grad_(), rand(V, D).requires_grad_(), blocks, weight, rules[0])


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def differences(value: Callable[[], Tensor], of: Tensor, step: float = 1e-5) -> Tensor:
    """Central finite differences."""
    numeric = torch.zeros_like(of)
    flat, out = of.data.view(-1), numeric.view(-1)
    with torch.no_grad():
        for i in range(len(flat)):
            x = float(flat[i])
            flat[i] = x + step
            above = float(value())
            flat[i] = x - step
            out[i] = (above - float(value())) / (2 * step)
            flat[i] = x
    return numeric


# Gradients


@pytest.mark.parametrize("rules", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("bound", [0.6, 1.0])
@pytest.mark.parametrize("chunk", [1, 5, 128])
@pytest.mark.parametrize("teachers", [1, 3], ids=["one teacher", "three teachers"])
def test_gradients_are_the_finite_differences_at_a_fixed_share(
    rules: Any, bound: float, chunk: int, teachers: int
) -> None:
    c = case(teachers=teachers, rules=rules)
    target = c.product() if teachers > 1 else c.logqs()[0]
    a = share(c.logp().detach(), target, bound)
    assert bool(((a > 0.05) & (a < 0.95)).any())

    def value() -> Tensor:
        """The stated loss; the share stays what it was."""
        logp = c.logp()
        shares = WEIGHTS if teachers > 1 else (1.0,)
        back = sum((w * kl(logp, q) for w, q in zip(shares, c.logqs(), strict=True)), torch.zeros(()))
        return (c.weight * (a * kl(target, logp) + (1 - a) * back)).sum()

    loss, _ = c.run(AdaptiveKL(bound), chunk)
    assert float(loss.detach()) == pytest.approx(float(value().detach()), rel=1e-12)
    for param, found in zip((c.hidden, c.head), c.gradients(loss), strict=True):
        numeric = differences(value, param)
        assert float(numeric.norm()) > 0.01, "nothing to compare"
        assert relative(found, numeric) < 1e-6


def test_the_share_has_no_gradient() -> None:
    c = case()
    logp, logq = c.logp(), c.logqs()[0]
    a = share(logp, logq, 0.6)
    moving = c.gradients((c.weight * (a * kl(logq, logp) + (1 - a) * kl(logp, logq))).sum())
    for found, other in zip(c.gradients(c.run(AdaptiveKL(0.6))[0]), moving, strict=True):
        assert relative(found, other) > 0.05


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_is_what_runs_eagerly(dtype: torch.dtype) -> None:
    can_compile.cache_clear()
    c = case(dtype)
    eager, stats = c.run(AdaptiveKL(0.6))
    loss, found = c.run(AdaptiveKL(0.6), compiled=True)
    torch.testing.assert_close(found.kl_N, stats.kl_N, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for compiled, want in zip(c.gradients(loss), c.gradients(eager), strict=True):
        assert relative(compiled.float(), want.float()) < tolerance


# The two ends


def apart(dtype: torch.dtype) -> Case:
    """Student and teacher sure of different tokens, so much so that they do not overlap at all."""
    gen = torch.Generator().manual_seed(0)
    one_to_one = torch.eye(V)  # a head whose logits are the hidden state
    own, wanted = torch.randn(2, N, V, generator=gen)
    own[:, 0] += 1000
    wanted[:, 1:4] += 1000
    weight = torch.rand(N, generator=gen)
    weight[::4] = 0
    teacher = TeacherBlock(wanted.to(dtype), one_to_one.to(dtype))
    return Case(
        own.to(dtype).requires_grad_(), one_to_one.to(dtype).requires_grad_(), (teacher,), weight.to(dtype)
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("make", "bound", "end"),
    [(apart, 1.0, ForwardKL()), (case, 1e-9, ReverseKL())],
    ids=["no overlap", "overlap above the bound"],
)
def test_the_ends_are_forward_and_reverse_kl_bit_for_bit(
    make: Callable[[torch.dtype], Case], bound: float, end: Objective, dtype: torch.dtype
) -> None:
    c = make(dtype)
    (want, want_stats), (loss, stats) = c.run(end), c.run(AdaptiveKL(bound))
    assert torch.equal(loss, want)
    assert float(loss.detach()) > 1
    assert torch.equal(stats.kl_N, want_stats.kl_N)
    for found, wanted in zip(c.gradients(loss), c.gradients(want), strict=True):
        assert torch.equal(found, wanted)
        assert bool(found.any())


def test_the_share_rises_as_the_overlap_falls_without_a_jump() -> None:
    # The teacher sure of token 0, the student more and more so.
    logq = torch.tensor([0.98, 0.01, 0.01], dtype=torch.float64).log()
    mass = torch.linspace(0.001, 0.97, 400, dtype=torch.float64)
    logp = torch.stack([mass, (1 - mass) * 0.7, (1 - mass) * 0.3], -1).log()
    one_to_one = torch.eye(3, dtype=torch.float64)
    block = TeacherBlock(logq.expand_as(logp), one_to_one)
    c = Case(logp, one_to_one, (block,), torch.ones(len(mass), dtype=torch.float64))
    values = {o: c.run(o)[1].kl_N for o in (AdaptiveKL(0.3), ForwardKL(), ReverseKL())}
    forward, reverse = values[ForwardKL()], values[ReverseKL()]
    found = (values[AdaptiveKL(0.3)] - reverse) / (forward - reverse)
    torch.testing.assert_close(found, share(logp, logq.expand_as(logp), 0.3))
    assert float(found[0]) > 0.9
    assert float(found.diff().max()) < 1e-9
    assert float(found.diff().abs().max()) < 0.02
    assert not found[mass > 0.3].abs().max() > 1e-9


# Several teachers


def test_several_teachers_above_the_bound_are_the_sum_of_their_reverse_kls() -> None:
    c = case(teachers=3)
    assert torch.equal(c.run(AdaptiveKL(1e-9))[0], c.run(ReverseKL())[0])


@pytest.mark.parametrize("bound", [0.2, 1.0])
def test_a_student_that_is_the_teachers_product_has_nothing_to_learn(bound: float) -> None:
    c = case(teachers=3)
    at_product = Case(
        c.product().detach().requires_grad_(), torch.eye(V, dtype=torch.float64).requires_grad_(), c.teachers, c.weight
    )
    loss, stats = at_product.run(AdaptiveKL(bound))
    assert float(stats.kl_N.min()) > 0.01, "they disagree"
    for grad in at_product.gradients(loss):
        assert float(grad.abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_several_teachers_say_on_tokens_without_weight_does_not_matter(dtype: torch.dtype) -> None:
    c = case(dtype, teachers=3)
    want = c.gradients(c.run(AdaptiveKL(0.6))[0])
    for t in c.teachers:
        t.hidden_N_E[c.weight == 0] = torch.nan
    loss, _ = c.run(AdaptiveKL(0.6))
    assert bool(loss.isfinite())
    for found, wanted in zip(c.gradients(loss), want, strict=True):
        assert torch.equal(found, wanted)


# What it is for


def one_to_one(logits: Tensor, wanted: Tensor) -> Case:
    """One token whose logits are given."""
    head = torch.eye(len(wanted), dtype=torch.float64)
    return Case(logits[None], head, (TeacherBlock(wanted[None], head),), torch.ones(1, dtype=torch.float64))


def sure(of: int, gap: float, vocab: int = 50) -> Tensor:
    logits = torch.zeros(vocab, dtype=torch.float64)
    logits[of] = gap
    return logits


def test_a_student_sure_of_a_wrong_token_gets_a_gradient() -> None:
    pulls: dict[Objective, float] = {}
    for objective in (ReverseKL(), ForwardKL(), AdaptiveKL()):
        logits = sure(3, 12.0).requires_grad_()
        (gradient,) = torch.autograd.grad(one_to_one(logits, sure(7, 12.0)).run(objective)[0], logits)
        pulls[objective] = -float(gradient[7])
    assert pulls[ReverseKL()] < 1e-3
    assert pulls[AdaptiveKL()] == pytest.approx(pulls[ForwardKL()], rel=1e-2)
    assert pulls[AdaptiveKL()] > 0.99


def steps_to_arrive(objective: Objective, budget: int) -> int | None:
    """Plain gradient descent at rate 1 until the right token has a probability of 0.9."""
    logits = sure(3, 12.0)
    for step in range(budget):
        if float(logits.softmax(-1)[7]) > 0.9:
            return step
        logits.requires_grad_()
        (gradient,) = torch.autograd.grad(one_to_one(logits, sure(7, 12.0)).run(objective)[0], logits)
        logits = (logits - gradient).detach()
    return None


def test_it_arrives_where_reverse_kl_is_still_stuck() -> None:
    assert steps_to_arrive(ReverseKL(), 100) is None
    forward, ours = (steps_to_arrive(o, 100) for o in (ForwardKL(), AdaptiveKL()))
    assert forward is not None and ours is not None
    assert ours <= forward < 20


def bell(mean: Tensor, log_width: Tensor) -> Tensor:
    """[50] log-probs of a distribution with one mode."""
    return (-((torch.arange(50) - mean) ** 2) / (2 * (2 * log_width).exp())).log_softmax(-1)


def fitted(objective: Objective, steps: int = 300) -> tuple[float, float]:
    """Mean and width of a one-mode student that began on one of the two modes of its teacher."""
    two = torch.tensor(2.0, dtype=torch.float64).log()
    modes: Sequence[Tensor] = [bell(torch.tensor(m, dtype=torch.float64), two).exp() for m in (12.0, 37.0)]
    wanted = (0.6 * modes[0] + 0.4 * modes[1] + 1e-6).log()
    params = [torch.tensor(x, dtype=torch.float64).requires_grad_() for x in (12.0, 0.4)]
    optimizer = torch.optim.Adam(params, lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        one_to_one(bell(params[0], params[1]), wanted).run(objective)[0].backward()
        optimizer.step()
    return float(params[0].detach()), float(params[1].detach().exp())


def test_a_student_with_one_mode_stays_on_the_one_it_found() -> None:
    reverse, forward, ours = (fitted(o) for o in (ReverseKL(), ForwardKL(), AdaptiveKL()))
    assert ours == pytest.approx(reverse, abs=1e-9)
    assert ours == pytest.approx((12.0, 2.0), abs=0.05)
    assert forward[1] > 5, "forward KL covers both"
