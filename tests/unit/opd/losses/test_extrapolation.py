"""Beyond the experts: the target expert^lambda * start^(1 - lambda), against the distribution written out id by id."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.interfaces import Objective
from opd.losses.adaptive_kl import AdaptiveKL
from opd.losses.chunked import TokenStats
from opd.losses.forward_kl import ForwardKL
from opd.losses.jsd import JSD
from opd.losses.reverse_kl import ReverseKL
from opd.losses.sampled import SampledKL
from opd.losses.skew import Skew
from opd.models.heads import Head
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.payloads.hidden_states import ExtrapolatedBlock, HiddenRun, HiddenStates, MixtureBlock, TeacherBlock
from opd.payloads.sampled_logprobs import SampledBlock, SampledLogprobs
from tests.losses import chunked_objective
from tests.rows import make_row

V, D, N = 11, 5, 9
RULES = [(IDENTITY, IDENTITY), (LogitRule(scale=0.7, softcap=3.0), LogitRule(scale=1.3, softcap=2.5))]
OBJECTIVES = {
    "reverse_kl": ReverseKL(),
    "forward_kl": ForwardKL(),
    "jsd": JSD(beta=0.3),
    "skew": Skew(alpha=0.2),
    "adaptive_kl": AdaptiveKL(bound=0.5),
    "sampled": SampledKL(),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
factors = pytest.mark.parametrize("factor", [1.1, 1.25, 1.5, 3.0])


@dataclass
class Case:
    """A student, its teachers (experts, and the start student last), their weights, and the tokens' weights."""

    hidden: Tensor
    head: Tensor
    teachers: tuple[TeacherBlock, ...]
    weights: tuple[float, ...]
    weight: Tensor
    rule: LogitRule = IDENTITY

    def target(self) -> Tensor:
        """[N, V] log-probs, a state and an id at a time, from probabilities."""
        probs = [t.rule.apply(t.hidden_N_E @ t.head_V_E.T).softmax(-1) for t in self.teachers]
        found = torch.zeros(N, V, dtype=torch.float64)
        for n, v in itertools.product(range(N), range(V)):
            value = 1.0
            for w, q in zip(self.weights, probs, strict=True):
                value *= float(q[n, v]) ** w
            found[n, v] = value
        return (found / found.sum(-1, keepdim=True)).log()

    def run(self, objective: Objective, block: Any, chunk: int = 4) -> tuple[Tensor, TokenStats]:
        token = torch.arange(N) % V
        return chunked_objective(
            objective, self.hidden, self.head, [block], self.weight, token, chunk=chunk, vocab_size=V, rule=self.rule
        )


def case(factor: float, shares: Sequence[float] = (1.0,), rules: Any = (IDENTITY, IDENTITY)) -> Case:
    gen = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    teachers = tuple(TeacherBlock(rand(N, 4 + i), rand(V, 4 + i), rules[1]) for i in range(len(shares) + 1))
    weight = torch.rand(N, generator=gen, dtype=torch.float64) + 0.1
    weight[::4] = 0
    weights = (*(factor * share for share in shares), 1 - factor)
    return Case(rand(N, D).requires_grad_(), rand(V, D).requires_grad_(), teachers, weights, weight, rules[0])


def gradients(c: Case, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, (c.hidden, c.head)))


@every_objective
@factors
@pytest.mark.parametrize("shares", [(1.0,), (0.75, 0.25)], ids=["one expert", "two experts"])
@pytest.mark.parametrize("rules", RULES, ids=["plain", "scaled and capped"])
def test_it_is_the_objective_against_the_target_written_out(
    objective: Objective, factor: float, shares: tuple[float, ...], rules: Any
) -> None:
    c = case(factor, shares, rules)
    written_out = TeacherBlock(c.target(), torch.eye(V, dtype=torch.float64))
    loss, stats = c.run(objective, ExtrapolatedBlock(c.teachers, c.weights))
    wanted, said = c.run(objective, written_out)
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(stats.kl_N, said.kl_N, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(stats.teacher_entropy_N, said.teacher_entropy_N, rtol=1e-9, atol=1e-9)
    for found, want in zip(gradients(c, loss), gradients(c, wanted), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jsd", "skew"])
@pytest.mark.parametrize("rules", RULES, ids=["plain", "scaled and capped"])
def test_its_gradient_is_the_finite_difference_of_its_value(name: str, rules: Any) -> None:
    c = case(1.25, rules=rules)
    block = ExtrapolatedBlock(c.teachers, c.weights)

    def value() -> float:
        return float(c.run(OBJECTIVES[name], block)[0].detach())

    found = gradients(c, c.run(OBJECTIVES[name], block)[0])
    for parameter, gradient in zip((c.hidden, c.head), found, strict=True):
        flat, step = parameter.data.view(-1), 1e-5
        for place in range(len(flat)):
            at = float(flat[place])
            flat[place] = at + step
            above = value()
            flat[place] = at - step
            below = value()
            flat[place] = at
            assert (above - below) / (2 * step) == pytest.approx(float(gradient.view(-1)[place]), rel=1e-6, abs=1e-8)


def test_reverse_kl_differs_from_the_sum_of_divergences_by_what_no_student_changes() -> None:
    """lambda KL(p || expert) + (1 - lambda) KL(p || start) = KL(p || target) - log Z, Z of the state alone."""
    c = case(1.5)
    loss, stats = c.run(ReverseKL(), ExtrapolatedBlock(c.teachers, c.weights))
    single = [c.run(ReverseKL(), t) for t in c.teachers]
    summed = sum((w * value for w, (value, _) in zip(c.weights, single, strict=True)), torch.zeros(()))
    for found, want in zip(gradients(c, loss), gradients(c, summed), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    sums = sum(w * s.kl_N for w, (_, s) in zip(c.weights, single, strict=True))
    assert float(stats.kl_N.min()) >= 0 > float((sums - stats.kl_N).max()), "log Z is above 0 beyond the expert"


class Tables:
    """Next-token distributions after every prefix of a tiny language: three ids, texts of up to three of them."""

    prefixes: tuple[tuple[int, ...], ...] = tuple(
        prefix for length in range(3) for prefix in itertools.product(range(3), repeat=length)
    )

    def __init__(self, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.logits_N_V = 2 * torch.randn(len(self.prefixes), 3, generator=gen, dtype=torch.float64)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jsd"])
def test_a_student_with_a_logit_for_every_state_reaches_the_target_exactly(name: str) -> None:
    """Weigh all states alike: how often the student comes to one is a factor above 0, and moves no state's least value."""
    factor, expert, start = 1.25, Tables(1), Tables(2)
    logits_N_V = start.logits_N_V.clone().requires_grad_()
    eye = torch.eye(3, dtype=torch.float64)
    block = ExtrapolatedBlock(
        (TeacherBlock(expert.logits_N_V, eye), TeacherBlock(start.logits_N_V, eye)), (factor, 1 - factor)
    )
    q_N_V, start_N_V = expert.logits_N_V.softmax(-1), start.logits_N_V.softmax(-1)
    target_N_V = q_N_V**factor * start_N_V ** (1 - factor)
    target_N_V /= target_N_V.sum(-1, keepdim=True)
    optimizer = torch.optim.LBFGS(
        [logits_N_V], max_iter=400, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss, _ = chunked_objective(
            OBJECTIVES[name], logits_N_V, eye, [block], torch.ones(len(Tables.prefixes), dtype=torch.float64),
            torch.zeros(len(Tables.prefixes), dtype=torch.long), chunk=4, vocab_size=3,
        )  # fmt: skip
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(logits_N_V.detach().softmax(-1), target_N_V, rtol=0, atol=1e-6)
    assert float((target_N_V - q_N_V).abs().max()) > 0.01, "the target is not the expert"


def test_the_mean_of_sampled_is_the_gradient_of_exact_reverse_kl_to_the_target() -> None:
    """From log-probs alone the target is known up to a factor of the state, which acts like a baseline."""
    gen = torch.Generator().manual_seed(4)
    logits, expert, start, mu = torch.randn(4, V, generator=gen, dtype=torch.float64).unbind(0)
    factor, eye = 1.25, torch.eye(V, dtype=torch.float64)
    hidden = logits.clone().requires_grad_()
    block = ExtrapolatedBlock((TeacherBlock(expert[None], eye), TeacherBlock(start[None], eye)), (factor, 1 - factor))
    exact, _ = chunked_objective(
        ReverseKL(), hidden[None], eye, [block], torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long),
        chunk=4, vocab_size=V,
    )  # fmt: skip
    (wanted,) = torch.autograd.grad(exact, hidden)
    measure = factor * expert.log_softmax(-1) + (1 - factor) * start.log_softmax(-1)
    logmu = mu.log_softmax(-1)
    loss, _ = chunked_objective(
        SampledKL(), hidden.expand(V, V), eye, [SampledBlock(measure)], logmu.exp(), torch.arange(V), logmu,
        chunk=4, vocab_size=V,
    )  # fmt: skip
    (found,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


# From rows to blocks


def test_rows_with_a_negative_weight_make_a_target_and_others_what_they_made_before() -> None:
    heads = {key: Head(torch.randn(V, D), IDENTITY) for key in ("expert", "start")}

    def rows(*weights: float) -> tuple[Any, ...]:
        return tuple(
            make_row(
                sample_id="s", step=1, domain="d", teacher=name, weight=weight, prompt_ids=(1,), response_ids=(2, 3),
                head=name, hidden_size=D, hidden=torch.randn(2, D).numpy().tobytes(),
            )
            for name, weight in zip(("expert", "start"), weights, strict=False)
        )  # fmt: skip

    def block(*weights: float) -> Any:
        (run,) = HiddenStates.blocks([rows(*weights)], torch.float32, None)
        assert isinstance(run, HiddenRun)
        return run.with_heads(heads)

    # Weights travel as float32.
    beyond = block(float(torch.tensor(1.1)), float(torch.tensor(-0.1)))
    assert isinstance(beyond, ExtrapolatedBlock) and not beyond.is_mixture
    assert beyond.weights == pytest.approx((1.1, -0.1)) and sum(beyond.weights) == pytest.approx(1, abs=1e-12)
    assert isinstance(block(0.75, 0.25), MixtureBlock)
    assert isinstance(block(1.0), TeacherBlock)


def test_sampled_logprobs_are_summed_with_their_weights() -> None:
    rows = tuple(
        make_row(
            sample_id="s", step=1, domain="d", teacher=name, weight=weight, prompt_ids=(1,), response_ids=(2, 3),
            teacher_logprobs=said,
        )
        for name, weight, said in (("expert", 1.25, (-1.0, -2.0)), ("start student", -0.25, (-4.0, -8.0)))
    )  # fmt: skip
    (block,) = SampledLogprobs.blocks([rows], torch.float32, None)
    assert isinstance(block, SampledBlock) and block.logprob_N.tolist() == [-0.25, -0.5]
