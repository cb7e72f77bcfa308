"""Each signal's reading from the records of the steps, and the responses that show it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from opd.config.monitors import MonitorsConfig
from opd.monitors import SIGNALS
from opd.monitors.signals import WHOLE_STEP, Signal, SignalHistory
from opd.records.episodes import EpisodesRecord
from opd.records.step import StepRecord, compute_mean_length
from opd.records.tails import LOOP, SHORTEST, TAIL, is_looping, measure_repetition
from opd.settings.user_objects import import_object
from tests.steps import rollout, step


def signal(name: str) -> Signal:
    found: Signal = import_object(SIGNALS[name])
    return found


def reading(
    name: str,
    last: Sequence[StepRecord],
    *,
    first: Sequence[StepRecord] = (),
    before: Sequence[StepRecord] = (),
    expert_tokens: Mapping[str, float] | None = None,
) -> dict[str, float]:
    history = SignalHistory(
        first=first or last, before=before, last=last, expert_tokens=expert_tokens or {}, tolerance=0.02
    )
    return dict(signal(name).read(history))


def test_every_signal_has_limits_and_every_limit_a_signal() -> None:
    assert list(SIGNALS) == list(MonitorsConfig.model_fields)


# Tails


def test_a_loop_repeats_itself_however_long_its_turn_is() -> None:
    for turn in (1, 2, 7, 30, 60):
        ids = [*range(100, 120), *(list(range(turn)) * 200)[:200]]
        assert measure_repetition(ids) > LOOP, turn
    assert measure_repetition([5] * SHORTEST) == pytest.approx(1 - 1 / 11)


def test_other_texts_do_not() -> None:
    rng = random.Random(0)
    assert measure_repetition([rng.randrange(76) for _ in range(300)]) < 0.02, "letters by chance"
    text = "the cat sat on the mat and the dog lay on the rug, and then the cat got up and sat on the rug by the dog."
    assert measure_repetition([ord(sign) for sign in text]) < 0.4
    table = "".join(f"{a} + {b} = {a + b}\n" for a in range(3, 9) for b in range(2, 5))
    assert measure_repetition([ord(sign) for sign in table]) < 0.4


def test_only_the_tail_counts_and_a_short_one_not_at_all() -> None:
    assert measure_repetition([*[5] * 500, *range(TAIL)]) == 0.0
    assert measure_repetition([5] * (SHORTEST - 1)) == 0.0


def test_sampling_that_breaks_a_loop_now_and_then_does_not_hide_it() -> None:
    rng = random.Random(1)
    ids = [5 if rng.random() < 0.95 else rng.randrange(76) for _ in range(TAIL)]
    assert measure_repetition(ids) > LOOP


def test_a_response_that_ends_by_itself_is_no_loop() -> None:
    assert is_looping(rollout(1, [5] * 24))
    assert not is_looping(rollout(1, [5] * 24, truncated=False))
    assert not is_looping(rollout(1, range(24)))


# Readings


@pytest.mark.parametrize("name", ["repetition", "truncation"])
def test_shares_are_of_all_responses_of_the_steps(name: str) -> None:
    key = {"repetition": "looping_by_domain", "truncation": "truncated_by_domain"}[name]
    other = {"repetition": "truncated_by_domain", "truncation": "looping_by_domain"}[name]
    two = {"a": {}, "b": {"samples": 30}, "idle": {"samples": 0, "tokens": 0}}
    counts: Any = [{key: {"a": 4, "b": 3}}, {key: {"a": 8}, other: {"b": 30}}]
    steps = [step(number, two, **found) for number, found in enumerate(counts, start=1)]
    assert reading(name, steps) == pytest.approx({"a": 12 / 20, "b": 3 / 60})


def test_length_is_measured_by_the_longer_of_expert_and_start() -> None:
    grown = [step(9, {"a": {"tokens": 240}, "b": {"tokens": 240}, "c": {"tokens": 240}})]
    short = [step(1, {"a": {"tokens": 20}, "b": {"tokens": 160}, "c": {"tokens": 20}})]
    found = reading("length", grown, first=short, expert_tokens={"a": 6.0, "b": 6.0})
    assert found == pytest.approx({"a": 24 / 6, "b": 24 / 16}), "no exam of c's expert, so no reading"


def test_an_episode_of_many_segments_is_one_response() -> None:
    """Twelve episodes of four segments each; the expert's exam counts whole episodes, too."""
    episodes = {"a": EpisodesRecord(episodes=12, segments=48)}
    steps = [step(number, {"a": {"tokens": 960, "samples": 48}}, episodes=episodes) for number in (1, 2)]
    assert reading("length", steps, expert_tokens={"a": 40.0}) == pytest.approx({"a": 80 / 80})
    assert (
        compute_mean_length(steps, "a") == 80.0
        and compute_mean_length([step(1, {"a": {"tokens": 960, "samples": 48}})], "a") == 20.0
    )


def test_entropy_is_what_the_student_lacks_of_its_teachers_weighed_by_tokens() -> None:
    steps = [
        step(1, {"a": {"student_entropy": 0.1, "teacher_entropy": 0.4, "tokens": 30}, "b": {"student_entropy": 0.1}}),
        step(2, {"a": {"student_entropy": 0.3, "teacher_entropy": 1.6, "tokens": 10}, "b": {"student_entropy": 0.1}}),
    ]
    assert reading("entropy", steps) == pytest.approx({"a": (30 * 0.4 + 10 * 1.6 - 30 * 0.1 - 10 * 0.3) / 40})
    sure = [step(1, {"a": {"student_entropy": 0.02, "teacher_entropy": 0.01}})]
    assert reading("entropy", sure)["a"] < 0, "both are sure: nothing is lost"


def test_disagreement_is_the_mass_off_the_teachers_first_choice() -> None:
    steps = [step(1, {"a": {"teacher_top1": 0.25}, "b": {}}), step(2, {"a": {"teacher_top1": 0.75}, "b": {}})]
    assert reading("disagreement", steps) == {"a": 0.5}, "what the payload does not tell is no reading"


def test_a_stale_draft_is_kept_less_than_the_trainer_expects() -> None:
    numbers = {"accepted_length/a": 2.0, "engine_accepted_length/a": 1.6, "accepted_length/b": 1.5}
    steps = [step(1, draft=numbers), step(2, draft=numbers | {"accepted_length/a": 2.4}), step(3)]
    assert reading("draft", steps) == pytest.approx({"a": 2.2 / 1.6}), "engines count no episodes"


def test_guesses_that_do_not_pay_are_noticed_at_the_step_that_measures() -> None:
    measured = step(10, draft={"engine_tokens_s": 80.0, "engine_plain_tokens_s": 100.0})
    assert reading("draft_cost", [measured]) == pytest.approx({WHOLE_STEP: 1.25})
    assert reading("draft_cost", [step(11)]) == {}


def test_the_gap_is_a_share_of_the_tolerance() -> None:
    steps = [step(1, logprob_gap=0.004), step(2, logprob_gap=0.02)]
    assert reading("gap", steps) == pytest.approx({WHOLE_STEP: 0.6})


def test_steps_without_a_token_of_the_newest_weights_tell_nothing_of_the_gap() -> None:
    old = [step(1, token_ages={"1": 40}), step(2, skipped=True)]
    assert reading("gap", old) == {}
    assert reading("gap", [*old, step(3, token_ages={"0": 9, "1": 40}, logprob_gap=0.02)]) == pytest.approx(
        {WHOLE_STEP: 1}
    )


def test_the_gradient_is_compared_with_the_median_of_the_steps_before() -> None:
    before = [step(number, grad_norm=norm) for number, norm in enumerate((1.0, 2.0, 90.0), start=1)]
    last = [*before[1:], step(4, grad_norm=30.0)]
    assert reading("grad_norm", last, before=before) == {WHOLE_STEP: 15.0}
    assert reading("grad_norm", last, before=before[1:]) == {}, "too few to compare with"
    skipped = [step(number, skipped=True) for number in (1, 2, 3)]
    assert reading("grad_norm", last, before=skipped) == {}


# Samples


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("repetition", rollout(1, [5] * 20)),
        ("truncation", rollout(1, range(3))),
        ("length", rollout(1, range(40), truncated=False)),
        ("entropy", rollout(1, range(4), truncated=False, logprob=-0.1)),
        ("disagreement", rollout(1, range(4), truncated=False, logprob=-0.1)),
    ],
)
def test_the_response_that_shows_a_signal_best(name: str, most: Any) -> None:
    shown_by = signal(name).shown_by
    assert shown_by is not None
    assert shown_by(most) > shown_by(rollout(1, range(20), truncated=False))


@pytest.mark.parametrize("name", SIGNALS)
def test_a_reading_is_told_in_words(name: str) -> None:
    assert "0.62" in signal(name).says.format(value=0.62) or "0.6 times" in signal(name).says.format(value=0.62)
    assert signal(name).advice
