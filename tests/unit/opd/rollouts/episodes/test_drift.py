"""A curriculum ends episodes early, and an expert writes some of the turns: both as functions of the step alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from opd.records.episodes import EpisodeResult, EpisodeStats
from opd.records.types import SampledTurn
from opd.rollouts.episodes.drift import Curriculum, DriftOptions, Guide, TeacherTurns
from opd.rollouts.episodes.runner import Dialogues, run_episodes
from opd.rollouts.episodes.spec import EpisodeRequest
from opd.rollouts.episodes.trace import Trace
from opd.stream.rollouts import read_file, write_file
from tests.unit.opd.rollouts.episodes import test_runner as runner
from tests.unit.opd.rollouts.episodes import test_sub_agents as sub
from tests.unit.opd.rollouts.episodes.test_runner import CONTEXT, EOS, TOKENIZER, Speaker, request

MASKED, TAUGHT = (
    Guide(model_dir=Path("e"), probability=0.5, train=False),
    Guide(model_dir=Path("e"), probability=0.5, train=True),
)
LONG = {"options": {"goal": 99}, "max_turns": 6}


def play(*requests: EpisodeRequest) -> tuple[list[EpisodeResult], Speaker, Speaker]:
    """The policy always says `p`, its expert `ee`."""
    runner.Counting.made.clear()
    policy, expert = Speaker(lambda _: "p"), Speaker(lambda _: "ee")
    dialogues = Dialogues(TOKENIZER, [EOS])
    found = asyncio.run(run_episodes(requests, policy, dialogues, CONTEXT, 2, expert))
    return found, policy, expert


def guided(i: int, guide: Guide | None = MASKED, **options: object) -> EpisodeRequest:
    return replace(request(i, **LONG | options), guide=guide)


def test_the_limit_rises_in_a_straight_line_to_the_last_turn() -> None:
    rising = Curriculum(first=3, over_steps=10)
    found = [rising.turns_at_step(step, 8) for step in range(1, 14)]
    assert found == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 8]
    assert DriftOptions().turn_limit(1, 8) == 8 and DriftOptions(curriculum=rising).turn_limit(5, 8) == 5


def test_the_probability_falls_in_a_straight_line_to_nobody() -> None:
    turns = TeacherTurns(model_dir=Path("e"), share=0.8, over_steps=4, train=True)
    assert [turns.probability_at_step(step) for step in range(1, 7)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    drift = DriftOptions(teacher_turns=turns)
    assert drift.guide_at_step(2) == Guide(model_dir=Path("e"), probability=pytest.approx(0.6), train=True)
    assert drift.guide_at_step(5) is None and DriftOptions().guide_at_step(1) is None, (
        "nobody loads an expert for nothing"
    )


def test_an_episode_that_the_curriculum_ends_has_a_reason_of_its_own() -> None:
    cut, whole = request(0, options={"goal": 99}, max_turns=3), request(1, options={"goal": 99}, max_turns=3)
    results, _, _ = play(replace(cut, cut_after=2), replace(whole, cut_after=3))
    assert [(r.stop_reason, r.audit.turns, r.error) for r in results] == [("curriculum", 2, ""), ("turns", 3, "")]
    assert EpisodeStats.from_results(results).stop_reasons == {"curriculum": 1, "turns": 1}
    (rollout,) = results[0].rollouts
    assert TOKENIZER.decode(rollout.trained_ids) == "p<|im_end|>" * 2, "its tokens train as ever"
    assert read_file(write_file([rollout]), len(TOKENIZER)) == [rollout]


def test_an_episode_that_ends_by_itself_knows_no_curriculum() -> None:
    runner.Counting.made.clear()
    early = replace(request(0), cut_after=5)  # done after three turns
    (found,), _ = runner.play(early)
    assert (found.stop_reason, found.audit.turns) == ("done", 3)


def said_by(found: EpisodeResult) -> str:
    """One letter a turn: who wrote it."""
    return "".join(line[0] for line in found.text.splitlines() if not line.startswith("environment"))


@pytest.mark.parametrize(("guide", "origin"), [(MASKED, "teacher"), (TAUGHT, "taught")])
def test_an_expert_writes_some_of_the_turns(guide: Guide, origin: str) -> None:
    results, policy, expert = play(*(guided(i, guide) for i in range(20)))
    turns = "".join(map(said_by, results))
    assert len(turns) == 120 and 40 < turns.count("e") < 80, "half of them, give or take"
    assert (len(policy.seeds), len(expert.seeds)) == (turns.count("p"), turns.count("e"))
    for found in results:
        (rollout,) = found.rollouts
        by = [span for span in rollout.spans if span.origin != "environment"]
        assert [span.origin for span in by] == [{"p": "policy", "e": origin}[who] for who in said_by(found)]
        assert {span.policy_version for span in by} == {2}
        text = {"p": "p<|im_end|>", "e": "ee<|im_end|>" if guide.train else ""}
        assert TOKENIZER.decode(rollout.trained_ids) == "".join(text[who] for who in said_by(found))
        at = 0
        for span in rollout.spans:
            wanted = -1.0 if span.origin == "policy" else 0.0
            assert rollout.behaviour_logprobs[at : at + span.length] == (wanted,) * span.length
            at += span.length
        own = said_by(found).count("p")
        assert found.audit.sampled == found.audit.trained == 2 * own == sum(rollout.sampled_mask)
        assert (found.audit.turns, found.audit.teacher_turns) == (6, 6 - own)
        assert read_file(write_file([rollout]), len(TOKENIZER)) == [rollout]


def test_a_turns_number_counts_the_turns_of_both() -> None:
    (found,), _, _ = play(guided(0))
    (rollout,) = found.rollouts
    own = [number for number, who in enumerate(said_by(found)) if who == "p"]
    assert rollout.turns == tuple(number for number in own for _ in range(2))
    (taught,), _, _ = play(guided(0, TAUGHT))
    assert sorted(set(taught.rollouts[0].turns)) == list(range(6))


def test_who_writes_depends_on_seed_episode_and_turn_alone() -> None:
    alone, _, _ = play(guided(3))
    results, _, _ = play(*(guided(i) for i in range(8)))
    assert results[3] == alone[0]
    other, _, _ = play(replace(guided(3), seed=6))
    assert said_by(other[0]) != said_by(alone[0])
    surer = replace(MASKED, probability=0.75)
    (more,), _, _ = play(guided(3, surer))
    pairs = list(zip(said_by(alone[0]), said_by(more), strict=True))
    assert ("e", "p") not in pairs, "as the probability falls, turns only go over to the policy"


def test_without_a_guide_nothing_is_drawn() -> None:
    (one,), policy, expert = play(guided(0, None))
    assert said_by(one) == "p" * 6 and not expert.seeds
    (guide,), with_guide, _ = play(guided(0))
    assert [s for s in with_guide.seeds if s not in policy.seeds] == [], "the policy's turns keep their seeds"
    assert guide.audit.teacher_turns


def test_the_episodes_budget_is_for_the_policys_own_tokens() -> None:
    results, _, _ = play(*(guided(i, max_tokens=4, max_turns=40) for i in range(6)))
    assert {(found.stop_reason, found.audit.sampled) for found in results} == {("tokens", 4)}
    assert sum(found.audit.teacher_turns for found in results) > 3


def test_the_episodes_budget_cuts_no_turn_of_the_expert() -> None:
    results, _, expert = play(*(guided(i, TAUGHT, max_tokens=3, max_turns=40) for i in range(6)))
    assert set(expert.limits) == {20}, "a whole turn, whatever is left of the policy's own budget"
    for found in results:
        text = TOKENIZER.decode(found.rollouts[0].response_ids).replace(" -1 ", " ")
        assert "e " not in text and text.count("ee<|im_end|>") == found.audit.teacher_turns
    assert {found.stop_reason for found in results} == {"tokens"}


def test_sub_agents_are_the_policys_alone() -> None:
    sub.Desk.made.clear()
    guide = replace(MASKED, probability=1.0)
    policy, expert = Speaker(sub.policy()), Speaker(sub.policy(sub.ask("2+3")))
    made = run_episodes([replace(sub.asking(), guide=guide)], policy, Dialogues(sub.CHAT, [EOS]), CONTEXT, 2, expert)
    (found,) = asyncio.run(made)
    main, helper = found.rollouts
    assert {span.origin for span in main.spans} == {"teacher", "environment"}
    assert [span.origin for span in helper.spans] == ["policy"] and sub.wrote(helper) == ["5"]
    assert (found.audit.teacher_turns, found.audit.turns, found.audit.sampled) == (2, 3, 2)


def test_a_segment_that_the_expert_wrote_alone_is_a_row_without_a_trained_token() -> None:
    trace = Trace(1)
    trace.begin_segment([5]).append_teacher_turn(
        SampledTurn(token_ids=(6, 7), logprobs=(-1.0, -2.0), stop_reason="stop", policy_version=1), train=False
    )
    (rollout,) = trace.to_rollouts(request().sample, "turns", None)
    assert rollout.response_ids == (6, 7) and rollout.num_trained == 0 and rollout.loss_mask == (False, False)
