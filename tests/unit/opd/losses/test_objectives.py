"""Every objective against finite differences, against plain autograd, and against forms that look right and are not.

The formulas below are written from the papers with whole logit matrices; they share no code with the product.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.config.objectives import OBJECTIVES, find_objective_section
from opd.interfaces import Objective
from opd.losses import chunked
from opd.losses.adaptive_kl import AdaptiveKL
from opd.losses.aligned_kl import AlignedKL
from opd.losses.blocks import Block
from opd.losses.chunked import TokenStats
from opd.losses.forward_kl import ForwardKL
from opd.losses.jsd import JSD
from opd.losses.none import NoDivergence
from opd.losses.reverse_kl import ReverseKL
from opd.losses.sampled import SampledKL
from opd.losses.sft import CrossEntropy
from opd.losses.skew import Skew
from opd.losses.top_k import TopK
from opd.machine.compiler import can_compile
from opd.models.logit_rule import IDENTITY, LogitRule
from opd.payloads.hidden_states import MixtureBlock, TeacherBlock
from opd.payloads.none import UnscoredBlock
from opd.payloads.sampled_logprobs import SampledBlock
from opd.payloads.top_k import TopKBlock
from opd.settings.yaml_files import validate_section
from tests.losses import chunked_objective

V, D, N = 19, 5, 17
STUDENT_RULE = LogitRule(scale=0.7, softcap=3.0)
TEACHER_RULE = LogitRule(scale=1.3, softcap=2.5)
RULES = [(IDENTITY, IDENTITY), (STUDENT_RULE, TEACHER_RULE), (LogitRule(scale=0.5), LogitRule(softcap=4.0))]
RULE_NAMES = ["plain", "scaled and capped", "scaled, capped"]


# Literature, by log-probs p and q of [N, V]; each returns [N].


def reverse(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def forward(p: Tensor, q: Tensor) -> Tensor:
    return reverse(q, p)


def jensen_shannon(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    """GKD, arXiv 2306.13649, equation 1, P the teacher; the limits as TRL takes them."""

    def value(p: Tensor, q: Tensor) -> Tensor:
        if beta == 0:
            return forward(p, q)
        if beta == 1:
            return reverse(p, q)
        m = (beta * q.exp() + (1 - beta) * p.exp()).log()
        return beta * reverse(q, m) + (1 - beta) * reverse(p, m)

    return value


def skewed(alpha: float) -> Callable[[Tensor, Tensor], Tensor]:
    """DistiLLM, arXiv 2402.03898: KL(student || alpha student + (1 - alpha) teacher)."""
    return lambda p, q: reverse(p, (alpha * p.exp() + (1 - alpha) * q.exp()).log())


def bucketed(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """KL of the K + 1 outcomes: the teacher's K likeliest, and everything else."""

    def value(p: Tensor, q: Tensor) -> Tensor:
        ids = q.topk(k).indices
        inside = (p.gather(1, ids).exp() * (p.gather(1, ids) - q.gather(1, ids))).sum(-1)
        if k == p.shape[1]:
            return inside
        out_p, out_q = (torch.ones_like(x).scatter(1, ids, 0.0).mul(x.exp()).sum(-1) for x in (p, q))
        return inside + out_p * (out_p / out_q).log()

    return value


def generalised(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Unnormalised KL, sum p log(p/q) - p + q, on the teacher's K likeliest (arXiv 2606.30406, equation 5)."""

    def value(p: Tensor, q: Tensor) -> Tensor:
        ids = q.topk(k).indices
        p_in, q_in = p.gather(1, ids), q.gather(1, ids)
        return (p_in.exp() * (p_in - q_in) - p_in.exp() + q_in.exp()).sum(-1)

    return value


def adaptive(bound: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward KL's share falls from 1 to 0 as 1 - total variation rises from 0 to the bound; it has no gradient."""

    def value(p: Tensor, q: Tensor) -> Tensor:
        overlap = 1 - (p.exp() - q.exp()).abs().sum(-1) / 2
        share = (1 - overlap / bound).clamp(min=0).detach()
        return share * forward(p, q) + (1 - share) * reverse(p, q)

    return value


@dataclass(frozen=True)
class Form:
    """An objective and what it should be."""

    objective: Objective
    formula: Callable[[Tensor, Tensor], Tensor]
    k: int = 0

    @property
    def has_whole_gradient(self) -> bool:
        """Return True if the gradient is that of the value as it is; else a part of the value counts as constant."""
        return not isinstance(self.objective, AdaptiveKL)


FORMS = {
    "reverse_kl": Form(ReverseKL(), reverse),
    "forward_kl": Form(ForwardKL(), forward),
    **{f"jsd {b}": Form(JSD(beta=b), jensen_shannon(b)) for b in (0.0, 0.1, 0.5, 0.9, 1.0)},
    **{f"skew {a}": Form(Skew(alpha=a), skewed(a)) for a in (0.01, 0.1, 0.5, 0.9)},
    **{f"adaptive_kl {b}": Form(AdaptiveKL(bound=b), adaptive(b)) for b in (0.1, 0.5, 1.0)},
    **{f"top_k bucket {k}": Form(TopK(k=k, tail="bucket"), bucketed(k), k) for k in (1, 4, V)},
    **{f"top_k unnormalised {k}": Form(TopK(k=k, tail="unnormalised"), generalised(k), k) for k in (1, 4, V)},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
WHOLE = {name: form for name, form in FORMS.items() if form.has_whole_gradient}
every_whole_form = pytest.mark.parametrize("form", WHOLE.values(), ids=WHOLE.keys())
"""Those of adaptive_kl have finite differences of their own, at a fixed share: test_adaptive_kl.py."""
CHUNKS = [1, 7, 128, N]


@dataclass
class Case:
    """A student, its teachers by hidden states and heads, and which tokens count."""

    hidden: Tensor
    head: Tensor
    teachers: list[TeacherBlock]
    weight: Tensor
    token: Tensor
    rule: LogitRule = IDENTITY

    @property
    def vocab(self) -> int:
        return len(self.head)

    def logp(self) -> Tensor:
        return apply(self.rule, self.hidden @ self.head.T).log_softmax(-1)

    def logq(self) -> Tensor:
        return torch.cat([log_probs(t) for t in self.teachers])


def apply(rule: LogitRule, raw: Tensor) -> Tensor:
    """transformers: Cohere scales, Gemma caps."""
    raw = raw * rule.scale
    return raw if rule.softcap is None else torch.tanh(raw / rule.softcap) * rule.softcap


def log_probs(t: TeacherBlock) -> Tensor:
    return apply(t.rule, t.hidden_N_E @ t.head_V_E.T).log_softmax(-1)


def case(
    dtype: torch.dtype = torch.float64,
    sizes: Sequence[int] = (5, 9, 3),
    vocab: int = V,
    rules: tuple[LogitRule, LogitRule] = (IDENTITY, IDENTITY),
    seed: int = 3,
) -> Case:
    """One teacher a size, of growing width; every fifth token carries no loss."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    num = sum(sizes)
    teachers = [TeacherBlock(rand(n, D + 2 * i), rand(vocab, D + 2 * i), rules[1]) for i, n in enumerate(sizes)]
    weight = torch.rand(num, generator=gen, dtype=torch.float64).to(dtype) + 0.1
    weight[::5] = 0
    token = torch.randint(vocab, (num,), generator=gen)
    return Case(rand(num, D).requires_grad_(), rand(vocab, D).requires_grad_(), teachers, weight, token, rules[0])


def top_blocks(logq: Tensor, k: int) -> list[Block]:
    top = logq.topk(k)
    return [TopKBlock(top.indices, top.values)]


def blocks(c: Case, form: Form) -> list[Block]:
    """Return the blocks that teachers send for this objective."""
    return top_blocks(c.logq(), form.k) if form.k else list(c.teachers)


def run(c: Case, objective: Objective, teachers: Sequence[Block], chunk: int = 7) -> tuple[Tensor, TokenStats]:
    return chunked_objective(
        objective, c.hidden, c.head, teachers, c.weight, c.token, chunk=chunk, vocab_size=c.vocab, rule=c.rule
    )


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of, retain_graph=True))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def slope(value: Callable[[], float], of: Tensor, way: Tensor, step: float = 1e-5) -> float:
    """Central finite difference along a way of the shape of `of`."""
    start = of.data.clone()
    of.data.add_(way, alpha=step)
    above = value()
    of.data.copy_(start).sub_(way, alpha=step)
    below = value()
    of.data.copy_(start)
    return (above - below) / (2 * step)


def assert_gradients_are_differences(c: Case, objective: Objective, teachers: Sequence[Block], chunk: int) -> None:
    """Each number of both gradients."""
    loss, _ = run(c, objective, teachers, chunk)
    for param, grad in zip((c.hidden, c.head), gradients(loss, c.hidden, c.head), strict=True):
        numeric = torch.zeros_like(param).detach()
        for i in range(param.numel()):
            way = torch.zeros_like(numeric)
            way.view(-1)[i] = 1
            with torch.no_grad():
                numeric.view(-1)[i] = slope(lambda: float(run(c, objective, teachers, chunk)[0]), param, way)
        assert float(numeric.norm()) > 0.01, "nothing to compare"
        assert relative(grad, numeric) < 1e-6
        assert float((grad - numeric).abs().max()) < 1e-6 * float(numeric.abs().max())


def assert_gradients_are_slopes(c: Case, objective: Objective, teachers: Sequence[Block], chunk: int) -> None:
    """Random sums of the gradients' numbers: twelve see what one for each number does, in a tenth of the time."""
    loss, _ = run(c, objective, teachers, chunk)
    gen = torch.Generator().manual_seed(3)
    for param, grad in zip((c.hidden, c.head), gradients(loss, c.hidden, c.head), strict=True):
        assert float(grad.norm()) > 0.01, "nothing to compare"
        for _ in range(12):
            way = torch.randn(param.shape, generator=gen, dtype=param.dtype)
            way /= way.norm()
            with torch.no_grad():
                found = slope(lambda: float(run(c, objective, teachers, chunk)[0]), param, way)
            assert abs(float((grad * way).sum()) - found) < 1e-7 * float(grad.norm())


def assert_is(c: Case, loss: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Same value, same gradients."""
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=tolerance, abs=tolerance)
    for found, want in zip(gradients(loss, c.hidden, c.head), gradients(wanted, c.hidden, c.head), strict=True):
        assert relative(found, want) < tolerance


# Gradients


@every_whole_form
@pytest.mark.parametrize("rules", RULES, ids=RULE_NAMES)
def test_gradients_are_the_finite_differences_of_the_loss(form: Form, rules: tuple[LogitRule, LogitRule]) -> None:
    c = case(rules=rules)
    assert_gradients_are_differences(c, form.objective, blocks(c, form), chunk=7)


@every_whole_form
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_size_gives_the_finite_differences(form: Form, chunk: int) -> None:
    # A small vocabulary and few tokens: all forms times all chunk sizes.
    c = case(sizes=(3, 4), vocab=V)
    assert_gradients_are_slopes(c, form.objective, blocks(c, form), chunk)


@every_form
@pytest.mark.parametrize("rules", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("chunk", [1, 7, 128, 210])
def test_float32_gradients_are_those_of_the_formula(form: Form, rules: Any, chunk: int) -> None:
    c = case(torch.float32, (70, 129, 11), rules=rules)
    loss, stats = run(c, form.objective, blocks(c, form), chunk)
    value = form.formula(c.logp(), c.logq())
    assert_is(c, loss, (c.weight * value).sum(), 1e-5)
    torch.testing.assert_close(stats.kl_N, value.detach(), rtol=1e-4, atol=1e-5)


@every_form
def test_float64_gradients_are_those_of_the_formula(form: Form) -> None:
    c = case(rules=(STUDENT_RULE, TEACHER_RULE))
    loss, stats = run(c, form.objective, blocks(c, form))
    value = form.formula(c.logp(), c.logq())
    assert_is(c, loss, (c.weight * value).sum(), 1e-9)
    torch.testing.assert_close(stats.kl_N, value.detach(), rtol=1e-9, atol=1e-10)


@every_form
def test_the_incoming_gradient_scales_both(form: Form) -> None:
    c = case()
    once = gradients(run(c, form.objective, blocks(c, form))[0], c.hidden, c.head)
    scaled = gradients(run(c, form.objective, blocks(c, form))[0] * -3, c.hidden, c.head)
    for a, b in zip(once, scaled, strict=True):
        torch.testing.assert_close(a * -3, b)


@every_form
def test_what_a_teacher_says_on_tokens_without_weight_does_not_matter(form: Form) -> None:
    c = case()
    given = blocks(c, form)
    clean, _ = run(c, form.objective, given)
    want = gradients(clean, c.hidden, c.head)
    start = 0
    for block in given:
        quiet = c.weight[start : start + len(block)] == 0
        (block.logprob_N_K if isinstance(block, TopKBlock) else block.hidden_N_E)[quiet] = torch.nan  # type: ignore[union-attr]
        start += len(block)
    loss, _ = run(c, form.objective, given)
    torch.testing.assert_close(loss, clean)
    for found, w in zip(gradients(loss, c.hidden, c.head), want, strict=True):
        torch.testing.assert_close(found, w)


# Values


def mild(c: Case) -> Case:
    """Log-ratios of a few nats at most, for limits that are reached slowly where p and q differ much."""
    with torch.no_grad():
        c.hidden *= 0.4
        for t in c.teachers:
            t.hidden_N_E.mul_(0.4)
    return c


@every_form
def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient(form: Form) -> None:
    c = case(sizes=(N,))
    c.teachers = [TeacherBlock(c.hidden.detach().clone(), c.head.detach().clone())]
    loss, stats = run(c, form.objective, blocks(c, form))
    assert float(stats.kl_N.abs().max()) < 1e-9
    for grad in gradients(loss, c.hidden, c.head):
        assert float(grad.abs().max()) < 1e-9


@every_form
def test_every_divergence_is_positive_and_finite(form: Form) -> None:
    for seed in range(5):
        c = case(torch.float32, seed=seed)
        _, stats = run(c, form.objective, blocks(c, form))
        assert float(stats.kl_N.min()) > 0
        with torch.no_grad():
            c.hidden *= 40  # log-probs down to some hundred nats
        loss, stats = run(c, form.objective, blocks(c, form))
        assert bool(stats.kl_N.isfinite().all())
        assert all(bool(g.isfinite().all()) for g in gradients(loss, c.hidden, c.head))


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jensen_shannon_is_bounded_and_symmetric(beta: float) -> None:
    bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    for scale in (0.1, 1.0, 30.0):
        c = case(sizes=(N,))
        with torch.no_grad():
            c.hidden *= scale
        _, stats = run(c, JSD(beta=beta), c.teachers)
        assert float(stats.kl_N.min()) > 0
        assert float(stats.kl_N.max()) < bound + 1e-12
        turned = Case(
            c.teachers[0].hidden_N_E, c.teachers[0].head_V_E, [TeacherBlock(c.hidden.detach(), c.head.detach())],
            c.weight, c.token,
        )  # fmt: skip
        torch.testing.assert_close(run(turned, JSD(beta=1 - beta), turned.teachers)[1].kl_N, stats.kl_N)


@pytest.mark.parametrize(("limit", "divergence"), [(0.0, ForwardKL()), (1.0, ReverseKL())])
def test_jensen_shannon_over_its_weight_tends_to_the_two_kls(limit: float, divergence: Objective) -> None:
    # GKD: lim JSD_beta / beta = KL(teacher || student) as beta -> 0, and mirrored.
    c = mild(case())
    want = run(c, divergence, c.teachers)
    torch.testing.assert_close(run(c, JSD(beta=limit), c.teachers)[0], want[0])
    small = 1e-6
    _, stats = run(c, JSD(beta=abs(limit - small)), c.teachers)
    torch.testing.assert_close(stats.kl_N / small, want[1].kl_N, rtol=1e-3, atol=1e-4)


def test_skew_tends_to_reverse_kl() -> None:
    c = mild(case())
    exact, stats = run(c, ReverseKL(), c.teachers)
    want = gradients(exact, c.hidden, c.head)
    errors = []
    for alpha in (1e-2, 1e-4, 1e-6):
        loss, skew = run(c, Skew(alpha=alpha), c.teachers)
        assert bool((skew.kl_N < stats.kl_N).all())
        errors.append(max(relative(g, w) for g, w in zip(gradients(loss, c.hidden, c.head), want, strict=True)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3
    assert float((skew.kl_N - stats.kl_N).abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("objective", "pull"),
    [(ReverseKL(), 0.0), (JSD(0.5), 0.0), (Skew(0.1), 0.0), (ForwardKL(), 1.0), (AdaptiveKL(0.2), 1.0)],
    ids=repr,
)
def test_only_forward_and_adaptive_kl_lift_what_a_student_sure_of_something_else_never_writes(
    objective: Objective, pull: float
) -> None:
    """By how much a unit step down the gradient raises the logit of the teacher's token."""
    wrong, right = torch.eye(V, dtype=torch.float64)[:2] * 20
    student_1_V = wrong[None].clone().requires_grad_()
    one_to_one = torch.eye(V, dtype=torch.float64)  # a head whose logits are the hidden state
    weight, token = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    teacher = TeacherBlock(right[None], one_to_one)
    loss, _ = chunked_objective(objective, student_1_V, one_to_one, [teacher], weight, token, chunk=1, vocab_size=V)
    assert loss.item() > 0.5
    (gradient,) = gradients(loss, student_1_V)
    assert -gradient[0, 1].item() == pytest.approx(pull, abs=1e-6)


@pytest.mark.parametrize("tail", ["bucket", "unnormalised"])
def test_all_tokens_are_exact_reverse_kl(tail: str) -> None:
    c = case()
    exact, stats = run(c, ReverseKL(), c.teachers)
    loss, top = run(c, TopK(k=V, tail=tail), top_blocks(c.logq(), V))
    torch.testing.assert_close(top.kl_N, stats.kl_N, rtol=1e-9, atol=1e-10)
    assert_is(c, loss, exact, 1e-9)


@pytest.mark.parametrize("tail", ["bucket", "unnormalised"])
def test_more_tokens_bound_the_exact_value_more_closely(tail: str) -> None:
    c = case()
    _, exact = run(c, ReverseKL(), c.teachers)
    before = torch.full_like(exact.kl_N, -math.inf)
    for k in (1, 2, 4, 8, 16, V):
        _, top = run(c, TopK(k=k, tail=tail), top_blocks(c.logq(), k))
        assert bool((top.kl_N <= exact.kl_N + 1e-9).all())
        assert bool((top.kl_N >= before - 1e-9).all())
        before = top.kl_N


@pytest.mark.parametrize("confidence", [10.0, 14.0, 17.0, 20.0, 40.0])
def test_the_bucket_stays_a_lower_bound_for_a_sure_teacher_in_float32(confidence: float) -> None:
    # 1 - Q of float32 numbers is noise of about 1e-7, while the true tail may weigh 1e-9.
    gen = torch.Generator().manual_seed(0)
    for vocab in (50, 2000):
        logits = torch.randn(64, vocab, generator=gen)
        logits[torch.arange(64), torch.randint(vocab, (64,), generator=gen)] += confidence
        logq = logits.log_softmax(-1)
        hidden, head = torch.randn(64, vocab, generator=gen), torch.eye(vocab)
        token, weight = torch.zeros(64, dtype=torch.long), torch.ones(64)
        top = logq.topk(8)
        _, stats = chunked_objective(
            TopK(k=8), hidden, head, [TopKBlock(top.indices, top.values)], weight, token, chunk=16, vocab_size=vocab
        )
        exact = reverse(hidden.double().log_softmax(-1), logits.double().log_softmax(-1))
        assert float((stats.kl_N - exact).max()) < 1e-4
        assert float(stats.kl_N.min()) > -1e-4


# Mixtures


def mixture_case(dtype: torch.dtype = torch.float64, num: int = N, rules: Any = (IDENTITY, IDENTITY)) -> Any:
    """A student and three teachers of three widths, all of whom score all tokens."""
    c = case(dtype, (num,), rules=rules)
    gen = torch.Generator().manual_seed(8)
    c.teachers = [
        TeacherBlock(
            torch.randn(num, width, generator=gen, dtype=torch.float64).to(dtype),
            torch.randn(V, width, generator=gen, dtype=torch.float64).to(dtype),
            rules[1],
        )
        for width in (4, 7, 6)
    ]
    return c, (0.5, 0.2, 0.3)


@pytest.mark.parametrize("rules", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_mixtures_gradients_are_its_finite_differences(rules: Any, chunk: int) -> None:
    c, weights = mixture_case(rules=rules)
    assert_gradients_are_slopes(c, ReverseKL(), [MixtureBlock(tuple(c.teachers), weights)], chunk)


@pytest.mark.parametrize("rules", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_mixture_is_the_weighted_sum_of_single_teachers(rules: Any, dtype: Any, tolerance: float, chunk: int) -> None:
    c, weights = mixture_case(dtype, rules=rules)
    loss, stats = run(c, ReverseKL(), [MixtureBlock(tuple(c.teachers), weights)], chunk)
    singles = [run(c, ReverseKL(), [t], chunk) for t in c.teachers]
    assert_is(c, loss, sum((w * s[0] for w, s in zip(weights, singles, strict=True)), torch.zeros(())), tolerance)
    want = sum(w * s[1].kl_N for w, s in zip(weights, singles, strict=True))
    torch.testing.assert_close(stats.kl_N, want, rtol=tolerance, atol=tolerance)
    logp = c.logp()
    plain = sum((w * reverse(logp, log_probs(t)) for w, t in zip(weights, c.teachers, strict=True)), torch.zeros(()))
    again, _ = run(c, ReverseKL(), [MixtureBlock(tuple(c.teachers), weights)], chunk)
    assert_is(c, again, (c.weight * plain).sum(), tolerance)


def test_a_teacher_without_weight_and_a_single_teacher() -> None:
    c, _ = mixture_case()
    first = c.teachers[0]
    for mixture in (MixtureBlock((first, c.teachers[1]), (1.0, 0.0)), MixtureBlock((first,), (1.0,))):
        want, _ = run(c, ReverseKL(), [first])
        assert_is(c, run(c, ReverseKL(), [mixture])[0], want, 1e-12)


def common_head(dtype: torch.dtype, rule: LogitRule = IDENTITY) -> tuple[Case, MixtureBlock]:
    c, weights = mixture_case(dtype)
    head = c.teachers[1].head_V_E
    gen = torch.Generator().manual_seed(9)
    hidden = [torch.randn(N, 7, generator=gen, dtype=torch.float64).to(dtype) for _ in weights]
    c.teachers = [TeacherBlock(h, head, rule) for h in hidden]
    return c, MixtureBlock(tuple(c.teachers), weights)


@pytest.mark.parametrize(
    "weights", [(1.5, -0.5), (-0.5, 1.5), (0.5, 0.6), (0.2, 0.2), (1.0,), (math.nan, 0.5)], ids=str
)
def test_weights_that_are_no_mixture_are_refused(weights: tuple[float, ...]) -> None:
    c, _ = mixture_case()
    with pytest.raises(AssertionError):
        MixtureBlock(tuple(c.teachers[:2]), weights)


def test_a_mixture_of_teachers_that_scored_other_tokens_is_refused() -> None:
    c, _ = mixture_case()
    short = TeacherBlock(c.teachers[0].hidden_N_E[:-1], c.teachers[0].head_V_E)
    with pytest.raises(AssertionError):
        MixtureBlock((short, c.teachers[1]), (0.5, 0.5))


# The teacher is in every gradient


def permuted(c: Case) -> Case:
    """The same, but every teacher's words are exchanged in a circle."""
    turned = [TeacherBlock(t.hidden_N_E, t.head_V_E.roll(1, 0), t.rule) for t in c.teachers]
    return Case(c.hidden, c.head, turned, c.weight, c.token, c.rule)


def moves_with_the_teacher(gradient: Callable[[Case], list[Tensor]]) -> bool:
    """True if permuting the teacher's logits changes the gradient: else there is no teacher in it."""
    c = case()
    pairs = zip(gradient(c), gradient(permuted(c)), strict=True)
    return all(relative(a, b) > 0.05 for a, b in pairs)


@every_form
def test_permuting_the_teachers_words_changes_the_gradient(form: Form) -> None:
    assert moves_with_the_teacher(lambda c: gradients(run(c, form.objective, blocks(c, form))[0], c.hidden, c.head))


def sampled_block(c: Case, baseline: Tensor | None = None) -> list[Block]:
    return [SampledBlock(c.logq().gather(1, c.token[:, None])[:, 0], baseline)]


def test_permuting_the_teachers_words_changes_the_sampled_and_mixed_gradients() -> None:
    def sampled(c: Case) -> list[Tensor]:
        c = Case(c.hidden, c.head, c.teachers, c.weight, c.token)
        loss, _ = chunked_objective(
            SampledKL(), c.hidden, c.head, sampled_block(c), c.weight, c.token, c.logp().detach()[range(N), c.token],
            chunk=7, vocab_size=V,
        )  # fmt: skip
        return gradients(loss, c.hidden, c.head)

    def mixed(c: Case) -> list[Tensor]:
        halves = tuple(TeacherBlock(t.hidden_N_E[:3], t.head_V_E) for t in c.teachers)
        whole = Case(c.hidden[:3], c.head, [], c.weight[:3], c.token[:3])
        loss, _ = run(whole, ReverseKL(), [MixtureBlock(halves, (0.2, 0.3, 0.5))])
        return gradients(loss, c.hidden, c.head)

    assert moves_with_the_teacher(sampled)
    assert moves_with_the_teacher(mixed)


def test_counter_example_k1_back_propagated_has_no_teacher_in_it() -> None:
    """The mean of log p(y) - log q(y), differentiated: the teacher is a constant and drops out."""

    def gradient(c: Case) -> list[Tensor]:
        picked = (c.logp() - c.logq()).gather(1, c.token[:, None])[:, 0]
        return gradients((c.weight * picked).sum(), c.hidden, c.head)

    assert not moves_with_the_teacher(gradient)


def expectation(c: Case, advantage: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Exact sum_y p(y) d(-A(y) log p(y)) / dhidden with A [N, V] held fixed."""
    logp = c.logp()
    fixed = (logp.exp() * advantage(logp, c.logq())).detach()
    return gradients(-(c.weight[:, None] * fixed * logp).sum(), c.hidden)[0]


def test_counter_example_a_top_k_sum_as_advantage_has_zero_expected_gradient() -> None:
    """miles 2362: one number for all actions of a state is a baseline, and teaches nothing on average."""
    c = case()
    exact = gradients((c.weight * reverse(c.logp(), c.logq())).sum(), c.hidden)[0]
    wrong = expectation(c, lambda p, q: -bucketed(4)(p, q)[:, None].expand_as(p))
    right = expectation(c, lambda p, q: q - p)
    assert float(wrong.norm()) < 1e-12 * float(exact.norm())
    assert relative(right, exact) < 1e-12


def test_counter_example_bare_truncation_rewards_mass_off_the_support() -> None:
    """verl 5041: with nothing for the tail, leaving the teacher's top tokens altogether lowers the loss below zero."""
    q = torch.tensor([[0.6, 0.3, 0.06, 0.04]], dtype=torch.float64).log()
    head, weight, token = torch.eye(4, dtype=torch.float64), torch.ones(1), torch.zeros(1, dtype=torch.long)
    loyal = torch.tensor([[0.6, 0.3, 0.06, 0.04]], dtype=torch.float64)
    leaked = torch.tensor([[0.06, 0.03, 0.5, 0.41]], dtype=torch.float64)

    def bare(p: Tensor) -> float:
        return float((p[:, :2] * (p.log() - q)[:, :2]).sum())

    def ours(p: Tensor, tail: str) -> float:
        return float(
            chunked_objective(
                TopK(k=2, tail=tail), p.log(), head, top_blocks(q, 2), weight, token, chunk=1, vocab_size=4
            )[0]
        )

    assert bare(leaked) < bare(loyal) - 0.1
    for tail in ("bucket", "unnormalised"):
        assert ours(loyal, tail) == pytest.approx(0, abs=1e-12)
        assert ours(leaked, tail) > 0.5
        # and along the whole way
        way = [ours(loyal + (leaked - loyal) * t, tail) for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
        assert way == sorted(way)


# The sampled estimate


def surrogate(
    c: Case, behaviour: Tensor, *, ratio: float | None, clip: float | None, baseline: Tensor | None
) -> Tensor:
    """-w A log p(y) with w and A held fixed."""
    logp = c.logp().gather(1, c.token[:, None])[:, 0]
    logq = c.logq().gather(1, c.token[:, None])[:, 0]
    advantage = (logq - logp).detach()
    if clip is not None:
        advantage = advantage.clamp(-clip, clip)
    weight = (logp.detach() - behaviour).exp()
    if ratio is not None:
        weight = weight.clamp(max=ratio)
    if baseline is not None:
        advantage = advantage - baseline
    return -(c.weight * weight * advantage * logp).sum()


@pytest.mark.parametrize("rules", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize(
    "options",
    [{}, {"ratio_clip": 1.1}, {"advantage_clip": 0.8}, {"ratio_clip": 1.2, "advantage_clip": 2.5}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("has_baseline", [False, True], ids=["plain", "baseline"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_sampled_gradients_are_those_of_the_surrogate(
    options: Any, rules: Any, has_baseline: bool, dtype: Any, tolerance: float
) -> None:
    c = case(dtype, rules=rules)
    own = c.logp().detach()[range(N), c.token]
    behaviour = own + 0.3 * torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    baseline = torch.randn(N, generator=torch.Generator().manual_seed(1)).to(dtype) if has_baseline else None
    for chunk in CHUNKS:
        wanted = surrogate(
            c, behaviour, ratio=options.get("ratio_clip"), clip=options.get("advantage_clip"), baseline=baseline
        )
        loss, stats = chunked_objective(
            SampledKL(**options), c.hidden, c.head, sampled_block(c, baseline), c.weight, c.token, behaviour, chunk=chunk,
            vocab_size=V, rule=c.rule,
        )  # fmt: skip
        for found, want in zip(gradients(loss, c.hidden, c.head), gradients(wanted, c.hidden, c.head), strict=True):
            assert relative(found, want) < tolerance
        k1 = own - c.logq().gather(1, c.token[:, None])[:, 0]
        torch.testing.assert_close(stats.kl_N, k1)
        assert float(loss.detach()) == pytest.approx(float((c.weight * k1).sum()), rel=1e-4)
        clipped = torch.zeros(N, dtype=torch.bool)
        if "ratio_clip" in options:
            clipped |= (own - behaviour).exp() > options["ratio_clip"]
        if "advantage_clip" in options:
            clipped |= k1.abs() > options["advantage_clip"]
        assert 0 < clipped.sum() < N or not {"ratio_clip", "advantage_clip"} & set(options)
        torch.testing.assert_close(stats.clipped_N, clipped.to(dtype))


SAMPLES, WORDS = 40_000, 6


@dataclass
class Draws:
    """Per-sample gradients of the sampled objective at one state."""

    grads: Tensor
    """[SAMPLES, WORDS]"""
    exact: Tensor
    """[WORDS] gradient of exact reverse KL."""
    stats: TokenStats

    def off(self) -> float:
        """Largest distance of the mean from the exact gradient, in standard errors."""
        mean, error = self.grads.mean(0), self.grads.std(0) / len(self.grads) ** 0.5
        return float(((mean - self.exact).abs() / error).max())


def draws(mu: Tensor | None = None, baseline: float | None = None, **options: Any) -> Draws:
    """Many samples of one state whose hidden state is its logits; `mu`: another policy's log-probs sampled them."""
    gen = torch.Generator().manual_seed(5)
    z = torch.tensor([0.8, -0.4, 0.1, 1.5, -1.0, 0.3], dtype=torch.float64)
    q = torch.tensor([-0.5, 1.9, 0.4, -1.8, 0.6, -1.2], dtype=torch.float64).log_softmax(-1)
    p = z.log_softmax(-1)
    mu = p if mu is None else mu
    token = torch.multinomial(mu.exp(), SAMPLES, replacement=True, generator=gen)
    hidden = z.repeat(SAMPLES, 1).requires_grad_()
    block = SampledBlock(q[token], None if baseline is None else torch.full((SAMPLES,), baseline, dtype=torch.float64))
    loss, stats = chunked_objective(
        SampledKL(**options), hidden, torch.eye(WORDS, dtype=torch.float64), [block],
        torch.ones(SAMPLES, dtype=torch.float64), token, mu[token], chunk=SAMPLES, vocab_size=WORDS,
    )  # fmt: skip
    exact = z.clone().requires_grad_()
    wanted = reverse(exact.log_softmax(-1)[None], q[None]).sum()
    return Draws(gradients(loss, hidden)[0], gradients(wanted, exact)[0], stats)


OTHER = torch.tensor([0.2, 0.3, -0.4, 0.6, 0.0, -0.2], dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize("mu", [None, OTHER], ids=["own samples", "another policy's"])
@pytest.mark.parametrize("baseline", [None, -0.7])
def test_the_mean_over_samples_is_the_exact_gradient(mu: Tensor | None, baseline: float | None) -> None:
    drawn = draws(mu, baseline=baseline)
    assert drawn.off() < 4
    assert float(drawn.exact.norm()) > 30 * float((drawn.grads.std(0) / SAMPLES**0.5).max()), "the test is blunt"
    assert not drawn.stats.clipped_N.any()


def test_the_test_of_the_mean_would_notice_a_wrong_weight_or_a_biased_clip() -> None:
    # The same samples, told to be the student's own: no importance weight.
    gen = torch.Generator().manual_seed(5)
    drawn = draws(OTHER)
    token = torch.multinomial(OTHER.exp(), SAMPLES, replacement=True, generator=gen)
    p = torch.tensor([0.8, -0.4, 0.1, 1.5, -1.0, 0.3], dtype=torch.float64).log_softmax(-1)
    unweighted = Draws(drawn.grads / (p - OTHER).exp()[token][:, None], drawn.exact, drawn.stats)
    assert unweighted.off() > 10
    assert draws(advantage_clip=0.5).off() > 10
    assert draws(OTHER, ratio_clip=0.8).off() > 10


def test_the_baseline_lowers_the_variance() -> None:
    plain = draws()
    mean = -float(plain.stats.kl_N.mean())
    assert float(draws(baseline=mean).grads.var(0).sum()) < 0.9 * float(plain.grads.var(0).sum())


def test_the_clip_rate_is_that_of_the_samples() -> None:
    drawn = draws(OTHER, ratio_clip=1.2, advantage_clip=2.0)
    p = torch.tensor([0.8, -0.4, 0.1, 1.5, -1.0, 0.3], dtype=torch.float64).log_softmax(-1)
    q = torch.tensor([-0.5, 1.9, 0.4, -1.8, 0.6, -1.2], dtype=torch.float64).log_softmax(-1)
    clipped = ((p - OTHER).exp() > 1.2) | ((q - p).abs() > 2.0)
    rate = float((OTHER.exp() * clipped).sum())
    assert 0.1 < rate < 0.9
    assert float(drawn.stats.clipped_N.mean()) == pytest.approx(rate, abs=4 * (rate * (1 - rate) / SAMPLES) ** 0.5)


# Numbers beside the loss


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted.to(found.dtype))


@pytest.mark.parametrize("rules", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_per_token_numbers_are_torchs(rules: Any, chunk: int) -> None:
    c = case(rules=rules)
    c.token = torch.where(torch.arange(N) % 2 == 0, c.logq().argmax(-1), c.token)
    with torch.no_grad():  # let the two agree now and then
        c.hidden[:5] = c.teachers[0].hidden_N_E
        c.head[:] = c.teachers[0].head_V_E
    _, stats = run(c, ReverseKL(), c.teachers, chunk)
    logp, logq = c.logp().detach(), c.logq()
    same(stats.logprob_N, logp[range(N), c.token])
    same(stats.entropy_N, torch.distributions.Categorical(logits=logp).entropy())
    same(stats.teacher_entropy_N, torch.distributions.Categorical(logits=logq).entropy())
    same(stats.agree_N, logp.argmax(-1) == logq.argmax(-1))
    same(stats.teacher_top1_N, c.token == logq.argmax(-1))
    assert 0 < float(stats.agree_N.mean()) < 1
    assert 0 < float(stats.teacher_top1_N.mean()) < 1
    assert bool(stats.clipped_N.isnan().all())
    assert not any(getattr(stats, name).requires_grad for name in stats.__slots__)


@pytest.mark.parametrize("rules", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_sampled_tokens_log_prob_is_that_of_the_distribution_it_was_drawn_from(
    rules: tuple[LogitRule, LogitRule], temperature: float
) -> None:
    """The temperature changes it and nothing else: neither the loss nor its gradient nor another number."""
    c = case(rules=rules)
    loss, stats = chunked_objective(
        ReverseKL(), c.hidden, c.head, c.teachers, c.weight, c.token, chunk=7, vocab_size=V, rule=c.rule,
        temperature=temperature,
    )  # fmt: skip
    logits = apply(c.rule, c.hidden @ c.head.T)
    same(stats.logprob_N, (logits / temperature).log_softmax(-1).detach()[range(N), c.token])
    want, plain = run(c, ReverseKL(), c.teachers)
    assert_is(c, loss, want, 1e-15)
    for name in stats.__slots__:
        if name != "logprob_N":
            torch.testing.assert_close(getattr(stats, name), getattr(plain, name), rtol=0, atol=0, equal_nan=True)


def test_per_token_numbers_that_top_k_knows() -> None:
    c = case()
    logp, logq = c.logp().detach(), c.logq()
    ids = logq.topk(4).indices.flip(1)  # in any order
    _, stats = run(c, TopK(k=4), [TopKBlock(ids, logq.gather(1, ids))])
    same(stats.agree_N, logp.argmax(-1) == logq.argmax(-1))
    same(stats.teacher_top1_N, c.token == logq.argmax(-1))
    same(stats.entropy_N, torch.distributions.Categorical(logits=logp).entropy())
    assert bool(stats.teacher_entropy_N.isnan().all())
    assert bool(stats.clipped_N.isnan().all())


def test_per_token_numbers_that_a_sampled_log_prob_knows() -> None:
    c = case()
    _, stats = run(c, SampledKL(), sampled_block(c))
    same(stats.entropy_N, torch.distributions.Categorical(logits=c.logp().detach()).entropy())
    for unknown in (stats.teacher_entropy_N, stats.agree_N, stats.teacher_top1_N):
        assert bool(unknown.isnan().all())
    assert not stats.clipped_N.any()


def test_a_whole_distribution_serves_the_sampled_objective_too() -> None:
    c = case(rules=(STUDENT_RULE, TEACHER_RULE))
    assert_is(c, run(c, SampledKL(), c.teachers)[0], run(c, SampledKL(), sampled_block(c))[0], 1e-12)


def test_a_mixtures_entropy_is_that_of_its_normalised_product() -> None:
    # The distribution nearest to all teachers: q proportional to prod_k q_k^w_k.
    c, weights = mixture_case()
    _, stats = run(c, ReverseKL(), [MixtureBlock(tuple(c.teachers), weights)])
    mean = sum((w * log_probs(t) for w, t in zip(weights, c.teachers, strict=True)), torch.zeros(()))
    same(stats.teacher_entropy_N, torch.distributions.Categorical(logits=mean).entropy())
    same(stats.agree_N, c.logp().argmax(-1) == mean.argmax(-1))


# Slices and tiles: how much is computed at a time changes nothing


def sampled_setup(baseline: bool) -> tuple[Case, Objective, list[Block]]:
    c = case()
    gen = torch.Generator().manual_seed(1)
    given = torch.randn(N, generator=gen, dtype=torch.float64) if baseline else None
    return c, SampledKL(ratio_clip=3.0, advantage_clip=1.5), sampled_block(c, given)


def mixture_setup(objective: Objective) -> tuple[Case, Objective, list[Block]]:
    c, weights = mixture_case(rules=(STUDENT_RULE, TEACHER_RULE))
    return c, objective, [MixtureBlock(tuple(c.teachers), weights)]


def form_setup(form: Form, rules: tuple[LogitRule, LogitRule]) -> tuple[Case, Objective, list[Block]]:
    c = case(rules=rules)
    return c, form.objective, blocks(c, form)


SETUPS: dict[str, Callable[[], tuple[Case, Objective, list[Block]]]] = {
    **{name: functools.partial(form_setup, form, RULES[0]) for name, form in FORMS.items()},
    **{f"{name}, rules": functools.partial(form_setup, form, RULES[1]) for name, form in FORMS.items()},
    "sampled": functools.partial(sampled_setup, False),
    "sampled with a baseline": functools.partial(sampled_setup, True),
    "mixture": functools.partial(mixture_setup, ReverseKL()),
    "mixture, adaptive_kl": functools.partial(mixture_setup, AdaptiveKL(0.5)),
    "mixture, sampled": functools.partial(mixture_setup, SampledKL()),
}
every_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
SMALL = {
    "a row, a row": (1, 1),
    "ragged": (2 * V + 5, 4 * D + 2),  # 7 tokens are 2 + 2 + 2 + 1; 19 rows of the head are 4 + 4 + 4 + 4 + 3
    "nearly all": (6 * V, (V - 1) * D),
}
small_sizes = pytest.mark.parametrize("sizes", SMALL.values(), ids=SMALL.keys())


def at_a_time(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]) -> None:
    """Values of a slice and of a tile from now on."""
    monkeypatch.setattr(chunked, "SLICE_VALUES", sizes[0])
    monkeypatch.setattr(chunked, "TILE_VALUES", sizes[1])


@every_setup
@small_sizes
def test_slices_and_tiles_change_no_gradient_and_no_number(
    setup: Callable[[], tuple[Case, Objective, list[Block]]], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    c, objective, given = setup()
    seen: list[int] = []
    elementwise = chunked._compute_chunk_loss

    def counted(*args: Any) -> Any:
        seen.append(len(args[1]))
        return elementwise(*args)

    monkeypatch.setattr(chunked, "_compute_chunk_loss", counted)
    at_a_time(monkeypatch, (1 << 40, 1 << 40))
    want, stats = run(c, objective, given)
    whole = list(seen)
    seen.clear()
    at_a_time(monkeypatch, sizes)
    loss, found = run(c, objective, given)
    rows = max(1, sizes[0] // V)
    assert seen == [min(rows, n - i) for n in whole for i in range(0, n, rows)]
    assert len(seen) > len(whole)
    assert_is(c, loss, want, 1e-12)
    for name in stats.__slots__:
        torch.testing.assert_close(getattr(found, name), getattr(stats, name), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", ["reverse_kl, rules", "jsd 0.5", "skew 0.1", "top_k bucket 4", "mixture"])
@small_sizes
def test_gradients_of_slices_are_finite_differences(
    name: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    c, objective, given = SETUPS[name]()
    at_a_time(monkeypatch, sizes)
    assert_gradients_are_slopes(c, objective, given, chunk=7)


@small_sizes
def test_tiles_leave_the_gradient_of_padding_rows_at_zero(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = case(sizes=(N,))
    cut = V - 4
    c.token = c.token % cut
    at_a_time(monkeypatch, sizes)
    loss, _ = chunked_objective(ReverseKL(), c.hidden, c.head, c.teachers, c.weight, c.token, chunk=7, vocab_size=cut)
    cut_off = [TeacherBlock(t.hidden_N_E, t.head_V_E[:cut]) for t in c.teachers]
    short = Case(c.hidden, c.head[:cut], cut_off, c.weight, c.token)
    wanted = (c.weight * reverse(short.logp(), short.logq())).sum()
    found = gradients(loss, c.hidden, c.head)
    for grad, want in zip(found, gradients(wanted, c.hidden, c.head), strict=True):
        assert relative(grad, want) < 1e-12
    assert not found[1][cut:].any()


# Which objectives take a mixture


@pytest.mark.parametrize("kind", sorted({*OBJECTIVES} - {"adaptive_kl"}))
def test_a_mixture_needs_an_objective_that_is_a_sum_over_teachers(kind: str) -> None:
    # What a log-measure gives is the weighted sum of the single objectives, or it is a bug to ask for it. adaptive_kl is
    # defined by the product of its teachers instead: test_adaptive_kl.py.
    objective = find_objective_section(kind).OBJECTIVE()
    c, block = common_head(torch.float64)
    if not objective.mixes:
        with pytest.raises(AssertionError):
            run(c, objective, [block])
        return
    loss, _ = run(c, objective, [block])
    singles = [run(c, objective, [t])[0] for t in c.teachers]
    assert_is(c, loss, sum((w * s for w, s in zip(block.weights, singles, strict=True)), torch.zeros(())), 1e-9)


def test_the_guard_is_needed() -> None:
    """Without it: the divergence from the normalised product is another number than the mean of the divergences."""
    c, weights = mixture_case()
    logp = c.logp().detach()
    product = sum((w * log_probs(t) for w, t in zip(weights, c.teachers, strict=True)), torch.zeros(())).log_softmax(-1)
    for form in FORMS.values():
        mean = sum(w * form.formula(logp, log_probs(t)) for w, t in zip(weights, c.teachers, strict=True))
        assert float((form.formula(logp, product) - mean).abs().min()) > 1e-6
    assert {type(f.objective) for f in FORMS.values() if not f.objective.mixes} == {ForwardKL, JSD, Skew, TopK}


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_sampled_mixture_is_the_surrogate_of_the_weighted_log_probs(chunk: int) -> None:
    c, mixture = common_head(torch.float64)
    behaviour = c.logp().detach()[range(N), c.token] + torch.linspace(-0.3, 0.3, N, dtype=torch.float64)
    logq = sum((w * log_probs(t) for w, t in zip(mixture.weights, c.teachers, strict=True)), torch.zeros(()))
    options: dict[str, Any] = {"chunk": chunk, "vocab_size": V}
    loss, stats = chunked_objective(SampledKL(), c.hidden, c.head, [mixture], c.weight, c.token, behaviour, **options)
    logp = c.logp().gather(1, c.token[:, None])[:, 0]
    k1 = logp.detach() - logq[range(N), c.token]
    torch.testing.assert_close(stats.kl_N, k1)
    wanted = (c.weight * (logp.detach() - behaviour).exp() * k1 * logp).sum()
    for found, want in zip(gradients(loss, c.hidden, c.head), gradients(wanted, c.hidden, c.head), strict=True):
        assert relative(found, want) < 1e-9


# How much of both distributions the top tokens hold


@pytest.mark.parametrize("rules", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("tail", ["bucket", "unnormalised"])
@pytest.mark.parametrize("k", [1, 4, V])
def test_masses_are_the_sums_of_probabilities_on_the_support(tail: str, k: int, rules: Any) -> None:
    c = case(rules=rules)
    ids = c.logq().topk(k).indices
    _, stats = run(c, TopK(k=k, tail=tail), top_blocks(c.logq(), k))
    same(stats.student_mass_N, c.logp().detach().exp().gather(1, ids).sum(-1))
    same(stats.teacher_mass_N, c.logq().exp().gather(1, ids).sum(-1))
    if k == V:
        same(stats.student_mass_N, torch.ones(N))
        same(stats.teacher_mass_N, torch.ones(N))
    else:
        assert bool((stats.teacher_mass_N > stats.student_mass_N).any())
        assert not torch.allclose(stats.teacher_mass_N, stats.student_mass_N, atol=0.1)


@every_setup
def test_other_objectives_know_no_masses(setup: Callable[[], tuple[Case, Objective, list[Block]]]) -> None:
    c, objective, given = setup()
    _, stats = run(c, objective, given)
    unknown = not isinstance(objective, TopK)
    assert bool((stats.student_mass_N.isnan() == unknown).all())
    assert bool((stats.teacher_mass_N.isnan() == unknown).all())


# The compiled path, without a compiler


@pytest.mark.parametrize("objective", [ReverseKL(), JSD(), AdaptiveKL(), SampledKL()], ids=str)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("rows", [1, 2, 1000], ids=lambda n: f"slices of {n}")
def test_the_padding_for_the_compiled_loss_changes_nothing(
    objective: Objective, chunk: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = set()

    def elementwise(*args: Any) -> Any:
        shapes.add(args[1].shape)
        return chunked._compute_chunk_loss(*args)

    monkeypatch.setattr(chunked, "can_compile", lambda *_, **__: True)
    monkeypatch.setattr(chunked, "_compile_elementwise", lambda any_rows: elementwise)
    c = case(rules=(STUDENT_RULE, TEACHER_RULE))
    want, stats = run(c, objective, c.teachers, chunk)
    monkeypatch.setattr(chunked, "SLICE_VALUES", rows * V + V // 2)
    loss, found = chunked_objective(
        objective, c.hidden, c.head, c.teachers, c.weight, c.token, chunk=chunk, vocab_size=V, rule=c.rule,
        compiled=True,
    )  # fmt: skip
    assert shapes == {(min(chunk, rows), V)}, "one shape, so that it compiles once"
    assert_is(c, loss, want, 1e-12)
    for name in stats.__slots__:
        torch.testing.assert_close(getattr(found, name), getattr(stats, name), equal_nan=True)


@every_setup
def test_every_payload_can_be_padded(
    setup: Callable[[], tuple[Case, Objective, list[Block]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = set()

    def elementwise(*args: Any) -> Any:
        rows.add(len(args[1]))
        return chunked._compute_chunk_loss(*args)

    monkeypatch.setattr(chunked, "can_compile", lambda *_, **__: True)
    monkeypatch.setattr(chunked, "_compile_elementwise", lambda any_rows: elementwise)
    c, objective, given = setup()
    want, stats = run(c, objective, given)
    loss, found = chunked_objective(
        objective, c.hidden, c.head, given, c.weight, c.token, chunk=6, vocab_size=V, rule=c.rule, compiled=True
    )
    assert rows == {6}
    assert_is(c, loss, want, 1e-12)
    for name in stats.__slots__:
        torch.testing.assert_close(getattr(found, name), getattr(stats, name), equal_nan=True)


@pytest.mark.parametrize("compiled", [True, False, "auto"])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_auto_compiles_on_a_gpu_alone(compiled: Any, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def refuse(key: str, action: str, *, on_gpu: bool) -> bool:
        asked.append(on_gpu)
        return False

    monkeypatch.setattr(chunked, "_runs_on_gpu", lambda values: on_gpu)
    monkeypatch.setattr(chunked, "can_compile", refuse)
    c = case()
    chunked_objective(
        ReverseKL(), c.hidden, c.head, c.teachers, c.weight, c.token, chunk=99, vocab_size=V, compiled=compiled
    )
    assert set(asked) == ({on_gpu} if compiled is True or (on_gpu and compiled == "auto") else set())


def test_without_a_compiler_the_loss_runs_eagerly_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    can_compile.cache_clear()
    c = case()
    with pytest.warns(UserWarning, match=r"objective\.compile: no C\+\+ compiler"):
        loss, _ = chunked_objective(
            ReverseKL(), c.hidden, c.head, c.teachers, c.weight, c.token, chunk=7, vocab_size=V, compiled=True
        )
    assert_is(c, loss, run(c, ReverseKL(), c.teachers)[0], 1e-12)
    can_compile.cache_clear()


# Input that does not fit


@pytest.mark.parametrize("who", ["student", "teacher", "mixture"])
def test_a_width_that_does_not_fit_is_refused_by_name(who: str) -> None:
    c, _ = mixture_case()
    bad = TeacherBlock(c.teachers[0].hidden_N_E, c.teachers[1].head_V_E)
    given: dict[str, Block] = {
        "student": c.teachers[0],
        "teacher": bad,
        "mixture": MixtureBlock((c.teachers[1], bad), (0.5, 0.5)),
    }
    if who == "student":
        c.hidden = torch.zeros(N, D + 1, dtype=torch.float64)
    found = "student: hidden states of width 6, output head of width 5"
    with pytest.raises(ValueError, match=found if who == "student" else "teacher: .* width 4, output head of width 7"):
        run(c, ReverseKL(), [given[who]])


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_without_tokens_is_a_bug_of_the_caller(chunk: int) -> None:
    c = case()
    with pytest.raises(AssertionError):
        run(c, ReverseKL(), c.teachers, chunk)


# By name


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, AdaptiveKL(0.2)),
        ({"kind": "reverse_kl", "chunk": 3}, ReverseKL()),
        ({"kind": "forward_kl", "normalize": "sequence_mean"}, ForwardKL()),
        ({"kind": "adaptive_kl"}, AdaptiveKL(0.2)),
        ({"kind": "adaptive_kl", "bound": 1}, AdaptiveKL(1.0)),
        ({"kind": "jsd"}, JSD(0.5)),
        ({"kind": "jsd", "beta": 0.9}, JSD(0.9)),
        ({"kind": "skew", "alpha": 0.2}, Skew(0.2)),
        ({"kind": "sampled"}, SampledKL()),
        (
            {"kind": "sampled", "ratio_clip": 2, "advantage_clip": 5, "baseline": "leave_one_out"},
            SampledKL(2, 5),
        ),
        ({"kind": "top_k", "k": 8, "tail": "unnormalised"}, TopK(8, "unnormalised")),
    ],
    ids=str,
)
def test_an_objective_gets_its_own_options(options: dict[str, Any], want: Objective) -> None:
    from opd.config import PipelineConfig

    payload = {"sampled": "sampled_logprobs", "top_k": "top_k"}.get(options.get("kind", ""), "hidden_states")
    config = validate_section(
        PipelineConfig,
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "teachers": {"payload": payload},
            "objective": options,
            "trainer": {"steps": 1, "samples_per_step": 1},
        },
        "p.yaml",
    )
    assert config.objective.build() == want


def test_no_divergence_is_zero_and_has_no_slope() -> None:
    c, _ = mixture_case()
    loss, stats = run(c, NoDivergence(), [UnscoredBlock(2), UnscoredBlock(N - 2)])
    assert float(loss) == 0 and not any(grad.any() for grad in gradients(loss, c.hidden, c.head))
    assert stats.teacher_entropy_N.isnan().all() and stats.agree_N.isnan().all()
    assert torch.allclose(stats.logprob_N, c.logp().detach()[range(N), c.token])


def test_every_objective_is_tested_here() -> None:
    tested = {type(form.objective) for form in FORMS.values()} | {SampledKL, NoDivergence}
    tested |= {AlignedKL, CrossEntropy}  # in test_aligned_kl.py and test_sft.py
    assert tested == {find_objective_section(kind).OBJECTIVE for kind in OBJECTIVES}
