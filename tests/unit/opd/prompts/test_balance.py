"""Numbers of samples for each domain: by tokens, by what is left to learn, and the same again after a resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.config.balance import GapBalance, TokensBalance
from opd.prompts import Balance, BalancedPrompts
from opd.prompts.balance import fit_proportions, round_counts
from opd.records.step import DomainRecord, StepRecord
from opd.records.types import Prompt
from opd.run.metrics import MetricsFile

TEN = {f"d{i}": 1.0 for i in range(10)}


def gap(**options: Any) -> GapBalance:
    return GapBalance(kind="gap", **{"window": 5} | options)


def tokens(**options: Any) -> TokensBalance:
    return TokensBalance(kind="tokens", **options)


def record(
    step: int,
    losses: Mapping[str, float | None],
    *,
    lengths: Mapping[str, int] | None = None,
    cut: Mapping[str, int] | None = None,
    segments: Mapping[str, int] | None = None,
    samples: int = 8,
) -> StepRecord:
    """A step in which every domain had the same number of prompts; `lengths` are those of a segment."""
    per_prompt = {name: (segments or {}).get(name, 1) for name in losses}
    return StepRecord(
        step=step,
        domains={
            name: DomainRecord(
                loss=loss,
                samples=samples * per_prompt[name],
                tokens=samples * per_prompt[name] * (lengths or {}).get(name, 4),
            )
            for name, loss in losses.items()
        },
        prompts=dict.fromkeys(losses, samples),
        truncated_by_domain=cut or {},
    )


def after(
    section: Any,
    losses: Callable[[int], Mapping[str, float | None]],
    *,
    steps: int = 40,
    total: int = 100,
    weights: Mapping[str, float] | None = None,
    **of_each: Any,
) -> dict[str, float]:
    """Exact samples after `steps` steps with these losses; what else a record has is a function of the step, too."""
    balance = Balance(section, weights or dict.fromkeys(losses(1), 1.0), total, 0)
    for step in range(1, steps + 1):
        balance.record_step(record(step, losses(step), **{key: value(step) for key, value in of_each.items()}))
    return balance.exact_counts()


# Bounds and whole numbers


@pytest.mark.parametrize(
    ("pull", "numbers"),
    [
        ({"a": 1, "b": 1, "c": 1}, {"a": 10, "b": 10, "c": 10}),
        ({"a": 0, "b": 0, "c": 0}, {"a": 10, "b": 10, "c": 10}),
        ({"a": 3, "b": 2, "c": 1}, {"a": 15, "b": 10, "c": 5}),
        ({"a": 1, "b": 0, "c": 0}, {"a": 20, "b": 5, "c": 5}),
        ({"a": 100, "b": 2, "c": 1}, {"a": 18, "b": 7, "c": 5}),
        ({"a": 1, "b": 1, "c": 0}, {"a": 12.5, "b": 12.5, "c": 5}),
    ],
)
def test_numbers_are_in_proportion_within_their_bounds(pull: dict[str, float], numbers: dict[str, float]) -> None:
    base = dict.fromkeys("abc", 10.0)
    found = fit_proportions(
        base, pull, dict.fromkeys("abc", 5.0), {"a": 18.0 if pull["a"] == 100 else 20.0, "b": 20, "c": 20}
    )
    assert found == pytest.approx(numbers)


def test_bounds_that_leave_no_room_leave_the_base() -> None:
    base = {"a": 3.0, "b": 1.0}
    assert fit_proportions(base, {"a": 0.0, "b": 9.0}, base, base) == pytest.approx(base)


def test_whole_numbers_have_the_same_sum_and_are_right_on_average() -> None:
    exact = {"a": 1.0, "b": 1.3, "c": 5.45, "d": 2.25}
    counts = Counter[str]()
    for draw in range(1000):
        found = round_counts(exact, 10, draw / 1000)
        assert sum(found.values()) == 10 and list(found) == list(exact)
        assert all(abs(found[name] - exact[name]) < 1 for name in exact)
        counts.update(found)
    assert {name: count / 1000 for name, count in counts.items()} == pytest.approx(exact, abs=0.002)


# tokens


def test_a_domain_of_ten_times_longer_responses_gets_its_share_of_the_tokens() -> None:
    lengths = {**dict.fromkeys(TEN, 5), "d3": 50}
    found = after(tokens(), lambda _: dict.fromkeys(TEN, 1.0), total=200, lengths=lambda _: lengths)
    got = {name: found[name] * lengths[name] for name in TEN}
    assert sum(found.values()) == pytest.approx(200)
    assert got["d3"] == pytest.approx(got["d0"]) and found["d3"] == pytest.approx(2.2, abs=0.1)


@pytest.mark.parametrize("section", [tokens(), gap(of="tokens")], ids=["tokens", "gap of tokens"])
def test_an_episode_of_many_segments_is_one_prompt(section: Any) -> None:
    """Five segments of 100 tokens beside single responses of 100: a prompt of the first costs five times as much."""
    balance, got = Balance(section, {"acts": 1.0, "answers": 1.0}, 60, 0), Counter[str]()
    for step in range(1, 61):
        counts = balance.count_samples(step)
        segments = {"acts": 5 * counts["acts"], "answers": counts["answers"]}
        stats = {name: DomainRecord(loss=1.0, samples=num, tokens=100 * num) for name, num in segments.items()}
        balance.record_step(StepRecord(step=step, domains=stats, prompts=counts))
        if step > 1:
            got.update({name: one.tokens for name, one in stats.items()})
    assert got["acts"] / got.total() == pytest.approx(0.5, abs=0.01)


def test_prompts_that_could_not_be_trained_are_dealt_out_for_nothing() -> None:
    """Half of a domain's prompts are left out: it gets twice as many, and its share of the tokens."""
    balance = Balance(tokens(), {"a": 1.0, "b": 1.0}, 30, 0)
    for step in range(1, 30):
        stats = {"a": DomainRecord(samples=8, tokens=80), "b": DomainRecord(samples=4, tokens=40)}
        balance.record_step(StepRecord(step=step, domains=stats, prompts={"a": 8, "b": 8}))
    assert balance.exact_counts() == pytest.approx({"a": 10, "b": 20})


def test_a_weight_is_a_share_of_the_tokens() -> None:
    weights, lengths = {"a": 3.0, "b": 1.0}, {"a": 20, "b": 4}
    found = after(tokens(), lambda _: dict.fromkeys("ab", 1.0), total=1000, weights=weights, lengths=lambda _: lengths)
    assert found["a"] * 20 / (found["b"] * 4) == pytest.approx(3.0, rel=0.01)


def test_no_domain_gets_less_than_a_sample() -> None:
    lengths = {**dict.fromkeys(TEN, 1), "d3": 1000}
    found = after(tokens(), lambda _: dict.fromkeys(TEN, 1.0), total=12, lengths=lambda _: lengths)
    assert found["d3"] == 1.0 and sum(found.values()) == pytest.approx(12)


def test_lengths_follow_the_student() -> None:
    def lengths(step: int) -> dict[str, int]:
        return {"a": 40 if step <= 20 else 4, "b": 4}

    short = after(tokens(), lambda _: {"a": 1.0, "b": 1.0}, steps=20, lengths=lengths)
    grown = after(tokens(), lambda _: {"a": 1.0, "b": 1.0}, steps=80, lengths=lengths)
    assert short["a"] < 10 and grown["a"] == pytest.approx(50, abs=1)


@pytest.mark.parametrize("section", [tokens(), gap(), gap(of="tokens")], ids=["tokens", "gap", "gap of tokens"])
def test_before_anything_is_known_it_goes_by_weight(section: Any) -> None:
    found = Balance(section, {"a": 3.0, "b": 1.0}, 42, 0).exact_counts()
    assert found == pytest.approx({"a": 31.5, "b": 10.5})
    least = Balance(section, {"a": 3.0, "b": 0.01, "c": 1.0}, 41, 0).exact_counts()
    assert least == pytest.approx({"a": 30.0, "b": 1.0, "c": 10.0}), "one each at least, the others by weight"


def test_a_domain_that_was_never_trained_counts_as_long_as_the_others() -> None:
    balance = Balance(tokens(), dict.fromkeys("abc", 1.0), 30, 0)
    balance.record_step(record(1, {"a": 1.0, "b": 1.0}, lengths={"a": 5, "b": 5}))
    assert balance.exact_counts() == pytest.approx({"a": 10, "b": 10, "c": 10})


# gap


def test_what_is_done_gets_the_floor_and_what_lags_the_cap() -> None:
    def losses(step: int) -> dict[str, float | None]:
        return {name: 2.0 if name == "d7" or step <= 5 else 0.002 for name in TEN}

    found = after(gap(), losses, steps=100)
    assert found["d7"] == pytest.approx(30) and found["d0"] == pytest.approx(70 / 9), "cap 3 of 10 samples"
    three = after(gap(), lambda step: losses(step) | dict.fromkeys(("d1", "d2"), 2.0), steps=100)
    assert three["d0"] == pytest.approx(5.0) and three["d7"] == pytest.approx(65 / 3), "floor 0.5 of 10"
    assert after(gap(floor=0.2, cap=5.0), losses, steps=100)["d7"] == pytest.approx(50)


def test_a_gap_is_the_share_of_a_domains_own_start() -> None:
    """Half of 8 nats is as far as half of 0.5 nats."""
    found = after(gap(), lambda step: {"far": 8.0, "near": 0.5} if step <= 5 else {"far": 4.0, "near": 0.25})
    assert found["far"] == pytest.approx(found["near"])


def test_of_two_at_the_same_loss_the_one_that_falls_gets_less_and_the_one_that_rises_more() -> None:
    def losses(step: int) -> dict[str, float | None]:
        way = max(0, step - 20) / 20  # the same start, and at step 40 the same loss
        flat, low = (1.0, 1.0) if step <= 5 else (0.5, 0.1)
        return {"falls": 1.0 - 0.5 * way, "stays": flat, "rises": low + (0.5 - low) * way}

    found = after(gap(cap=9.0, floor=0.01, window=2), losses)
    assert found["falls"] < found["stays"] < found["rises"]


def test_a_domain_that_regresses_gets_more_than_before() -> None:
    def losses(step: int) -> dict[str, float | None]:
        fallen = {name: max(0.1, 1 - step / 20) for name in "abcd"}
        return fallen | ({"a": 0.4} if step > 40 else {})

    before, then = (after(gap(), losses, steps=steps)["a"] for steps in (40, 45))
    assert before == pytest.approx(25, abs=0.1) and then > 1.5 * before


def test_cut_responses_count_above_what_the_domain_always_had() -> None:
    def cut(step: int) -> dict[str, int]:
        return {"always": 8, "lost": 8 if step > 30 else 0}

    even = dict.fromkeys(("always", "lost", "never"), 1.0)
    found = after(gap(), lambda step: even if step <= 5 else dict.fromkeys(even, 0.2), cut=cut)
    assert found["lost"] > 2 * found["never"] and found["always"] == pytest.approx(found["never"])


def test_a_gap_can_be_shared_out_in_tokens() -> None:
    lengths = {"long": 40, "short": 4, "done": 4}

    def losses(step: int) -> dict[str, float | None]:
        return {"long": 1.0, "short": 1.0, "done": 1.0 if step <= 5 else 0.001}

    found = after(gap(of="tokens"), losses, total=300, lengths=lambda _: lengths)
    got = {name: found[name] * length for name, length in lengths.items()}
    assert got["long"] == pytest.approx(got["short"], rel=0.01)
    assert got["done"] / sum(got.values()) == pytest.approx(0.5 / 3, rel=0.02), "the floor"


def test_a_gap_per_response_counts_what_a_whole_answer_lacks() -> None:
    """Two domains have fallen to the same part of their start; one has 22 tokens an answer, the other 2."""
    lengths = {"long": 22, "short": 2}

    def losses(step: int) -> dict[str, float | None]:
        return dict.fromkeys(lengths, 1.0 if step <= 5 else 0.05)

    by_token = after(gap(floor=0.01, cap=9.0), losses, steps=100, lengths=lambda _: lengths)
    assert by_token["long"] == pytest.approx(by_token["short"])
    found = after(gap(floor=0.01, cap=9.0, per="response"), losses, steps=100, lengths=lambda _: lengths)
    assert found["long"] / found["short"] == pytest.approx((1.1 / 2.1) / (0.1 / 1.1), rel=1e-6)
    cut_up = after(
        gap(floor=0.01, cap=9.0, per="response"),
        losses,
        steps=100,
        lengths=lambda _: {"long": 2, "short": 2},
        segments=lambda _: {"long": 11},
    )
    assert cut_up == pytest.approx(found), "an answer in eleven segments lacks as much"


def test_weights_multiply() -> None:
    weights = {"a": 2.0, "b": 1.0, "c": 1.0}
    found = after(gap(), lambda step: {"a": 0.5, "b": 0.5, "c": 0.5}, weights=weights, total=1003)
    assert found == pytest.approx({"a": 501.5, "b": 250.75, "c": 250.75})


@pytest.mark.parametrize("loss", [None, -0.2, 0.0])
def test_losses_that_tell_nothing_go_by_weight(loss: float | None) -> None:
    found = after(gap(), lambda step: {"a": loss, "b": loss})
    assert found == pytest.approx({"a": 50, "b": 50})


def test_an_estimate_below_nothing_is_nothing() -> None:
    found = after(gap(), lambda step: {"a": 1.0 if step <= 5 else -0.1, "b": 1.0})
    assert found["a"] == pytest.approx(25)


def test_steps_without_a_trained_token_say_nothing() -> None:
    balances = [Balance(gap(), dict.fromkeys("ab", 1.0), 20, 0) for _ in range(2)]
    for step in range(1, 20):
        balances[0].record_step(record(step, {"a": 1.0, "b": 1 / step}))
        for one in (record(step, {"a": 1.0, "b": 1 / step}), StepRecord(step=step, skipped=True)):
            balances[1].record_step(one)
    assert balances[0].exact_counts() == balances[1].exact_counts()


def test_exams_change_nothing() -> None:
    balances = [Balance(gap(), dict.fromkeys("ab", 1.0), 20, 0) for _ in range(2)]
    for step in range(1, 20):
        plain = record(step, {"a": 1.0, "b": 1 / step})
        balances[0].record_step(plain)
        balances[1].record_step(replace(plain, accuracy={"a": 1.0, "b": 0.0}))
    assert balances[0].exact_counts() == balances[1].exact_counts()


# The source


def prompts(domain: str, num: int) -> list[Prompt]:
    return [Prompt(id=f"{domain}/{i}", domain=domain, token_ids=(i,)) for i in range(num)]


BY_DOMAIN = {"a": prompts("a", 70), "b": prompts("b", 11), "c": prompts("c", 300)}


def source(section: Any, records: list[StepRecord] | None = None, seed: int = 3) -> BalancedPrompts:
    return BalancedPrompts(BY_DOMAIN, Balance(section, dict.fromkeys("abc", 1.0), 20, seed), seed, records or [])


def told(step: int, asked: list[Prompt]) -> StepRecord:
    """Return a record that a step with these prompts could have, with losses that are no round numbers."""
    counts = Counter(p.domain for p in asked)
    losses = {"a": 1 / step, "b": 0.3 + 0.1 / step, "c": 3 / step**2}
    return StepRecord(
        step=step,
        domains={
            name: DomainRecord(loss=losses[name], samples=num, tokens=num * (7 if name == "c" else 3))
            for name, num in counts.items()
        },
        prompts=dict(counts),
        truncated_by_domain={"b": step % 3},
    )


@pytest.mark.parametrize("section", [tokens(), gap(), gap(of="tokens", window=1)], ids=["tokens", "gap", "both"])
def test_a_resumed_run_takes_the_same_prompts(section: Any, tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    running, taken = source(section), []
    for step in range(1, 31):
        taken.append(running.take(step))
        metrics.write(told(step, taken[-1]))
        running.step(metrics.read()[-1])
    assert len({tuple(sorted(Counter(p.domain for p in one).items())) for one in taken}) > 3, "the shares moved"
    for done in (29, 12, 0):
        metrics.rewind(done)
        resumed = source(section, metrics.read())
        for step in range(done + 1, 31):
            asked = resumed.take(step)
            assert [p.id for p in asked] == [p.id for p in taken[step - 1]]
            resumed.step(told(step, asked))


@pytest.mark.parametrize("section", [tokens(window=1), gap(of="tokens", window=1)], ids=["tokens", "both"])
def test_prompts_that_are_taken_ahead_depend_on_no_later_record(section: Any) -> None:
    def ahead(records: list[StepRecord]) -> BalancedPrompts:
        return BalancedPrompts(BY_DOMAIN, Balance(section, dict.fromkeys("abc", 1.0), 20, 3), 3, records, ahead=1)

    running, taken, records = ahead([]), {}, list[StepRecord]()
    taken[1] = running.take(1)
    for step in range(1, 30):
        taken[step + 1] = running.take(step + 1)
        records.append(told(step, taken[step]))
        running.step(records[-1])
        assert running.take(step + 1) == taken[step + 1], "a step's own record changes nothing"
    assert len({tuple(sorted(Counter(p.domain for p in one).items())) for one in taken.values()}) > 3
    for done in (28, 11, 1, 0):
        resumed = ahead(records[:done])
        assert [resumed.take(step) for step in (done + 1, done + 2) if step < 30] == [
            taken[step] for step in (done + 1, done + 2) if step < 30
        ]
    seen = [p.id for step in sorted(taken) for p in taken[step] if p.domain == "b"]
    assert all(len(set(seen[i : i + 11])) == 11 for i in range(0, len(seen) - 11, 11)), "none comes twice in an epoch"
    with pytest.raises(AssertionError, match="prompts of step 32 with records up to 29"):
        running.take(32)


def test_no_prompt_is_passed_over_or_comes_twice_in_an_epoch() -> None:
    running, seen = source(gap(window=2)), []
    for step in range(1, 60):
        asked = running.take(step)
        assert len(asked) == 20 and {p.domain for p in asked} == set("abc")
        seen += [p.id for p in asked if p.domain == "b"]
        running.step(told(step, asked))
    epochs = [seen[i : i + 11] for i in range(0, len(seen) - 11, 11)]
    assert len(epochs) > 10 and all(len(set(epoch)) == 11 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_seeds_have_prompts_of_their_own() -> None:
    assert [p.id for p in source(gap(), seed=0).take(1)] != [p.id for p in source(gap(), seed=1).take(1)]


def test_a_step_without_the_records_before_it_is_a_mistake() -> None:
    running = source(gap())
    running.take(1)
    with pytest.raises(AssertionError, match="prompts of step 2 with records up to 0"):
        running.take(2)
    with pytest.raises(AssertionError, match="the record of step 2 after that of 0"):
        running.step(StepRecord(step=2))


def test_what_is_on_disk_is_exact() -> None:
    one = told(7, source(gap()).take(1))
    assert StepRecord.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_with_several_responses_a_prompt_the_balance_deals_out_prompts() -> None:
    section = gap(window=2)

    def several(records: list[StepRecord]) -> BalancedPrompts:
        return BalancedPrompts(BY_DOMAIN, Balance(section, dict.fromkeys("abc", 1.0), 20, 3), 3, records, 4)

    running, seen, records = several([]), [], []
    for step in range(1, 20):
        asked = running.take(step)
        assert len(asked) == 80
        assert [p.id for p in asked] == [p.id for p in asked[::4] for _ in range(4)]
        assert [p.id for p in several(records).take(step)] == [p.id for p in asked], "after a resume"
        seen += [p.id for p in asked[::4] if p.domain == "b"]
        records.append(told(step, asked))
        running.step(records[-1])
    epochs = [seen[i : i + 11] for i in range(0, len(seen) - 11, 11)]
    assert len(epochs) > 3 and all(len(set(epoch)) == 11 for epoch in epochs), "no prompt is passed over"
