"""The loss is a mean that depends on the step's responses alone, not on how they are cut up."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from opd.errors import RunError
from opd.losses.chunked import TokenStats
from opd.losses.reverse_kl import ReverseKL
from opd.models.heads import Head
from opd.models.logit_rule import IDENTITY
from opd.records.types import DomainStats, Rollout
from opd.stream.schema import TargetRow
from opd.train.batch import build_micro_batch
from opd.train.plan import RowSize, plan_micro_batches
from opd.train.student import Student
from opd.train.totals import (
    Totals,
    mean_drift,
    mean_gap,
    refuse_gap,
    refuse_impossible_means,
    token_weights,
    weigh_rows,
)
from tests.rows import make_rollout, make_row

WIDTH = 64


def rollout(sample_id: str, domain: str, segments: Sequence[tuple[int, bool]]) -> Rollout:
    rng = random.Random(sample_id)
    num = sum(n for n, _ in segments)
    return make_rollout(
        sample_id=sample_id, step=1, domain=domain, policy_version=0,
        prompt_ids=tuple(rng.choices(range(76), k=rng.randint(1, 9))),
        response_ids=tuple(rng.choices(range(76), k=num)),
        behaviour_logprobs=tuple(-rng.random() for _ in range(num)),
        loss_mask=[t for n, t in segments for _ in range(n)],
    )  # fmt: skip


STEP = [
    rollout("a", "math", [(10, True)]),
    rollout("b", "math", [(3, True), (4, False), (2, True)]),
    rollout("c", "code", [(1, True)]),
    rollout("d", "code", [(6, False)]),
    rollout("e", "code", [(30, True)]),
    rollout("f", "chat", [(7, True)]),
]
TOKENS = {"a": 10, "b": 5, "c": 1, "d": 0, "e": 30, "f": 7}
DOMAIN_WEIGHTS = {"math": 2.0, "code": 0.5}  # chat: 1


def test_a_token_mean_counts_every_trained_token_once() -> None:
    weights = weigh_rows(STEP, "token_mean", {})
    assert weights == pytest.approx({i: 1 / 53 if n else 0 for i, n in TOKENS.items()})


def test_a_sequence_mean_counts_every_response_once() -> None:
    weights = weigh_rows(STEP, "sequence_mean", {})
    assert weights == pytest.approx({i: 1 / (5 * n) if n else 0 for i, n in TOKENS.items()})
    assert weights["a"] * 10 == pytest.approx(weights["c"] * 1)


def test_a_sequence_mean_counts_a_compacted_episode_once() -> None:
    """One response of 40 tokens, and one that went on in three more segments, the third of them a sub-agent's of another domain."""
    parts = [("e", "math", 10), ("e.1", "math", 20), ("e.2", "code", 5), ("e.3", "math", 5)]
    episode = [dataclasses.replace(rollout(i, domain, [(n, True)]), episode="e") for i, domain, n in parts]
    step = [*episode, rollout("f", "math", [(40, True)]), rollout("g", "math", [(2, False)])]
    weights = weigh_rows(step, "sequence_mean", {})
    assert weights == pytest.approx(dict.fromkeys(("e", "e.1", "e.2", "e.3", "f"), 1 / 80) | {"g": 0})
    weighed = weigh_rows(step, "sequence_mean", {"math": 2.0})
    assert sum(weighed[r.sample_id] * r.num_trained for r in step) == pytest.approx(1)
    assert weighed["e"] == 2 * weighed["e.2"], "a token counts by its own domain"
    assert weighed["f"] * 40 == pytest.approx(2 / (2 + 2 * 35 / 40 + 5 / 40))


def test_domain_weights_weigh_tokens_or_responses() -> None:
    tokens = weigh_rows(STEP, "token_mean", DOMAIN_WEIGHTS)
    total = 2 * 15 + 0.5 * 31 + 7
    assert tokens == pytest.approx(
        {"a": 2 / total, "b": 2 / total, "c": 0.5 / total, "d": 0, "e": 0.5 / total, "f": 1 / total}
    )
    responses = weigh_rows(STEP, "sequence_mean", DOMAIN_WEIGHTS)
    total = 2 + 2 + 0.5 + 0.5 + 1
    assert responses == pytest.approx(
        {"a": 2 / total / 10, "b": 2 / total / 5, "c": 0.5 / total, "d": 0, "e": 0.5 / total / 30, "f": 1 / total / 7}
    )


@pytest.mark.parametrize("normalize", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("domains", [{}, DOMAIN_WEIGHTS, {"math": 1e-3, "code": 1e3, "chat": 7.0}], ids=str)
def test_weights_over_all_tokens_are_one(normalize: str, domains: dict[str, float]) -> None:
    weights = weigh_rows(STEP, normalize, domains)
    assert sum(weights[i] * n for i, n in TOKENS.items()) == pytest.approx(1)
    scaled = weigh_rows(STEP, normalize, {d: 10 * domains.get(d, 1) for d in ("math", "code", "chat")})
    assert scaled == pytest.approx(weights), "only the proportions matter"


@pytest.mark.parametrize("normalize", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("step", [[], [STEP[3]]])
def test_without_a_trained_token_there_are_no_weights(normalize: str, step: list[Rollout]) -> None:
    assert weigh_rows(step, normalize, DOMAIN_WEIGHTS) == {}


def scored(r: Rollout) -> TargetRow:
    states = torch.randn(r.num_trained, WIDTH, generator=torch.Generator().manual_seed(ord(r.sample_id)))
    return make_row(
        sample_id=r.sample_id, step=1, domain=r.domain, teacher="t", policy_version=0, prompt_ids=r.prompt_ids,
        response_ids=r.response_ids, loss_mask=r.loss_mask, behaviour_logprobs=r.behaviour_logprobs, head=r.domain,
        hidden_size=WIDTH, hidden=states.numpy().tobytes(),
    )  # fmt: skip


ROWS = {r.sample_id: scored(r) for r in STEP}


def test_only_trained_tokens_carry_weight() -> None:
    batch = build_micro_batch([(ROWS["b"],), (ROWS["d"],), (ROWS["c"],)], torch.float32)
    weight = token_weights(batch, [0.25, 0.5, 0.125])
    assert weight.tolist() == [0.25] * 5 + [0.125]
    assert weight.dtype == torch.float32
    assert token_weights(build_micro_batch([], torch.float32), []).tolist() == []


def test_turns_are_counted_by_domain_whatever_the_cut() -> None:
    assert rollout("b", "math", [(3, True), (4, False), (2, True)]).turns == (0, 0, 0, 1, 1)
    assert rollout("o", "math", [(2, False), (1, True), (1, False), (1, True)]).turns == (0, 1), (
        "it begins with no turn"
    )
    for cuts in ([["a", "b", "c", "e", "f"]], [["b", "d"], ["f"], ["a", "c", "e"]]):
        totals = Totals()
        for ids in cuts:
            batch = build_micro_batch([(ROWS[i],) for i in ids], torch.float32)
            num = len(batch.token_N)
            stats = TokenStats(*(torch.ones(num) for _ in dataclasses.fields(TokenStats)))
            totals.add(
                batch, {"divergence": torch.ones(num)}, dataclasses.replace(stats, logprob_N=batch.behaviour_N + 0.5)
            )
        assert {key: stats.tokens for key, stats in totals.turns.items()} == {
            ("math", 0): 13, ("math", 1): 2, ("code", 0): 31, ("chat", 0): 7,
        }  # fmt: skip
        assert totals.turns["math", 1].gap_sum == pytest.approx(1.0) and totals.turns["math", 1].kl_sum == 2.0


def test_stale_tokens_have_no_part_in_the_gap_of_their_turn() -> None:
    batch = build_micro_batch([(ROWS["a"],), (ROWS["b"],)], torch.float32)
    num = len(batch.token_N)
    stats = TokenStats(*(torch.ones(num) for _ in dataclasses.fields(TokenStats)))
    totals = Totals()
    totals.add(
        batch,
        {"divergence": torch.ones(num)},
        dataclasses.replace(stats, logprob_N=batch.behaviour_N + 0.5),
        frozenset({0}),
    )
    first, second = totals.turns["math", 0], totals.turns["math", 1]
    assert (first.tokens, first.stale_tokens, first.gap_sum) == (13, 10, pytest.approx(1.5))
    assert (second.tokens, second.stale_tokens, second.gap_sum) == (2, 0, pytest.approx(1.0))


@pytest.fixture(scope="module")
def student(tiny_model_dir: Any) -> Student:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="sdpa")
    return Student(lm, ReverseKL(), chunk=5, vocab_size=76)


def heads() -> dict[str, Head]:
    gen = torch.Generator().manual_seed(0)
    return {d: Head(0.1 * torch.randn(76, WIDTH, generator=gen), IDENTITY) for d in ("math", "code", "chat")}


def trained(student: Student, cuts: Sequence[Sequence[str]], weights: dict[str, float]) -> tuple[Totals, torch.Tensor]:
    """All micro-batches one after the other, as a rank does: sums and the accumulated gradient."""
    student.zero_grad()
    totals = Totals()
    for ids in cuts:
        batch = build_micro_batch([(ROWS[i],) for i in ids], torch.float32)
        weight = token_weights(batch, [weights[i] for i in ids])
        loss, stats = student(batch, heads(), {"divergence": weight})
        loss.backward()
        totals.add(batch, {"divergence": weight}, stats)
    return totals, torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])


def numbers(stats: DomainStats) -> list[float]:
    return list(dataclasses.astuple(stats))


@pytest.mark.parametrize("normalize", ["token_mean", "sequence_mean"])
def test_the_cut_into_micro_batches_does_not_matter(normalize: str, student: Student) -> None:
    weights = weigh_rows(STEP, normalize, DOMAIN_WEIGHTS)
    sizes = [RowSize(r.sample_id, r.domain, len(r.prompt_ids) + len(r.response_ids)) for r in STEP]
    planned = [[ids for part in plan_micro_batches(sizes, ranks, 32) for ids in part] for ranks in (1, 2, 5)]
    by_hand = [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]], [["f", "a"], [], ["e", "d", "c", "b"]]
    want, want_grad = trained(student, [list("abcdef")], weights)
    for cuts in [*planned, *by_hand]:
        totals, grad = trained(student, cuts, weights)
        assert totals.loss == pytest.approx(want.loss, rel=1e-5)
        assert float((grad - want_grad).norm()) < 1e-5 * float(want_grad.norm())
        assert set(totals.domains) == {"math", "code", "chat"}
        for name, stats in totals.domains.items():
            assert numbers(stats) == pytest.approx(numbers(want.domains[name]), rel=1e-4, nan_ok=True)
        assert {bits: p.tokens for bits, p in totals.positions.items()} == {
            b: p.tokens for b, p in want.positions.items()
        }


def test_the_loss_by_position_counts_places_in_the_response(student: Student) -> None:
    batch = build_micro_batch([(ROWS[i],) for i in "abcdef"], torch.float32)
    weight = token_weights(batch, [1.0] * 6)
    _, stats = student(batch, heads(), {"divergence": weight})
    totals = Totals()
    totals.add(batch, {"divergence": weight}, stats)
    want: dict[int, list[float]] = {}
    losses = iter(stats.kl_N.tolist())
    for row in STEP:
        for place, trained in enumerate(row.loss_mask):
            if trained:
                loss = next(losses)
                want.setdefault(len(f"{place:b}") if place else 0, []).append(loss)
    assert {bits: p.tokens for bits, p in totals.positions.items()} == {b: len(x) for b, x in want.items()}
    assert sorted(want) == [0, 1, 2, 3, 4, 5], "places 0 to 29"
    for bits, found in totals.positions.items():
        assert found.kl_sum == pytest.approx(sum(want[bits]), rel=1e-5)


@pytest.mark.parametrize("normalize", ["token_mean", "sequence_mean"])
def test_the_loss_is_the_weighted_mean_of_the_domains(normalize: str, student: Student) -> None:
    alone = {i: trained(student, [[i]], {i: 1.0})[0].loss for i in "abcef"}  # sums over a response's tokens
    factor = {r.sample_id: DOMAIN_WEIGHTS.get(r.domain, 1.0) for r in STEP}
    totals, _ = trained(student, [list("abcdef")], weigh_rows(STEP, normalize, DOMAIN_WEIGHTS))
    if normalize == "token_mean":
        want = sum(factor[i] * x for i, x in alone.items()) / sum(factor[i] * TOKENS[i] for i in alone)
    else:
        want = sum(factor[i] * x / TOKENS[i] for i, x in alone.items()) / sum(factor[i] for i in alone)
    assert totals.loss == pytest.approx(want, rel=1e-5)
    tokens = {"math": 15, "code": 31, "chat": 7}
    assert {d: s.tokens for d, s in totals.domains.items()} == tokens
    assert totals.domains["math"].kl_sum == pytest.approx(alone["a"] + alone["b"], rel=1e-5)
    assert totals.domains["code"].clipped_sum != totals.domains["code"].clipped_sum  # NaN: the payload does not tell


@pytest.mark.parametrize(
    ("kind", "mean", "ok"),
    [
        ("reverse_kl", 0.0, True),
        ("reverse_kl", -9e-4, True),
        ("reverse_kl", -2e-3, False),
        ("top_k", 49.9, True),
        ("top_k", 50.1, False),
        ("jsd", float("nan"), False),
    ],
)
def test_a_mean_that_is_no_divergence_stops_the_step(kind: str, mean: float, ok: bool) -> None:
    rest = {f.name: 0.0 for f in dataclasses.fields(DomainStats)}
    fine, odd = (DomainStats(**rest | {"tokens": 4, "kl_sum": 4 * value}) for value in (0.5, mean))
    if ok:
        refuse_impossible_means(7, kind, {"math": fine, "code": odd})
    else:
        with pytest.raises(RunError, match=rf"^step 7: {kind} of domain code is {mean:.4g} nats a token"):
            refuse_impossible_means(7, kind, {"math": fine, "code": odd})


def test_a_domain_without_a_trained_token_has_no_mean() -> None:
    rest = {f.name: 0.0 for f in dataclasses.fields(DomainStats)}
    refuse_impossible_means(7, "reverse_kl", {"math": DomainStats(**rest | {"tokens": 0})})


@pytest.mark.parametrize(("gaps", "ok"), [((0.01, 0.03), True), ((0.01, 0.06), False), ((0.0, math.nan), False)])
def test_a_gap_on_the_sampled_tokens_stops_the_run(gaps: tuple[float, float], ok: bool) -> None:
    rest = {f.name: 0.0 for f in dataclasses.fields(DomainStats)}
    fine, odd = (DomainStats(**rest | {"tokens": 4, "gap_sum": 4 * gap}) for gap in gaps)
    if ok:
        refuse_gap(7, {"math": fine, "code": odd}, 0.02)
    else:
        with pytest.raises(
            RunError, match=r"^step 7: engine and trainer differ by .* sync.tolerance is 0.02, most in domain code"
        ):
            refuse_gap(7, {"math": fine, "code": odd}, 0.02)


def test_stale_tokens_do_not_count_in_the_gap_and_are_told_apart() -> None:
    rest = dict.fromkeys((f.name for f in dataclasses.fields(DomainStats)), 0)
    fresh = DomainStats(**rest | {"tokens": 4, "gap_sum": 4 * 0.01})
    mixed = DomainStats(**rest | {"tokens": 10, "gap_sum": 4 * 0.03, "stale_tokens": 6, "drift_sum": 6 * 0.5})
    refuse_gap(7, {"math": fresh, "code": mixed}, 0.0201)
    with pytest.raises(RunError, match=r"differ by 0\.0200 .* most in domain code \(0\.0300\)"):
        refuse_gap(7, {"math": fresh, "code": mixed}, 0.0199)
    assert mean_gap({"math": fresh, "code": mixed}) == pytest.approx(0.02)
    assert mean_drift({"math": fresh, "code": mixed}) == pytest.approx(0.5)
    old = DomainStats(**rest | {"tokens": 6, "stale_tokens": 6, "drift_sum": 3.0})
    refuse_gap(7, {"code": old}, 1e-9)
    assert (mean_gap({"code": old}), mean_drift({"math": fresh})) == (0.0, 0.0)


def test_without_its_own_length_a_response_weighs_by_that_of_the_others() -> None:
    """d / (sum of the others' d T + d U), U the mean T of the domain's others; the own T where there is no other."""
    weights = weigh_rows(STEP, "leave_one_out", DOMAIN_WEIGHTS)
    assert weights == pytest.approx(
        {
            "a": 2 / (2 * 5 + 0.5 * 31 + 7 + 2 * 5),
            "b": 2 / (2 * 10 + 0.5 * 31 + 7 + 2 * 10),
            "c": 0.5 / (2 * 15 + 0.5 * 30 + 7 + 0.5 * 30 / 2),
            "d": 0,
            "e": 0.5 / (2 * 15 + 0.5 * 1 + 7 + 0.5 * 1 / 2),
            "f": 1 / (2 * 15 + 0.5 * 31 + 7),
        }
    )
    longer = [rollout("a", "math", [(99, True)]), *STEP[1:]]
    assert weigh_rows(longer, "leave_one_out", DOMAIN_WEIGHTS)["a"] == weights["a"]
    assert weigh_rows(STEP[3:4], "leave_one_out", {}) == {}
    ended = [rollout("x", "math", [(4, True)]), rollout("y", "math", [(0, True)])]
    assert weigh_rows(ended, "leave_one_out", {}) == {"x": 1 / 4, "y": 0}


def test_tokens_that_end_a_turn_are_added_up_by_themselves() -> None:
    batch = build_micro_batch([(ROWS["a"],), (ROWS["b"],)], torch.float32)
    num = len(batch.token_N)
    stats = dataclasses.replace(
        TokenStats(*(torch.ones(num) for _ in dataclasses.fields(TokenStats))), kl_N=torch.arange(num).float()
    )
    end = int(batch.token_N[-1])
    ends_N = batch.token_N == end
    plain, watched = Totals(), Totals((end, 10**6))
    for totals in (plain, watched):
        totals.add(batch, {"divergence": torch.ones(num)}, stats)
    assert (plain.domains["math"].end_tokens, plain.domains["math"].end_sum) == (0, 0.0)
    assert watched.domains["math"].end_tokens == int(ends_N.sum()) > 0
    assert watched.domains["math"].end_sum == pytest.approx(float(stats.kl_N[ends_N].sum()))
