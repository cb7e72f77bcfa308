"""Scores per domain over an engine that answers from a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from opd.config.evaluate import EvaluateConfig
from opd.evaluation.evaluator import (
    KEPT_FAILURES,
    KEPT_QUESTIONS,
    KEPT_WRONG,
    DomainExam,
    EngineEvaluator,
    Reward,
    measure_experts,
    measure_student,
)
from opd.interfaces import Verifier
from opd.records.episodes import Audit, EpisodeResult
from opd.records.scores import Evaluation
from opd.records.types import Completion, Prompt, Teacher
from opd.verifiers.exact import ExactMatch, LastLine


class FakeEngine:
    """Answers what `knows` says for the weights it holds: a prompt's id, or the id and the number of the answer."""

    def __init__(self, knows: dict[str, set[str]], holds: str = "student") -> None:
        self.knows, self.holds = knows, holds
        self.batches: list[int] = []
        self.loads: list[str] = []
        self.temperatures: list[float] = []

    def load(self, model_dir: Path) -> None:
        self.holds = model_dir.name
        self.loads.append(model_dir.name)

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        self.batches.append(len(prompts))
        self.temperatures.append(temperature)
        known = self.knows[self.holds]
        return [
            Completion(
                prompt=p,
                text=f"{p.answer}\n" if known & {p.id, f"{p.id}#{i}"} else "?",
                num_tokens=i + 1,
                truncated=i == 3,
            )
            for p in prompts
            for i in range(n)
        ]


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(97 + t) for t in token_ids)


@dataclass(frozen=True)
class Picky:
    """Raises unless the answer is right."""

    def __call__(self, text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        return 1.0 / float(text.strip() == answer)

    def problem(self, answer: str, metadata: Mapping[str, Any]) -> str:
        return ""


def exam(domain: str, num: int, verifier: Verifier = ExactMatch()) -> DomainExam:  # noqa: B008 frozen, without state
    prompts = (Prompt(id=f"{domain}/{i}", domain=domain, token_ids=(1, 2), answer=f"x{i}") for i in range(num))
    return DomainExam(tuple(prompts), verifier)


EXAMS = {"a": exam("a", 4), "b": exam("b", 2, LastLine())}


def evaluator(
    engine: Any, exams: dict[str, DomainExam] = EXAMS, told: list[str] | None = None, **settings: Any
) -> EngineEvaluator:
    heard = [] if told is None else told
    return EngineEvaluator(engine, exams, EvaluateConfig(**settings), Letters(), heard.append)


def test_every_domain_is_scored_in_one_batch() -> None:
    engine = FakeEngine({"student": {"a/1", "b/0", "b/1"}})
    found = evaluator(engine).evaluate(model="me")
    assert (found.model, found.accuracy) == ("me", {"a": 0.25, "b": 1.0})
    assert engine.batches == [6]
    assert engine.temperatures == [0.0]
    a = found.scores["a"]
    assert (a.questions, a.samples, a.mean_tokens, a.truncated, a.failed) == (4, 1, 1.0, 0.0, 0)
    assert a.pass_at == {"1": 0.25}
    assert 0 < a.low < 0.25 < a.high < 1
    assert a.stderr == pytest.approx(0.25)  # of 0, 1, 0, 0: standard deviation 1/2, over the root of 4


def test_only_the_named_domains_are_scored() -> None:
    engine = FakeEngine({"student": {"b/0"}})
    assert evaluator(engine).evaluate(["b", "without-an-exam"], model="me").accuracy == {"b": 0.5}
    assert engine.batches == [2]


@pytest.mark.parametrize("domains", [[], ["other"]])
def test_nothing_to_score_does_not_wake_the_engine(domains: list[str]) -> None:
    engine = FakeEngine({})
    assert evaluator(engine).evaluate(domains, model="me") == Evaluation(model="me", scores={})
    assert evaluator(engine, {}).evaluate(model="me").scores == {}
    assert engine.batches == []


def test_several_answers_to_a_question_are_its_own() -> None:
    engine = FakeEngine({"student": {"a/0", "a/1#0", "a/2#1", "a/2#2", "b/1#3"}})
    found = evaluator(engine, n=4, temperature=0.7, pass_at=[1, 2, 4]).evaluate(model="me")
    assert engine.batches == [6] and engine.temperatures == [0.7]
    a, b = found.scores["a"], found.scores["b"]
    assert (a.questions, a.samples, b.questions) == (4, 4, 2)
    assert (a.accuracy, b.accuracy) == (7 / 16, 1 / 8)
    # Of four answers right: 4, 1, 2, 0. Two chosen of six pairs hold a right one in 6, 3, 5, 0.
    assert a.pass_at == pytest.approx({"1": 7 / 16, "2": (6 + 3 + 5) / 24, "4": 3 / 4})
    assert (a.mean_tokens, a.truncated) == (2.5, 0.25)


def test_some_answers_are_kept_to_be_read() -> None:
    exams = {"a": exam("a", 30), "b": exam("b", 2)}
    found = evaluator(FakeEngine({"student": {"a/2"}}), exams, n=2, temperature=1).evaluate(model="me")
    kept = [(a.prompt_id, a.score) for a in found.answers]
    assert kept[4:6] == [("a/2", 1.0), ("a/2", 1.0)]
    first, wrong = 2 * KEPT_QUESTIONS, 2 * KEPT_QUESTIONS + KEPT_WRONG
    assert [i for i, _ in kept] == [f"a/{i // 2}" for i in range(wrong)] + ["b/0", "b/0", "b/1", "b/1"]
    assert [score for _, score in kept[first:wrong]] == [0.0] * KEPT_WRONG


def test_wrong_answers_behind_the_first_ones_are_kept() -> None:
    right = {f"a/{i}" for i in range(30) if i not in (11, 20)}
    found = evaluator(FakeEngine({"student": right}), {"a": exam("a", 30)}).evaluate(model="me")
    assert [a.prompt_id for a in found.answers] == [f"a/{i}" for i in (*range(KEPT_QUESTIONS), 11, 20)]


def test_what_an_answer_carries() -> None:
    exams = {"a": exam("a", 30), "b": exam("b", 2)}
    found = evaluator(FakeEngine({"student": {"a/2"}}), exams, n=2, temperature=1).evaluate(model="me")
    first = found.answers[1]
    assert (first.prompt, first.answer, first.text, first.tokens, first.error) == ("bc", "x0", "?", 2, "")


def test_a_verifier_that_raises_costs_its_answer_and_nothing_else() -> None:
    told: list[str] = []
    exams = {"a": exam("a", 60, Picky()), "b": exam("b", 2)}
    engine = FakeEngine({"student": {"a/0", "a/59", "b/0"}})
    found = evaluator(engine, exams, told).evaluate(model="step 7")
    assert found.accuracy == {"a": 2 / 60, "b": 0.5}
    assert {d: s.failed for d, s in found.scores.items()} == {"a": 58, "b": 0}
    assert told == [
        "step 7: the verifier of a raised on 58 of 60 answers, counted as wrong: "
        "ZeroDivisionError: float division by zero"
    ]
    failures = [a for a in found.answers if a.error]
    assert len(failures) == KEPT_QUESTIONS - 1 + KEPT_FAILURES
    assert all("in __call__" in a.error and a.score == 0 and a.domain == "a" for a in failures)


def test_the_baseline_is_the_student_everywhere_and_each_expert_on_its_own() -> None:
    engine = FakeEngine({"student": {"a/0"}, "ea": {"a/0", "a/1", "a/2"}, "whole-b": {"b/0", "b/1"}, "ec": set()})
    teachers = {d: Teacher(name=f"expert-{d}", model_dir=Path(f"/m/e{d}")) for d in ("a", "b", "c")}
    teachers["b"] = Teacher(name="expert-b", model_dir=Path("/m/base"), adapter_dir=Path("/m/eb"))
    told: list[str] = []
    there: list[str] = []

    @contextmanager
    def whole(teacher: Teacher) -> Iterator[Path]:
        directory = Path("/scratch/whole-b") if teacher.adapter_dir else teacher.model_dir
        there.append(directory.name)
        asked = len(engine.batches)
        yield directory
        assert engine.holds == there.pop(), "the directory is there while the engine reads it"
        assert len(engine.batches) > asked, "and while it answers: a worker that dies reads it again"

    before = measure_student(evaluator(engine), list(EXAMS), told.append)
    assert (before.model, before.accuracy) == ("student before", {"a": 0.25, "b": 0.0})
    known = before.accuracy
    expert = measure_experts(engine.load, evaluator(engine), known, teachers, whole, told.append)
    assert (expert.model, expert.accuracy) == ("expert", {"a": 0.75, "b": 1.0})
    assert [a.domain for a in expert.answers] == ["a"] * 4 + ["b"] * 2
    assert there == []
    assert engine.loads == ["ea", "whole-b"], "one without an exam is not loaded"
    assert "0.125" in told[0]
    assert "expert-a" in told[1]


def test_a_baseline_without_exams() -> None:
    engine = FakeEngine({"student": set()})
    told: list[str] = []
    teachers = {"a": Teacher(name="e", model_dir=Path("/m/e"))}
    whole = nullcontext(Path("/m/e"))
    judge = evaluator(engine, {})
    assert measure_student(judge, [], told.append).scores == {}
    assert measure_experts(engine.load, judge, {}, teachers, lambda _: whole, told.append).scores == {}
    assert told == ["no domain has an exam"]
    assert engine.loads == []


def test_the_score_of_an_episode_is_the_environments_reward() -> None:
    def played(reward: float | None, turns: int, error: str = "") -> EpisodeResult:
        return EpisodeResult(
            rollouts=(), stop_reason="raised" if error else "done", reward=reward, error=error, invalid_calls=turns - 1,
            audit=Audit(turns=turns, sampled=4 * turns),
        )  # fmt: skip

    class Acting:
        def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
            episodes = [None, played(0.5, 3), played(None, 1), played(7.0, 2), played(1.0, 2, "step: KeyError")]
            return [
                Completion(prompt=p, text="policy: n", num_tokens=9, episode=e)
                for p, e in zip(prompts, episodes, strict=True)
            ]

    told: list[str] = []
    found = evaluator(Acting(), {"a": exam("a", 5, Reward())}, told).evaluate(model="me").scores["a"]
    assert found.accuracy == pytest.approx((0.5 + 0 + 1 + 0 + 0) / 5), "what broke is wrong, as the line says"
    assert (found.turns, found.invalid_calls, found.failed) == (2.0, 4, 1)
    assert told == ["me: the environment of a raised on 1 of 5 answers, counted as wrong: step: KeyError"]


def test_tokens_of_a_pass_are_counted_where_a_draft_guessed() -> None:
    class Drafting(FakeEngine):
        def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
            accepted = {"a": (3, 0, 1), "b": ()}
            return [replace(c, accepted=accepted[c.prompt.domain]) for c in super().answer(prompts, n=n)]

    scores = evaluator(Drafting({"student": set()})).evaluate(model="m").scores
    assert {name: score.accepted_length for name, score in scores.items()} == {"a": 1.5, "b": None}


def test_an_expert_that_reads_something_else_is_asked_that() -> None:
    asked: list[Any] = []

    class Recording(FakeEngine):
        def answer(self, prompts: Sequence[Prompt], *, n: int, temperature: float) -> Any:
            asked.append([prompt.token_ids for prompt in prompts])
            return super().answer(prompts, n=n, temperature=temperature)

    own = DomainExam(tuple(replace(prompt, token_ids=(7,)) for prompt in EXAMS["b"].prompts), EXAMS["b"].verifier)
    made = EngineEvaluator(Recording({"student": set()}), EXAMS, EvaluateConfig(), Letters(), print, {"b": own})
    for as_expert in (False, True):
        made.evaluate(["b"], model="me", as_expert=as_expert)
    made.evaluate(["a"], model="me", as_expert=True)
    assert asked == [[(1, 2)] * 2, [(7,)] * 2, [(1, 2)] * 4]
