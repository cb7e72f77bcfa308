"""Accuracy per domain over an engine that answers from a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from opd.evaluation.evaluator import DomainExam, EngineEvaluator, measure_baseline
from opd.types import Completion, Prompt, Teacher


class FakeEngine:
    """Answers what `knows` says for the weights it holds; counts batches and loads."""

    def __init__(self, knows: dict[str, set[str]], holds: str = "student") -> None:
        self.knows, self.holds = knows, holds
        self.batches: list[int] = []
        self.loads: list[str] = []

    def load(self, model_dir: Path) -> None:
        self.holds = model_dir.name
        self.loads.append(model_dir.name)

    def answer(self, prompts: Sequence[Prompt]) -> list[Completion]:
        self.batches.append(len(prompts))
        return [
            Completion(prompt=p, text=f"{p.answer}\n" if p.id in self.knows[self.holds] else "?", num_tokens=1)
            for p in prompts
        ]


def exam(domain: str, num: int, verifier: str = "exact_match") -> DomainExam:
    prompts = (Prompt(id=f"{domain}/{i}", domain=domain, token_ids=(1,), answer=f"x{i}") for i in range(num))
    return DomainExam(tuple(prompts), verifier)


EXAMS = {"a": exam("a", 4), "b": exam("b", 2, "last_line")}


def evaluator(engine: Any, exams: dict[str, DomainExam] = EXAMS) -> EngineEvaluator:
    return EngineEvaluator(engine, exams)


def test_every_domain_is_scored_in_one_batch() -> None:
    engine = FakeEngine({"student": {"a/1", "b/0", "b/1"}})
    assert evaluator(engine).evaluate() == {"a": 0.25, "b": 1.0}
    assert engine.batches == [6]


def test_only_the_named_domains_are_scored() -> None:
    engine = FakeEngine({"student": {"b/0"}})
    assert evaluator(engine).evaluate(["b", "without-an-exam"]) == {"b": 0.5}
    assert engine.batches == [2]


@pytest.mark.parametrize("domains", [[], ["other"]])
def test_nothing_to_score_does_not_wake_the_engine(domains: list[str]) -> None:
    engine = FakeEngine({})
    assert evaluator(engine).evaluate(domains) == {}
    assert EngineEvaluator(engine, {}).evaluate() == {}  # type: ignore[arg-type]
    assert engine.batches == []


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
        yield directory
        assert engine.holds == there.pop(), "the directory is there while the engine reads it"

    baseline = measure_baseline(engine, evaluator(engine), Path("/m/student"), teachers, whole, told.append)  # type: ignore[arg-type]
    assert baseline.before == {"a": 0.25, "b": 0.0}
    assert baseline.expert == {"a": 0.75, "b": 1.0}
    assert there == []
    assert engine.loads == ["ea", "whole-b", "student"], "one without an exam is not loaded; the student is, at last"
    assert "0.125" in told[0]
    assert "expert-a" in told[1]


def test_a_baseline_without_exams() -> None:
    engine = FakeEngine({"student": set()})
    told: list[str] = []
    teachers = {"a": Teacher(name="e", model_dir=Path("/m/e"))}
    whole = nullcontext(Path("/m/e"))
    baseline = measure_baseline(
        engine, evaluator(engine, {}), Path("/m/student"), teachers, lambda _: whole, told.append
    )  # type: ignore[arg-type]
    assert (baseline.before, baseline.expert) == ({}, {})
    assert told == ["no domain has an exam"]
