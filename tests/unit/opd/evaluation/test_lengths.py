"""Success by the length of the task: whose length, which bucket, how sure, and files of before there were any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from opd.environments.hanoi import Hanoi
from opd.evaluation.baselines import BaselineResult
from opd.evaluation.evaluator import DomainExam, Reward
from opd.evaluation.lengths import BUCKETS, align_lengths, by_length, describe_span, right_moves
from opd.evaluation.statistics import confidence_interval
from opd.records.episodes import Audit, EpisodeResult
from opd.records.scores import DomainScore, Evaluation, LengthScore, combine_evaluations
from opd.records.types import Completion, Prompt
from tests.unit.opd.evaluation.test_evaluator import FakeEngine, evaluator, exam


def bucket_of(moves: int) -> str:
    (found,) = by_length([(moves, [1.0])])
    return describe_span(found.fewest, found.most)


def test_the_buckets_hold_every_length_once() -> None:
    lengths = [(1, "1-3"), (3, "1-3"), (4, "4-7"), (7, "4-7"), (8, "8-14"), (14, "8-14"), (15, "15 and more"), (999, "15 and more")]  # fmt: skip
    assert [bucket_of(moves) for moves, _ in lengths] == [name for _, name in lengths]
    ends = [fewest for fewest, _ in BUCKETS[1:]]
    assert [most + 1 for _, most in BUCKETS[:-1] if most is not None] == ends and BUCKETS[-1][1] is None


def test_a_bucket_has_its_tasks_their_mean_and_wilsons_interval() -> None:
    # Wilson's interval of 81 right answers of 263: scipy's binomtest(81, 263).proportion_ci(method="wilson").
    scored = [(2, [1.0]), *[(9, [float(i < 81)]) for i in range(263)]]
    short, long = by_length(scored)
    assert (short.fewest, short.most, short.questions, short.accuracy) == (1, 3, 1, 1.0)
    assert (short.low, short.high) == pytest.approx((0.2065493, 1.0), abs=1e-7)
    assert (long.questions, long.accuracy) == (263, 81 / 263)
    assert (long.low, long.high) == pytest.approx((0.2552885, 0.3662096), abs=1e-7)


def test_several_answers_to_a_task_are_one_task() -> None:
    (found,) = by_length([(5, [1.0, 0.0]), (6, [1.0, 1.0]), (4, [0.0, 0.0])])
    assert (found.questions, found.accuracy) == (3, 0.5)
    assert (found.low, found.high) == confidence_interval([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])


def test_empty_buckets_and_tasks_without_a_number_are_left_out() -> None:
    assert by_length([]) == by_length([(None, [1.0]), (None, [0.0])]) == ()
    assert [(one.fewest, one.questions) for one in by_length([(None, [1.0]), (20, [1.0]), (1, [0.0])])] == [(1, 1), (15, 1)]  # fmt: skip


@pytest.mark.parametrize("moves", [None, 0, -3, 2.5, "7", True, ["u", "d"], {}])
def test_what_is_no_number_of_moves_is_no_length(moves: Any) -> None:
    assert right_moves({"moves": moves}) is None
    assert right_moves({}) is None


def test_the_games_say_how_long_their_tasks_are() -> None:
    assert [right_moves(row["metadata"]) for row in Hanoi.tasks(20, 0)] == [
        len(row["answer"].split()) for row in Hanoi.tasks(20, 0)
    ]


class Playing:
    """Plays each task in as many turns as it likes; the last prompt did not fit and is no episode."""

    def __init__(self, rewards: Sequence[float], turns: int) -> None:
        self.rewards, self.turns = rewards, turns

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        played = [
            EpisodeResult(rollouts=(), stop_reason="done", reward=r, audit=Audit(turns=self.turns, sampled=9))
            for r in self.rewards
        ]
        return [
            Completion(prompt=p, text="", num_tokens=9, episode=e)
            for p, e in zip(prompts, [*played, None], strict=True)
        ]


def tasks(*moves: int | None) -> DomainExam:
    rows = ({} if m is None else {"moves": m} for m in moves)
    prompts = (
        Prompt(id=f"a/{i}", domain="a", token_ids=(1,), answer="", metadata=metadata) for i, metadata in enumerate(rows)
    )
    return DomainExam(tuple(prompts), Reward())


@pytest.mark.parametrize("turns", [1, 40])
def test_the_length_is_the_tasks_and_not_the_players(turns: int) -> None:
    engine = Playing([1.0, 1.0, 0.0, 1.0], turns)
    score = evaluator(engine, {"a": tasks(2, 16, 31, None, 3)}).evaluate(model="me").scores["a"]
    assert [(one.fewest, one.most, one.questions, one.accuracy) for one in score.by_length] == [
        (1, 3, 2, 0.5),
        (15, None, 2, 0.5),
    ], "the prompt that did not fit counts as wrong, the task without a number only in the whole"
    assert (score.questions, score.turns) == (5, turns)


def test_nothing_is_said_without_episodes_or_without_numbers() -> None:
    told = evaluator(Playing([1.0], 3), {"a": tasks(None, None)}).evaluate(model="me").scores["a"]
    assert (told.by_length, told.turns) == ((), 3)
    questions = Prompt(id="a/0", domain="a", token_ids=(1,), answer="x", metadata={"moves": 4})
    exams = {"a": DomainExam((questions,), exam("a", 1).verifier)}
    assert evaluator(FakeEngine({"student": set()}), exams).evaluate(model="me").scores["a"].by_length == ()


def score(accuracy: float, *by: LengthScore) -> DomainScore:
    return DomainScore(accuracy=accuracy, stderr=0.1, low=0.0, high=1.0, questions=9, turns=2.0, by_length=by)


def part(fewest: int, most: int | None, accuracy: float) -> LengthScore:
    return LengthScore(fewest=fewest, most=most, questions=9, accuracy=accuracy, low=0.0, high=1.0)


def test_the_file_of_an_exam_keeps_it(tmp_path: Path) -> None:
    found = Evaluation(model="me", scores={"a": score(0.5, part(1, 3, 1.0), part(15, None, 0.25))})
    found.save(tmp_path / "exam.json")
    assert Evaluation.load(tmp_path / "exam.json") == found
    written = json.loads((tmp_path / "exam.json").read_text())["scores"]["a"]["by_length"]
    assert written[1] == {"fewest": 15, "most": None, "questions": 9, "accuracy": 0.25, "low": 0.0, "high": 1.0}
    assert (
        combine_evaluations([found, Evaluation(model="b", scores={"b": score(1.0)})], "both").scores["a"]
        == found.scores["a"]
    )


def test_a_baselines_file_keeps_it_too(tmp_path: Path) -> None:
    found = BaselineResult(method="m", label="M", seed=0, scores={"a": score(0.5, part(4, 7, 0.5))}, wall_s=1.0)
    found.save(tmp_path / "m.json")
    assert BaselineResult.load(tmp_path / "m.json") == found


def test_files_of_before_there_were_lengths_can_be_read() -> None:
    old = {key: value for key, value in asdict(score(0.5)).items() if key != "by_length"}
    read = Evaluation.from_json({"format": 1, "model": "me", "scores": {"a": old}, "answers": []})
    assert read.scores["a"] == score(0.5)
    baseline = {"format": 1, "method": "m", "label": "M", "seed": 0, "scores": {"a": old}, "wall_s": 1.0}
    assert BaselineResult.from_json(baseline).scores["a"].by_length == ()


def test_models_side_by_side() -> None:
    new = Evaluation(model="new", scores={"a": score(0.5, part(1, 3, 1.0), part(15, None, 0.25)), "b": score(1.0)})
    old = Evaluation(model="old", scores={"a": score(0.5), "b": score(0.5)})
    other = Evaluation(model="other", scores={"a": score(0.5, part(4, 7, 0.5), part(15, None, 0.75))})
    rows = align_lengths({"new": new, "old": old, "other": other})
    assert [(row.domain, row.fewest, row.most, row.questions, sorted(row.scores)) for row in rows] == [
        ("a", 1, 3, 9, ["new"]),
        ("a", 4, 7, 9, ["other"]),
        ("a", 15, None, 9, ["new", "other"]),
    ]
    assert rows[2].scores["other"].accuracy == 0.75 and rows[2].moves == "15 and more"
    assert align_lengths({"old": old}) == align_lengths({}) == []
