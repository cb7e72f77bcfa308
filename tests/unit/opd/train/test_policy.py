"""The policy gradient's mean is over the step's own tokens, however they are cut, and its gradient can be told from the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from opd.losses.policy_gradient import PolicyGradient
from opd.losses.reverse_kl import ReverseKL
from opd.records.rewards import GradientSums, PolicyReport, PolicyStats, RewardStep
from opd.stream.schema import write_stream
from opd.train import rank
from opd.train.batch import build_micro_batch
from opd.train.components import Component
from opd.train.deepspeed import _make_policy_report, _scored_share
from opd.train.plan import RowSize, plan_micro_batches
from opd.train.policy import GradientComparison, make_policy_component
from opd.train.rank import RankWork
from opd.train.student import Student
from opd.train.totals import RankPolicy, token_weights, weigh_rows
from tests.unit.opd.train.test_totals import DOMAIN_WEIGHTS, ROWS, STEP, heads

REWARDED = ("b", "e", "f")
"""Samples that take part; `a` lies in a domain of theirs and has no reward, `c` and `d` lie in another."""


def asked(**changes: Any) -> RewardStep:
    rng = np.random.default_rng(0)
    advantages = {
        r.sample_id: rng.normal(size=r.num_trained).astype(np.float32) for r in STEP if r.sample_id in REWARDED
    }
    return RewardStep(**{"weight": 0.5, "advantages": advantages} | changes)


def work(**changes: Any) -> Component:
    found = make_policy_component(asked(**changes), STEP, DOMAIN_WEIGHTS)
    assert found is not None
    return found


def both(divergence: dict[str, float]) -> dict[str, Component]:
    return {"divergence": Component(weights=divergence), "policy": work()}


def test_the_mean_is_over_the_tokens_that_have_an_advantage() -> None:
    total = 2.0 * 5 + 0.5 * 30 + 1.0 * 7
    assert work().weights == pytest.approx({"b": 2.0 / total, "e": 0.5 / total, "f": 1.0 / total})
    assert work().factor == 0.5


def test_without_such_tokens_there_is_no_policy_gradient() -> None:
    assert make_policy_component(None, STEP, {}) is None
    assert make_policy_component(asked(advantages={}), STEP, {}) is None
    untrained = {"d": np.zeros(0, np.float32)}  # it has a reward, and no trained token
    assert make_policy_component(asked(advantages=untrained), STEP, {}) is None


def test_a_rank_gets_what_belongs_to_its_samples() -> None:
    whole = RankWork(
        step=1, lr=0.1, micro_batches=(), components=both(weigh_rows(STEP, "token_mean", {})), stale=frozenset("be"),
        compare=True, baselines=dict.fromkeys("abcdef", 1.0),
    )  # fmt: skip
    part = whole.select_micro_batches([["b", "a"], ["f"]])
    assert (
        part.micro_batches == (("b", "a"), ("f",))
        and set(part.components["divergence"].weights) == set("abf")
        and part.stale == {"b"}
    )
    policy = part.components["policy"]
    assert set(policy.weights) == set(policy.columns["advantage"]) == {"b", "f"}
    assert part.baselines == dict.fromkeys("abf", 1.0)
    assert (part.compare, policy.factor) == (True, 0.5)
    alone = dataclasses.replace(whole, baselines=None).select_micro_batches([["c"]])
    assert not alone.components["policy"].weights and alone.baselines is None


@pytest.fixture(scope="module")
def student(tiny_model_dir: Any) -> Student:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="sdpa")
    return Student(lm, ReverseKL(), chunk=5, vocab_size=76, policy=PolicyGradient(low=0.99, high=1e4))


def trained(student: Student, cuts: Sequence[Sequence[str]], given: Component) -> tuple[RankPolicy, torch.Tensor]:
    """All micro-batches one after the other, as ranks do, and the accumulated gradient of both streams."""
    student.zero_grad()
    totals = RankPolicy()
    weights = weigh_rows(STEP, "token_mean", {})
    for ids in cuts:
        batch = build_micro_batch([(ROWS[i],) for i in ids], torch.float32)
        weight = given.token_weights(batch, ids)
        divergence = token_weights(batch, [weights[i] for i in ids])
        scaled = {"divergence": divergence, "policy": weight * given.factor}
        loss, stats = student(batch, heads(), scaled, given.token_columns(batch, ids))
        loss.backward()
        totals.add(batch, weight, stats)
    return totals, torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])


def test_the_cut_into_ranks_and_micro_batches_does_not_matter(student: Student) -> None:
    sizes = [RowSize(r.sample_id, r.domain, len(r.prompt_ids) + len(r.response_ids)) for r in STEP]
    planned = [[ids for part in plan_micro_batches(sizes, ranks, 32) for ids in part] for ranks in (1, 2, 5)]
    want, want_grad = trained(student, [list("abcdef")], work())
    assert want.weight == pytest.approx(5 * work().weights["b"] + 30 * work().weights["e"] + 7 * work().weights["f"])
    assert want.weight == pytest.approx(1.0), "it is a mean"
    plain, without = trained(student, [list("abcdef")], work(weight=0.0))
    assert float((want_grad - without).norm()) > 1e-2 * float(without.norm()), "the reward counts"
    assert plain.loss == want.loss, "the stream's weight is not in its own curve"
    for cuts in [*planned, [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]], [["f", "a"], [], ["e", "d", "c", "b"]]]:
        totals, grad = trained(student, cuts, work())
        assert totals.loss == pytest.approx(want.loss, rel=1e-6, abs=1e-6)
        assert float((grad - want_grad).norm()) < 1e-6 * float(want_grad.norm())
        assert {d: (s.tokens, s.masked) for d, s in totals.domains.items()} == {
            d: (s.tokens, s.masked) for d, s in want.domains.items()
        }
    assert {d: s.tokens for d, s in want.domains.items()} == {"math": 5, "code": 30, "chat": 7}


def test_tokens_of_samples_that_take_no_part_count_nowhere(student: Student) -> None:
    totals, _ = trained(student, [["a", "c"]], work())
    assert (totals.loss, totals.weight, totals.domains) == (0.0, 0.0, {})


def test_masked_tokens_are_counted_by_domain(tiny_model_dir: Any) -> None:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    narrow = Student(lm, ReverseKL(), chunk=5, vocab_size=76, policy=PolicyGradient(low=1e-9, high=1e-9))
    totals, _ = trained(narrow, [list("abcdef")], work())
    assert {d: s.masked for d, s in totals.domains.items()} == {"math": 5, "code": 30, "chat": 7}
    assert totals.loss == 0.0


# The two gradients apart


def test_the_policy_gradient_is_told_from_the_sum() -> None:
    gen = torch.Generator().manual_seed(0)

    def some() -> list[torch.Tensor]:
        return [torch.randn(n, generator=gen) for n in (5, 3)]

    total = [torch.zeros(5), torch.zeros(3)]
    divergence, policy = [torch.zeros(5), torch.zeros(3)], [torch.zeros(5), torch.zeros(3)]
    comparison = GradientComparison()
    for _ in range(3):
        d, p = some(), some()
        before = [t + x for t, x in zip(total, d, strict=True)]
        total = [t + x for t, x in zip(before, p, strict=True)]
        comparison.begin(before)
        comparison.note_after_pass(total)
        divergence = [t + x for t, x in zip(divergence, d, strict=True)]
        policy = [t + x for t, x in zip(policy, p, strict=True)]
    found = comparison.compare_gradients(total, 0.5)
    d, p = torch.cat(divergence) / 0.5, torch.cat(policy) / 0.5
    assert found.divergence_sq == pytest.approx(float(d.square().sum()), rel=1e-4)
    assert found.policy_sq == pytest.approx(float(p.square().sum()), rel=1e-4)
    assert found.dot == pytest.approx(float(d @ p), rel=1e-4)


def test_ranks_add_up() -> None:
    def part(loss: float, weight: float, dot: float) -> RankPolicy:
        domains = trained_domains(loss)
        compared = GradientSums(divergence_sq=1.0, policy_sq=2.0, dot=dot)
        return RankPolicy(loss=loss, weight=weight, domains=domains, compared=compared)

    found = _make_policy_report([part(0.25, 0.5, 1.0), part(0.5, 0.25, -3.0)])
    assert found == PolicyReport(
        loss=1.0, domains=trained_domains(0.75, 2), compared=GradientSums(divergence_sq=2.0, policy_sq=4.0, dot=-2.0)
    ), "what could not be scored is not in the mean"
    assert _make_policy_report([]) is None


def trained_domains(loss: float, ranks: int = 1) -> dict[str, Any]:
    return {"d": PolicyStats(tokens=ranks, loss_sum=loss, masked=ranks)}


class Passes:
    """Stands for DeepSpeed around a student: keeps what every pass was asked for."""

    def __init__(self, student: Student) -> None:
        self.student = student
        self.seen: list[tuple[bool, bool]] = []
        """Marks of each pass: the divergence had weight, and there was a reward."""

    def __call__(self, batch: Any, known: Any, weights: dict[str, torch.Tensor], *more: Any) -> Any:
        self.seen.append((bool(weights["divergence"].any()), "policy" in weights))
        return self.student(batch, heads(), weights, *more)


class Rank(rank.TrainerRank):
    """A rank without DeepSpeed."""

    def __init__(self, student: Student) -> None:
        names = ["world_size", "vocab_size", "turn_weights", "domain_objectives", "end_token_ids", "indexers"]
        self._options: Any = dataclasses.make_dataclass("Options", names)(1, 76, {}, {}, (), None)
        self._device = torch.device("cpu")
        self._layout = "packed"
        self._companions = {}
        self._base_scorer = None
        self._averages = {}
        self._sequence_group = None
        self._engine = Passes(student)
        self._student = student
        self.lasts: list[bool] = []

    def _fetch_head(self, source: Any) -> Any:
        return source

    def add_gradients(self, loss: torch.Tensor, *, last: bool) -> None:
        self.lasts.append(last)
        loss.backward()  # type: ignore[no-untyped-call]

    def local_gradients(self) -> list[torch.Tensor]:
        return [torch.cat([p.grad.flatten() for p in self._student.parameters() if p.grad is not None])]


def result(one: Rank, share: float) -> RankPolicy | None:
    """Return the rank's figures of the policy gradient, without an optimiser that steps."""
    one.take_step = lambda *args: 1.0  # type: ignore[method-assign]
    return one.finish_step(share).policy


@pytest.mark.parametrize("compare", [False, True])
def test_a_step_that_compares_ends_with_the_same_gradient(compare: bool, student: Student) -> None:
    """Two passes for each micro-batch, first the divergence and then the reward, for the gradient of one."""
    cuts = (tuple("ab"), tuple("fedc"))
    student.zero_grad()
    one = Rank(student)
    weights = weigh_rows(STEP, "token_mean", {})
    whole = RankWork(step=1, lr=0.1, micro_batches=(), components=both(weights), compare=compare)
    one.begin_step(whole.select_micro_batches(cuts), heads())  # type: ignore[arg-type]
    part = np.frombuffer(write_stream(list(ROWS.values()), "float32"), dtype=np.uint8)
    one.accumulate_micro_batch(0, frozenset(), part)
    one.accumulate_micro_batch(1, frozenset())
    assert one._engine.seen == ([(True, False), (False, True)] * 2 if compare else [(True, True)] * 2)
    assert one.lasts == ([False, False, False, True] if compare else [False, True])
    (found,) = one.local_gradients()
    sums = result(one, 1.0)
    assert sums is not None and sums.weight == pytest.approx(1.0)
    totals, want = trained(student, cuts, work())
    assert float((found - want).norm()) < 1e-6 * float(want.norm())
    assert sums.loss == pytest.approx(totals.loss)
    if not compare:
        assert sums.compared is None
        return
    _, divergence = trained(student, cuts, work(weight=0.0))
    assert sums.compared is not None
    assert sums.compared.divergence_sq**0.5 == pytest.approx(float(divergence.norm()), rel=1e-4)
    assert sums.compared.policy_sq**0.5 == pytest.approx(float((want - divergence).norm()), rel=1e-4)


# What teachers could not score


@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("lost", ["e", "a", "cf"])
def test_each_stream_is_a_mean_over_what_was_scored_of_its_own(lost: str, compare: bool, tiny_model_dir: Any) -> None:
    """As if the responses that no teacher could score had not been in the step, in float64."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64, attn_implementation="sdpa")
    student = Student(lm, ReverseKL(), chunk=5, vocab_size=76, policy=PolicyGradient(low=0.99, high=1e4))
    cuts, left_out = (tuple("ab"), tuple("fe"), tuple("dc")), frozenset(lost)
    left = [r for r in STEP if r.sample_id not in left_out]

    one = Rank(student)
    weights = weigh_rows(STEP, "token_mean", DOMAIN_WEIGHTS)
    asks = RankWork(step=1, lr=0.1, micro_batches=cuts, components=both(weights), compare=compare)
    one.begin_step(asks, heads())  # type: ignore[arg-type]
    rows = [row for i, row in ROWS.items() if i not in left_out]
    one.accumulate_micro_batch(0, left_out, np.frombuffer(write_stream(rows, "float32"), dtype=np.uint8))
    for index in (1, 2):
        one.accumulate_micro_batch(index, left_out)
    share, own_share = (_scored_share(STEP, of, left_out) for of in (weights, work().weights))
    assert share != pytest.approx(own_share, rel=0.01)
    for index in range(3):
        one.rescale(index, {"policy": share / own_share - 1})
    assert one.lasts == [False] * (len(one.lasts) - 1) + [True], "the optimiser steps once, after all of it"
    (summed,) = one.local_gradients()

    student.zero_grad()
    own = make_policy_component(asked(), left, DOMAIN_WEIGHTS)
    assert own is not None
    batch = build_micro_batch([(ROWS[r.sample_id],) for r in left], torch.float32)
    ids = [r.sample_id for r in left]
    weight, columns = own.token_weights(batch, ids) * own.factor, own.token_columns(batch, ids)
    divergence = token_weights(batch, [weigh_rows(left, "token_mean", DOMAIN_WEIGHTS)[i] for i in ids])
    loss, _ = student(batch, heads(), {"divergence": divergence, "policy": weight}, columns)
    loss.backward()
    (want,) = one.local_gradients()
    torch.testing.assert_close(summed / share, want, rtol=1e-5, atol=1e-8)
    if compare:
        sums = result(one, share)
        student.zero_grad()
        student(batch, heads(), {"divergence": 0 * divergence, "policy": weight}, columns)[0].backward()
        (alone,) = one.local_gradients()
        assert sums is not None and sums.compared is not None
        assert sums.compared.policy_sq**0.5 == pytest.approx(float(alone.norm()), rel=1e-4)
