"""A check's verdict on the figures: swapped, garbled, useless and finished experts; a fake engine, real inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.records.scores import DomainScore, Evaluation
from opd.records.types import Completion, Prompt, Rollout, RolloutBatch, Teacher
from pipelines.check.comparison import TeacherComparison
from pipelines.check.judge import CheckFinding, MeasuredTeacher, is_doubtful, judge_student, judge_teachers
from pipelines.check.measure import CheckReport, measure_teachers, teacher_rows, template_findings
from pipelines.inputs.read import read_inputs
from tests.rows import make_rollout

FINE = TeacherComparison(kl=0.3, overlap=0.8, prompt_nll=5.0, answer_nll=0.2)
VOCABULARY = 76


def one(student: float | None, expert: float | None, **changes: Any) -> MeasuredTeacher:
    base = MeasuredTeacher(
        domain="sort", expert="a", leads=True, student_accuracy=student, expert_accuracy=expert, compared=FINE
    )
    return replace(base, **changes)


def judged(*measured: MeasuredTeacher) -> list[CheckFinding]:
    return list(judge_teachers(measured, VOCABULARY))


# Accuracy


def test_an_expert_that_knows_more_is_fine() -> None:
    assert judged(one(0.5, 0.53)) == []


@pytest.mark.parametrize(("student", "expert"), [(0.5, 0.5), (0.5, 0.47), (0.0, 0.0), (0.995, 0.98), (1.0, 0.9)])
def test_an_expert_that_knows_no_more_fails(student: float, expert: float) -> None:
    (finding,) = judged(one(student, expert))
    assert (finding.level, finding.domain) == ("fail", "sort")
    assert f"`a` scores {expert:.2f} on sort, the student {student:.2f}" in finding.message
    assert "domains.sort" in finding.fix


@pytest.mark.parametrize(("student", "expert"), [(1.0, 1.0), (0.99, 0.99), (1.0, 0.99), (0.99, 1.0)])
def test_nothing_to_learn_is_a_warning(student: float, expert: float) -> None:
    (finding,) = judged(one(student, expert))
    assert (finding.level, finding.message[:16]) == ("warn", "nothing to learn")


def test_a_swapped_expert_is_named_with_the_right_one() -> None:
    (finding,) = judged(one(0.1, 0.05, rivals={"c": 0.5, "b": 0.98}))
    assert (finding.level, finding.message) == (
        "fail",
        "expert `a` scores 0.05 on sort, `b` scores 0.98: swapped?",
    )
    assert "domains.sort.teachers: b" in finding.fix


def test_a_swap_is_seen_where_the_wrong_expert_is_a_little_better_than_the_student() -> None:
    (finding,) = judged(one(0.03, 0.06, rivals={"b": 0.98}))
    assert finding.level == "fail" and "`b` scores 0.98: swapped?" in finding.message


@pytest.mark.parametrize(("expert", "rival"), [(0.8, 1.0), (0.1, 0.3), (0.4, 0.6)])
def test_a_rival_that_is_better_by_a_fifth_is_a_swap(expert: float, rival: float) -> None:
    assert rival - expert < 0.2, "in floating point; on ten questions it is two answers, no less"
    (finding,) = judged(one(0.0, expert, rivals={"b": rival}))
    assert finding.level == "fail" and "swapped?" in finding.message


def test_a_rival_that_is_only_a_little_better_is_no_swap() -> None:
    assert judged(one(0.5, 0.6, rivals={"b": 0.75})) == []
    (finding,) = judged(one(0.6, 0.5, rivals={"b": 0.65}))
    assert "swapped" not in finding.message and "`b`" not in finding.message


@pytest.mark.parametrize(
    ("student", "expert", "want"),
    [
        (0.1, 0.9, False),
        (0.1, 0.29, True),
        (0.1, 0.3, False),
        (0.1, 0.31, False),
        (0.5, 0.4, True),
        (1.0, 1.0, False),
        (0.75, 0.85, False),
    ],
)
def test_others_are_asked_where_there_is_no_clear_gain(student: float, expert: float, want: bool) -> None:
    assert is_doubtful(student, expert) is want


def test_a_domain_without_an_exam_is_a_warning() -> None:
    (finding,) = judged(one(None, None))
    assert finding.level == "warn" and finding.message.startswith("not measured") and "domains.sort.eval" in finding.fix


@pytest.mark.parametrize(
    ("share", "expert", "warned"),
    [(0.7, 0.7, True), (0.7, 0.65, True), (0.5, 0.75, False), (0.5, 0.7, False), (0.19, 0.2, False), (0.0, 0.1, False)],
)
def test_an_expert_that_may_have_learned_one_answer_is_a_warning(share: float, expert: float, warned: bool) -> None:
    found = judged(one(0.0, expert, frequent=("1", share)))
    assert [f.level for f in found] == ["warn"] * warned
    assert all(f"always answering '1' would score {share:.2f} on sort" in f.message for f in found)


def test_a_lesser_teacher_need_not_know_the_domain() -> None:
    assert judged(one(0.9, None, leads=False)) == []


# Token by token


@pytest.mark.parametrize(
    ("prompt", "answer", "fails"),
    [
        (0.91, 0.91, True),
        (0.89, 2.0, False),  # knows prompts; reasons before it answers
        (2.0, 0.89, False),  # was trained on answers only
        (2.0, 2.0, True),
        (None, 0.95, True),
        (None, 0.2, False),
        (math.nan, math.nan, True),
        (None, None, False),
        (2.0, None, False),  # prompts of random letters are a guess to everybody
        (math.nan, None, True),
    ],
)
def test_as_good_as_a_guess_is_garbled(prompt: float | None, answer: float | None, fails: bool) -> None:
    guess = math.log(VOCABULARY)
    nll = {"prompt_nll": prompt and prompt * guess, "answer_nll": answer and answer * guess}
    found = judged(one(0.9, 0.9 - 0.2 * fails + 0.05, compared=replace(FINE, overlap=0.29 if fails else 0.8, **nll)))
    assert [f.level for f in found] == (["fail"] if fails else [])
    assert all("`a`" in f.message and "garbled" in f.message and "experts.a" in f.fix for f in found)


@pytest.mark.parametrize(
    ("student", "expert", "overlap", "fails"),
    [
        (0.1, 0.1, 0.0, True),
        (None, None, 0.0, True),
        (None, None, None, True),
        (0.1, 0.4, 0.0, False),
        (0.1, 0.1, 0.5, False),
    ],
)
def test_a_guess_is_no_verdict_where_something_speaks_for_the_expert(
    student: float | None, expert: float | None, overlap: float | None, fails: bool
) -> None:
    guess = 2 * math.log(VOCABULARY)
    compared = replace(FINE, prompt_nll=guess, answer_nll=guess, overlap=overlap)
    messages = [finding.message for finding in judged(one(student, expert, compared=compared))]
    assert any("garbled" in message for message in messages) == fails


@pytest.mark.parametrize("registered", [True, False])
def test_a_command_of_the_registry_is_named_for_its_experts_alone(registered: bool) -> None:
    (finding,) = judged(one(0.1, None, compared=TeacherComparison(broken="torn"), registered=registered))
    assert ("opd experts verify" in finding.fix) == registered and "experts.a" in finding.fix


@pytest.mark.parametrize(("prompt", "answer"), [(math.nan, 1.0), (1.0, math.nan)])
def test_what_is_not_a_number_is_garbled_on_either_side(prompt: float, answer: float) -> None:
    (finding,) = judged(one(0.1, 0.9, compared=replace(FINE, prompt_nll=prompt, answer_nll=answer)))
    assert "garbled" in finding.message


def test_a_broken_teacher_says_why_and_nothing_else() -> None:
    broken = TeacherComparison(broken="teacher a: output head is not finite")
    (finding,) = judged(one(0.1, None, compared=broken))
    assert finding.level == "fail" and "output head is not finite" in finding.message


@pytest.mark.parametrize(("overlap", "warned"), [(0.29, True), (0.3, False), (None, False)])
def test_far_apart_is_a_warning(overlap: float | None, warned: bool) -> None:
    found = judged(one(0.1, 0.9, compared=replace(FINE, overlap=overlap)))
    assert [f.level for f in found] == (["warn"] if warned else [])
    assert not warned or "29%" in found[0].message


@pytest.mark.parametrize(
    ("itself", "fails"),
    [
        (TeacherComparison(kl=9e-5), False),
        (TeacherComparison(kl=2e-4), True),
        (TeacherComparison(kl=math.nan), True),
        (TeacherComparison(broken="teacher student: output head is not finite"), True),
    ],
)
def test_the_student_is_no_distance_from_itself(itself: TeacherComparison, fails: bool) -> None:
    found = list(judge_student(itself))
    assert [(f.level, f.domain) for f in found] == ([("fail", "")] if fails else [])


def test_the_table_has_a_row_for_each_teacher_and_the_worst_of_its_domain() -> None:
    odd, ends = replace(one(None, None), domain="odd", expert="b"), replace(one(0.1, 0.9), domain="ends", expert="c")
    rows = (one(0.1, 0.05), odd, ends)
    findings = tuple(judged(*rows))
    report = CheckReport(vocab_size=VOCABULARY, measured=rows, findings=findings, memory=(), log="", numbers="")
    assert report.failed
    nll = f"{0.2 / math.log(VOCABULARY):.2f}"
    assert teacher_rows(report) == [
        ("sort", "a", "0.10", "0.05", "80%", "0.300", nll, "fail"),
        ("odd", "b", "-", "-", "80%", "0.300", nll, "warn"),
        ("ends", "c", "0.10", "0.90", "80%", "0.300", nll, "ok"),
    ]
    assert not replace(report, findings=report.findings[1:]).failed


# Measuring, on a fake engine


@dataclass
class FakeEngine:
    """Answers as well as a table says: model directory's name -> domain -> share of right answers."""

    skill: dict[str, dict[str, float]]
    held: str = "base"
    loads: list[str] = field(default_factory=list)
    asked: list[tuple[str, list[str]]] = field(default_factory=list)

    def load(self, model_dir: Path) -> None:
        self.held = model_dir.name
        self.loads.append(self.held)

    def evaluate(self, domains: Sequence[str] | None = None, *, model: str, as_expert: bool = False) -> Evaluation:
        known = self.skill[self.held]
        self.asked.append((self.held, list(domains if domains is not None else known)))
        chosen = {d: known[d] for d in (domains if domains is not None else known)}
        scores = {d: DomainScore(accuracy=a, stderr=0.0, low=a, high=a, questions=6) for d, a in chosen.items()}
        return Evaluation(model=model, scores=scores)

    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        assert self.held == "base"
        rollouts = tuple(
            make_rollout(
                sample_id=f"{step}/{p.id}", step=step, domain=p.domain, policy_version=policy_version,
                prompt_ids=p.token_ids, response_ids=(5, 6), behaviour_logprobs=(-1.0, -1.0),
            )
            for p in prompts
        )  # fmt: skip
        return RolloutBatch(rollouts=rollouts, quarantined=())

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        raise AssertionError

    def logprobs(self, token_ids: Any) -> Any:
        raise AssertionError


TORN = TeacherComparison(broken="teacher: torn")
GARBLED = TeacherComparison(kl=9.0, overlap=0.0, prompt_nll=5.0, answer_nll=5.0)


def measured_with(
    world: Any, engine: FakeEngine, elsewhere: str = "", **special: TeacherComparison
) -> tuple[list[MeasuredTeacher], list[Any]]:
    """With every teacher in good order but the `special` ones, unless `elsewhere`; also what was compared."""
    config = load_pipeline(world.write())
    calls = []

    def compare(teacher: Teacher, responses: Sequence[Rollout], texts: Sequence[Rollout]) -> TeacherComparison:
        calls.append((teacher.name, responses, texts))
        if teacher.name in special and {t.domain for t in texts} == {elsewhere}:
            return FINE
        return special.get(teacher.name, FINE)

    itself, rows = measure_teachers(config, read_inputs(config), engine, engine, compare, lambda line: None)
    assert itself == FINE
    return rows, calls


def test_each_expert_is_measured_on_its_own_domain(world: Any) -> None:
    engine = FakeEngine({"base": {"reverse": 0.1, "upper": 0.2}, "rev": {"reverse": 0.9}, "up": {"upper": 0.8}})
    rows, calls = measured_with(world, engine)
    assert [(r.domain, r.expert, r.student_accuracy, r.expert_accuracy, dict(r.rivals)) for r in rows] == [
        ("reverse", "rev", 0.1, 0.9, {}),
        ("upper", "up", 0.2, 0.8, {}),
    ]
    assert engine.loads == ["rev", "up"]
    (_, both, no_texts), *others = calls
    assert {r.domain for r in both} == {"reverse", "upper"} and no_texts == []
    for name, responses, texts in others:
        (domain,) = {r.domain for r in responses}
        assert domain == {"rev": "reverse", "up": "upper"}[name]
        assert [t.sample_id for t in texts] == [f"{domain}/{i}" for i in range(6)]
        assert all(len(t.response_ids) == 3 for t in texts), "the answers, a character each"


def test_the_most_frequent_answer_of_an_exam_is_measured(world: Any) -> None:
    exam = world.root / "upper-eval.jsonl"
    rows = [json.loads(line) for line in exam.read_text().splitlines()]
    exam.write_text("".join(json.dumps(r | ({"answer": "YES"} if i % 3 else {})) + "\n" for i, r in enumerate(rows)))
    engine = FakeEngine({"base": {"reverse": 0.1, "upper": 0.2}, "rev": {"reverse": 0.9}, "up": {"upper": 0.8}})
    measured, _ = measured_with(world, engine)
    assert [one.frequent[1] for one in measured] == [pytest.approx(1 / 6), pytest.approx(4 / 6)]
    assert measured[1].frequent[0] == "YES"
    (finding,) = judged(*measured)
    assert (finding.level, finding.domain) == ("warn", "upper") and "always answering 'YES'" in finding.message


def test_swapped_experts_are_measured_on_each_others_domains(world: Any) -> None:
    skill = {"base": {"reverse": 0.1, "upper": 0.2}}
    skill |= {"rev": {"reverse": 0.05, "upper": 0.98}, "up": {"reverse": 0.97, "upper": 0.0}}
    engine = FakeEngine(skill)
    rows, _ = measured_with(world, engine)
    assert [(r.domain, dict(r.rivals)) for r in rows] == [("reverse", {"up": 0.97}), ("upper", {"rev": 0.98})]
    assert engine.loads == ["rev", "up", "up", "rev"]
    assert [f.message for f in judged(*rows)] == [
        "expert `rev` scores 0.05 on reverse, `up` scores 0.97: swapped?",
        "expert `up` scores 0.00 on upper, `rev` scores 0.98: swapped?",
    ]


def test_an_expert_that_does_not_load_never_reaches_the_engine(world: Any) -> None:
    skill = {"base": {"reverse": 0.1, "upper": 0.2}, "rev": {"reverse": 0.1}}
    engine = FakeEngine(skill)
    rows, _ = measured_with(world, engine, up=TORN)
    assert engine.loads == ["rev"]
    assert [(r.expert_accuracy, dict(r.rivals)) for r in rows] == [(0.1, {}), (None, {})]


@pytest.mark.parametrize("accuracy", [0.2, 0.9])
def test_the_exam_decides_about_an_expert_whose_texts_are_a_guess(accuracy: float, world: Any) -> None:
    skill = {"base": {"reverse": 0.1, "upper": 0.2}, "rev": {"reverse": 0.9, "upper": 0.1}, "up": {"upper": accuracy}}
    rows, _ = measured_with(world, FakeEngine(skill), up=GARBLED)
    assert [r.expert_accuracy for r in rows] == [0.9, accuracy]
    assert any("garbled" in finding.message for finding in judged(*rows)) == (accuracy == 0.2)


def test_an_expert_that_is_as_good_as_a_guess_here_but_knows_another_domain_is_swapped(world: Any) -> None:
    skill = {"base": {"reverse": 0.1, "upper": 0.2}, "rev": {"reverse": 0.9, "upper": 0.8}, "up": {"upper": 0.0}}
    rows, _ = measured_with(world, FakeEngine(skill), elsewhere="reverse", up=GARBLED)
    assert [f.message for f in judged(*rows) if f.level == "fail"] == [
        "expert `up` scores 0.00 on upper, `rev` scores 0.80: swapped?"
    ]


def test_a_domain_without_an_exam_is_compared_on_its_training_prompts(world: Any) -> None:
    del world.data["domains"]["upper"]["eval"]
    engine = FakeEngine({"base": {"reverse": 0.1}, "rev": {"reverse": 0.9}})
    rows, calls = measured_with(world, engine)
    assert engine.loads == ["rev"]
    assert [(r.student_accuracy, r.expert_accuracy, r.compared) for r in rows][1] == (None, None, FINE)
    assert next(len(responses) for name, responses, _ in calls if name == "up") == 6


def test_of_several_teachers_the_heaviest_is_examined(world: Any) -> None:
    world.data["domains"]["upper"]["teachers"] = {"rev": 0.3, "up": 0.7}
    engine = FakeEngine(
        {"base": {"reverse": 0.1, "upper": 0.2}, "rev": {"reverse": 0.9, "upper": 0.99}, "up": {"upper": 0.25}}
    )
    rows, _ = measured_with(world, engine)
    found = [(r.domain, r.expert, r.leads, r.expert_accuracy, dict(r.rivals)) for r in rows]
    assert found[1:] == [("upper", "up", True, 0.25, {}), ("upper", "rev", False, None, {})]


# Chat templates


def test_another_chat_template_is_shown(world: Any) -> None:
    template = world.root / "up" / "chat_template.jinja"
    original = template.read_text()
    template.write_text(original.replace("content", "text"))
    (finding,) = template_findings(read_inputs(load_pipeline(world.write())))
    assert (finding.level, finding.domain) == ("warn", "upper")
    assert "message['content']" in finding.message and "message['text']" in finding.message
    template.unlink()
    assert list(template_findings(read_inputs(load_pipeline(world.write())))) == []


def test_teachers_that_read_prompts_of_their_own_are_not_compared(world: Any) -> None:
    world.data["experts"]["rev"]["model"] = "student"
    engine = FakeEngine({"base": {"reverse": 0.1, "upper": 0.2}, "up": {"upper": 0.8}})
    rows, calls = measured_with(world, engine)
    assert [row.expert for row in rows] == ["up"] and [name for name, *_ in calls] == ["student", "up"]
