"""The trace of an episode: no sampled token is changed or lost, and every one of them carries loss exactly once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from opd.errors import RunError
from opd.records.episodes import Audit
from opd.records.types import SampledTurn, Span
from opd.rollouts.episodes.trace import EpisodeKey, Trace, TraceSegment
from opd.stream.rollouts import decode_rollouts, encode_rollouts
from opd.train.turns import count_earlier_turns

SAMPLE = EpisodeKey(sample_id="000003/maze/7", group="000003/maze/7", step=3, domain="maze")
NAN = float("nan")


def turn(*ids: int, version: int = 5) -> SampledTurn:
    return SampledTurn(
        token_ids=ids, logprobs=tuple(-0.5 - i for i in ids), stop_reason="stop", policy_version=version
    )  # fmt: skip


def test_an_episode_is_one_rollout_with_its_observations_masked() -> None:
    trace = Trace(policy_version=5)
    segment = trace.begin_segment([1, 2])
    segment.append_policy_turn(turn(3, 4))
    segment.append_observation([9, 9, 9])
    segment.append_policy_turn(turn(5, version=6))
    segment.append_observation([8])
    (rollout,) = trace.to_rollouts(SAMPLE, "done", 0.5)
    assert (rollout.prompt_ids, rollout.response_ids) == ((1, 2), (3, 4, 9, 9, 9, 5))
    assert rollout.spans == (
        Span(length=2, origin="policy", policy_version=5),
        Span(length=3, origin="environment", policy_version=5),
        Span(length=1, origin="policy", policy_version=6),
    )
    assert rollout.behaviour_logprobs == (-3.5, -4.5, 0.0, 0.0, 0.0, -5.5)
    assert (rollout.sample_id, rollout.episode, rollout.group) == (SAMPLE.sample_id, SAMPLE.sample_id, SAMPLE.group)
    assert (rollout.reward, rollout.stop_reason, rollout.policy_version) == (0.5, "done", 6)
    assert trace.audit == Audit(segments=1, turns=2, sampled=3, trained=3)


def test_an_observation_without_tokens_ends_a_turn() -> None:
    trace = Trace(masked=frozenset({4}))
    segment = trace.continue_or_fork([1, 2])
    segment.append_policy_turn(turn(3, 4, 3))
    segment.append_observation([])
    segment.append_policy_turn(turn(5))
    assert trace.continue_or_fork([1, 2, 3, 4, 3, 5]) is segment
    segment.append_policy_turn(turn(6, 7))
    segment.append_observation([])
    (rollout,) = decode_rollouts([encode_rollouts(trace.to_rollouts(SAMPLE, "done", 0.5))], 10)
    assert rollout.response_ids == (3, 4, 3, 5, 6, 7) and rollout.spans[-1].origin == "policy"
    assert rollout.turns == (0, 0, 1, 2, 2)
    assert count_earlier_turns(
        [rollout, replace(rollout, sample_id="x", origin="summary", parent=rollout.sample_id)]
    ) == {"x": 3}


def test_masked_tokens_are_sampled_but_not_trained() -> None:
    trace = Trace(masked=frozenset({4}))
    trace.begin_segment([1]).append_policy_turn(turn(3, 4, 4, 3))
    (rollout,) = trace.to_rollouts(SAMPLE, "length", None)
    assert [(s.origin, s.length) for s in rollout.spans] == [("policy", 1), ("masked", 2), ("policy", 1)]
    assert (trace.audit.sampled, trace.audit.trained) == (4, 2)


@pytest.mark.parametrize(
    ("mark", "origins"),
    [
        ("policy", ["policy", "taught", "teacher"]),
        ("masked", ["masked", "teacher", "teacher"]),
        ("blocked", ["blocked", "taught", "teacher"]),
    ],
)
def test_a_turn_that_is_marked_keeps_its_author_and_a_masked_one_no_loss(mark: Any, origins: list[str]) -> None:
    segment = Trace().begin_segment([1])
    segment.append_policy_turn(turn(3, 4))
    segment.mark_last_turn(turn(3, 4), mark)
    for train in (True, False):
        segment.append_teacher_turn(turn(5, 6), train=train)
        segment.mark_last_turn(turn(5, 6), mark)
    assert [span.origin for span in segment.spans] == origins


@pytest.mark.parametrize(
    ("logprobs", "told"),
    [
        ((-1.0,), "2 tokens came with 1 log-probs"),
        ((-1.0, NAN), "log-prob nan"),
        ((-float("inf"), -1.0), "log-prob -inf"),
    ],
)
def test_a_missing_or_broken_logprob_is_an_error_and_never_a_zero(logprobs: tuple[float, ...], told: str) -> None:
    segment = Trace().begin_segment([1])
    with pytest.raises(RunError, match=told):
        segment.append_policy_turn(
            SampledTurn(token_ids=(3, 4), logprobs=logprobs, stop_reason="stop", policy_version=0)
        )
    assert segment.ids == [1] and segment.turns == 0


def test_a_history_that_continues_the_tokens_continues_the_segment() -> None:
    trace = Trace()
    first = trace.continue_or_fork([1, 2])
    first.append_policy_turn(turn(3))
    again = trace.continue_or_fork([1, 2, 3, 9, 9])
    assert again is first and again.ids == [1, 2, 3, 9, 9]
    again.append_policy_turn(turn(4))
    assert trace.audit == Audit(segments=1, turns=2, sampled=2, trained=2)


def test_a_history_that_was_changed_forks_and_no_token_is_trained_twice() -> None:
    trace = Trace()
    first = trace.continue_or_fork([1, 2])
    first.append_policy_turn(turn(3, 4))
    forked = trace.continue_or_fork([1, 2, 3, 7, 9])
    assert forked is not first and (forked.parent, forked.prompt_len) == (0, 5)
    forked.append_policy_turn(turn(6))
    one, other = trace.to_rollouts(SAMPLE, "done", 1.0)
    assert (one.sample_id, other.sample_id) == ("000003/maze/7", "000003/maze/7+1")
    assert one.episode == other.episode == SAMPLE.sample_id
    assert other.prompt_ids == (1, 2, 3, 7, 9) and other.response_ids == (6,)
    assert (one.origin, one.parent, one.next) == ("main", None, None)
    assert (other.origin, other.parent, other.next) == ("main", one.sample_id, None), (
        "a fork does not go on from its parent"
    )
    assert trace.audit == Audit(segments=2, turns=2, sampled=3, trained=3, forks=1)


def test_what_was_forked_from_a_dialogue_that_goes_on_lies_beside_it() -> None:
    trace = Trace()
    trace.continue_or_fork([1, 2]).append_policy_turn(turn(3))
    trace.continue_or_fork([1, 7]).append_policy_turn(turn(8))
    assert [r.origin for r in trace.to_rollouts(SAMPLE, "done", 1.0)] == ["main", "main"], "it may take its place"
    trace.continue_or_fork([1, 2, 3, 4]).append_policy_turn(turn(5))
    assert [r.origin for r in trace.to_rollouts(SAMPLE, "done", 1.0)] == ["main", "aside"]


def test_two_turns_for_the_same_history_do_not_share_a_segment() -> None:
    trace = Trace()
    trace.continue_or_fork([1, 2], is_new_dialogue=True).append_policy_turn(turn(3))
    second = trace.continue_or_fork([1, 2], is_new_dialogue=True)
    assert (second.number, second.parent, second.origin) == (1, 0, "aside")
    second.append_policy_turn(turn(4))
    assert [r.response_ids for r in trace.to_rollouts(SAMPLE, "done", None)] == [(3,), (4,)]


def test_the_longest_segment_that_fits_is_continued() -> None:
    trace = Trace()
    trace.continue_or_fork([1]).append_policy_turn(turn(2))
    trace.continue_or_fork([1, 5]).append_policy_turn(turn(6))
    found = trace.continue_or_fork([1, 5, 6, 7])
    assert found.number == 1 and found.ids == [1, 5, 6, 7]


def test_a_segment_without_a_turn_is_no_rollout() -> None:
    trace = Trace()
    trace.begin_segment([1, 2]).append_observation([3])
    assert trace.to_rollouts(SAMPLE, "raised", None) == [] and trace.audit == Audit()


def test_a_summary_begins_the_next_segment_and_a_tool_a_segment_of_its_own() -> None:
    trace = Trace()
    first = trace.begin_segment([1, 2])
    first.append_policy_turn(turn(3))
    tool = trace.begin_segment([7], "sub_agent", first)
    tool.append_policy_turn(turn(8))
    second = trace.begin_segment([1, 4], "summary", first)
    second.append_policy_turn(turn(5))
    trace.begin_segment([1, 6], "summary", second)
    names = [r.sample_id for r in trace.to_rollouts(SAMPLE, "done", None)]
    assert [(r.origin, r.parent, r.next) for r in trace.to_rollouts(SAMPLE, "done", None)] == [
        ("main", None, names[2]), ("sub_agent", names[0], None), ("summary", names[0], None),
    ], "the last one has no turn, so it is no rollout and nobody's next"  # fmt: skip


def test_the_parent_of_a_rollout_is_a_rollout() -> None:
    trace = Trace()
    first = trace.begin_segment([1])
    first.append_policy_turn(turn(2))
    empty = trace.begin_segment([1, 3], parent=first)
    trace.begin_segment([1, 4], parent=empty).append_policy_turn(turn(5))
    trace.begin_segment([9], parent=trace.begin_segment([8])).append_policy_turn(turn(6))
    assert [(r.sample_id, r.parent) for r in trace.to_rollouts(SAMPLE, "done", None)] == [
        (SAMPLE.sample_id, None), (f"{SAMPLE.sample_id}+1", SAMPLE.sample_id), (f"{SAMPLE.sample_id}+2", None),
    ]  # fmt: skip


def test_random_episodes_keep_every_sampled_token_in_place_and_travel_as_arrow() -> None:
    rng = random.Random(0)
    for episode in range(200):
        trace, sampled = Trace(policy_version=episode, masked=frozenset({7})), []
        segment: TraceSegment = trace.begin_segment(rng.choices(range(50), k=rng.randint(1, 5)))
        for _ in range(rng.randint(1, 8)):
            ids = rng.choices(range(50), k=rng.randint(1, 6))
            segment.append_policy_turn(turn(*ids, version=episode))
            sampled += ids
            segment.append_observation(rng.choices(range(50), k=rng.randint(0, 6)))
        (rollout,) = trace.to_rollouts(SAMPLE, "turns", None)
        by_policy = [
            token
            for token, span in zip(
                rollout.response_ids, (s for s in rollout.spans for _ in range(s.length)), strict=True
            )
            if span.origin != "environment"
        ]
        assert by_policy == sampled and trace.audit.sampled == len(sampled)
        assert sum(rollout.loss_mask) == trace.audit.trained == sum(token != 7 for token in sampled)
        assert decode_rollouts([encode_rollouts([rollout])], 50)[0].spans == rollout.spans


def test_audits_add_up() -> None:
    assert Audit(turns=2, forks=1) + Audit(turns=3, sampled=4) == Audit(turns=5, forks=1, sampled=4)


class Token(int):
    """A token id that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_a_late_fork_looks_at_no_token_one_by_one() -> None:
    """The loop of all episodes waits meanwhile: thirty segments of a long dialogue are compared as they lie in memory."""
    history = [Token(i) for i in range(5000)]
    trace = Trace()
    for number in range(30):
        segment = trace.continue_or_fork([*history, Token(9000 + number)])
        segment.append_policy_turn(turn(1))
    Token.compared = 0
    forked = trace.continue_or_fork([*history[:4000], Token(7)])
    assert Token.compared == 0
    assert (forked.number, forked.parent, trace.audit.forks) == (30, 0, 30)
    continued = trace.continue_or_fork([*history, Token(9012), 1, 5])
    assert (continued.number, Token.compared) == (12, 0)
