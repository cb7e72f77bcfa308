"""A judge on a real HTTP server: what it is asked, what counts as a score, and what happens where it gives none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from opd.config.agents import AgentConfig
from opd.config.evaluate import EvaluateConfig
from opd.config.reward import RewardConfig
from opd.config.verifiers import JudgeConfig, VerifierConfig
from opd.credit.leave_one_out import LeaveOneOut
from opd.errors import RunError
from opd.evaluation.evaluator import DomainExam, EngineEvaluator
from opd.records.step import StepRecord
from opd.records.types import Completion, Prompt, Rollout, RolloutBatch
from opd.reward.stream import RewardStream
from opd.reward.verified import VerifiedRewards, control_scores
from opd.servers.answers_file import AnswersFile
from opd.verifiers import build_verifier, find_problem
from opd.verifiers.judge import RubricJudge, parse_score
from tests.rows import make_rollout
from tests.steps import Letters
from tests.writer import Writer


def build_judge(writer: Writer, **keys: Any) -> RubricJudge:
    data = {
        "kind": "judge",
        "base_url": writer.url,
        "model": "wise",
        "rubric": "Short and right.",
        "server_timeout_s": 5,
    }
    judge = build_verifier(TypeAdapter(VerifierConfig).validate_python(data | keys), "a")
    assert isinstance(judge, RubricJudge)
    return judge


def question(number: int = 0, **more: Any) -> Prompt:
    return Prompt(id=f"a/{number}", domain="a", token_ids=(1,), text=f"say {number}", **more)


def asked_text(text: str) -> str:
    """The response that the judge reads; nothing in a reminder."""
    return str(json.loads(text)["response"]) if text.startswith("{") else ""


# What is a score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 7}', 7.0),
        ('It is fine.\n```json\n{"score": 7.5, "reason": "ok"}\n```', 7.5),
        ('First {"score": 2}, no: {"score": 3}', 3.0),
        ("<think>{\"score\": 1} or 9</think>\nScore: 4", 4.0),
        ("7", 7.0),
        ("The score is -2.5.", -2.5),
        ("1,000", 1000.0),
        ("**8**", 8.0),
        ("7/10", None),
        ("7 out of 10", None),
        ("from 0 to 10", None),
        ("8 of the points", None),
        ('{"score": "7"}', None),
        ('{"score": true}', None),
        ('{"score": null}', None),
        ('{"score": 7', None),
        ("", None),
        ("good", None),
    ],
)  # fmt: skip
def test_what_counts_as_a_score(text: str, score: float | None) -> None:
    assert parse_score(text) == score


def test_a_judge_reads_prompt_response_and_rubric_and_its_range_becomes_0_to_1(writer: Writer) -> None:
    writer.write = lambda text: '{"score": 4}'
    judge = build_judge(writer, range=[1, 5], rubric="As {{ row.answer }}, {{ row.hint }}.", request={"seed": 3})
    (judgement,) = judge.judge_answers([(question(answer="four", columns={"hint": "in words"}), "vier")])
    assert (judgement.score, judgement.problem) == (0.75, "")
    (request,) = writer.requests
    system, user = request["messages"]
    assert "As four, in words." in system["content"] and "from 1 (worst) to 5 (best)" in system["content"]
    assert json.loads(user["content"]) == {"prompt": "say 0", "response": "vier"}
    assert (request["model"], request["temperature"], request["max_tokens"], request["seed"]) == ("wise", 0.0, 1024, 3)


@pytest.mark.parametrize(
    ("columns", "said"), [({}, "no column `hint`"), ({"hint": " "}, "an empty rubric")]
)  # fmt: skip
def test_a_row_without_a_rubric_is_refused_before_anybody_is_asked(
    columns: dict[str, Any], said: str, writer: Writer
) -> None:
    judge = build_judge(writer, rubric="{{ row.hint }}")
    assert (
        said in find_problem(judge, question(columns=columns))
        and find_problem(judge, question(columns={"hint": "x"})) == ""
    )
    (judgement,) = judge.judge_answers([(question(columns=columns), "b")])
    assert judgement.score is None and said in judgement.problem and not writer.requests


@pytest.mark.parametrize("answers", [["well", '{"score": 5}'], ["11", "5"], ["5/10", "so 5"]])
def test_an_answer_without_a_score_is_asked_for_once_more(answers: list[str], writer: Writer) -> None:
    said = iter(answers)
    writer.write = lambda text: next(said)
    judge = build_judge(writer)
    assert judge.judge_answers([(question(), "b")])[0].score == 0.5
    first, second = writer.requests
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2] == {"role": "assistant", "content": answers[0]}
    assert '{"score": NUMBER}' in second["messages"][3]["content"]


def test_what_never_has_a_score_is_no_score_and_is_not_asked_for_a_third_time(writer: Writer, tmp_path: Path) -> None:
    writer.write = lambda text: "hm"
    for _ in range(2):
        judge = build_judge(writer)
        judge.keep_in(AnswersFile(tmp_path / "scores.jsonl"))
        (judgement,) = judge.judge_answers([(question(), "b")])
        assert judgement.score is None and "no score from 0 to 10: 'hm'" in judgement.problem
    assert len(writer.requests) == 2 and judge.sum_spending().calls == 2


@pytest.mark.parametrize(
    ("status", "said", "calls"), [(429, "4 attempts failed, the last with: status 429", 4), (400, "refused with status 400", 2)]
)  # fmt: skip
def test_a_server_that_fails_gives_no_score(status: int, said: str, calls: int, writer: Writer) -> None:
    writer.spoil = lambda text, reply: (status, b"no")
    (judgement,) = build_judge(writer).judge_answers([(question(), "b")])
    assert judgement.score is None and said in judgement.problem and len(writer.requests) == calls


def test_a_server_that_refuses_every_request_stops_the_run(writer: Writer) -> None:
    writer.spoil = lambda text, reply: (401, b"no")
    with pytest.raises(RunError, match=r"judge a: .*the key is missing or wrong"):
        build_judge(writer).judge_answers([(question(), "b")])


def test_the_same_answer_is_judged_once_also_after_a_resume(writer: Writer, tmp_path: Path) -> None:
    writer.write = lambda text: str(len(asked_text(text)))
    for _ in range(2):
        judge = build_judge(writer, price={"input": 1.0})
        judge.keep_in(AnswersFile(tmp_path / "scores.jsonl"))
        pairs = [(question(), "bb"), (question(), "bb"), (question(1), "bb"), (question(), "ccc")]
        assert [judgement.score for judgement in judge.judge_answers(pairs)] == [0.2, 0.2, 0.2, 0.3]
    assert len(writer.requests) == 3
    spent = judge.sum_spending()
    assert spent.calls == 3 and spent.cost == spent.prompt_tokens / 1e6 > 0


def test_budgets_end_the_run(writer: Writer) -> None:
    writer.write = lambda text: "5"
    judge = build_judge(writer, max_calls=2)
    with pytest.raises(RunError, match=r"judge a: all 2 requests of max_calls were made"):
        judge.judge_answers([(question(), text) for text in "abc"])


# As a reward


def respond(number: int, *response: int) -> Rollout:
    group = f"000003/a/{number}"
    return make_rollout(
        sample_id=f"{group}/{response}", group=group, episode=f"{group}/{response}", step=3, domain="a", prompt_ids=(1,),
        response_ids=response,
    )  # fmt: skip


def reward_stream(judge: RubricJudge) -> RewardStream:
    verified = VerifiedRewards({"a": judge}, Letters(), (), 5.0)
    return RewardStream(RewardConfig(), ["a"], verified, LeaveOneOut())


def test_responses_earn_the_score_and_those_without_one_are_left_out_and_counted(writer: Writer) -> None:
    writer.write = lambda text: "none" if asked_text(text) == "b" else str(len(asked_text(text)) or "none")
    stream = reward_stream(build_judge(writer))
    rollouts = (respond(0, 2), respond(0, 2, 2, 2), respond(1, 1), respond(1, 3, 3))
    other = make_rollout(sample_id="000003/b/0", step=3, domain="b", prompt_ids=(1,), response_ids=(1,))
    batch = RolloutBatch(rollouts=(*rollouts, other), quarantined=())
    judged = stream.judged(batch, [question(0), question(1), Prompt(id="b/0", domain="b", token_ids=(1,))])
    assert [(r.sample_id, r.reward) for r in judged.rollouts] == [
        (rollouts[0].sample_id, 0.1), (rollouts[1].sample_id, 0.3), (rollouts[3].sample_id, 0.2), ("000003/b/0", None),
    ]  # fmt: skip
    (left_out,) = judged.quarantined
    assert left_out.prompt_id == "a/1" and "no score from 0 to 10" in left_out.reason
    stream.step(3, judged.rollouts)
    record = stream.record(judged.rollouts, None)
    assert record.domains["a"].episodes == 3 and record.domains["a"].failed == 0
    assert record.domains["a"].length_correlation == pytest.approx(1.0)
    assert record.judges["a"].calls == 5
    stored = StepRecord.from_json(json.loads(json.dumps(StepRecord(step=3, reward=record).to_json())))
    assert stored.reward == record


def test_many_responses_without_a_score_stop_the_run(writer: Writer) -> None:
    writer.write = lambda text: "none"
    batch = RolloutBatch(rollouts=(respond(0, 1), respond(0, 2)), quarantined=())
    with pytest.raises(
        RunError, match=r"2 of 2 responses of a have no score of the judge, more than .*max_quarantined 0.1"
    ):
        reward_stream(build_judge(writer)).judged(batch, [question(0)])
    one = RolloutBatch(rollouts=(respond(0, 1),), quarantined=())
    assert not reward_stream(build_judge(writer)).judged(one, [question(0)]).rollouts, "one may always be left out"


@pytest.mark.parametrize("controls", ["length", "form"])
def test_a_judge_that_knows_length_alone_rewards_nothing(controls: str, writer: Writer) -> None:
    writer.write = lambda text: str(len(asked_text(text)))
    rollouts = tuple(respond(number, *(2,) * (number + 1)) for number in range(8))
    batch = RolloutBatch(rollouts=rollouts, quarantined=())
    prompts = [question(number) for number in range(8)]
    plain, controlled = (
        [r.reward for r in reward_stream(build_judge(writer, controls=kind)).judged(batch, prompts).rollouts]
        for kind in ("none", controls)
    )
    assert plain == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    assert controlled == pytest.approx([0.45] * 8), "the mean"
    assert control_scores([0.1, 0.9, 0.5], ["b", "b", "b"], [1, 1, 1], "length") == pytest.approx([0.1, 0.9, 0.5])


def test_an_exam_counts_an_answer_without_a_score_as_wrong_and_failed(writer: Writer) -> None:
    writer.write = lambda text: {"b": "10", "c": "4"}.get(asked_text(text), "none")

    class Answers:
        def answer(self, prompts: Any, *, n: int, temperature: float) -> list[Completion]:
            return [
                Completion(prompt=p, text=t, num_tokens=1, truncated=False) for p, t in zip(prompts, "bcd", strict=True)
            ]

    exam = DomainExam((question(0), question(1), question(2)), build_judge(writer))
    told: list[str] = []
    engine: Any = Answers()
    evaluator = EngineEvaluator(engine, {"a": exam}, EvaluateConfig(), Letters(), told.append)
    score = evaluator.evaluate(model="m").scores["a"]
    assert (score.by_question, score.failed) == ((1.0, 0.4, 0.0), 1) and "raised on 1 of 3 answers" in told[0]


# What a pipeline must not say


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"range": [5, 5]}, "range: [5.0, 5.0]"),
        ({"max_cost": 1}, "max_cost: 1 without a price"),
        ({"request": {"n": 2}}, "request: n"),
        ({"base_url": "http://far.example/v1"}, "plain http to another machine"),
        ({"rubric": "{{ row }}"}, "{{ row }}"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], said: str) -> None:
    data = {"kind": "judge", "base_url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "r"}
    assert JudgeConfig.model_validate(data).temperature == 0
    with pytest.raises(ValidationError) as error:
        JudgeConfig.model_validate(data | keys)
    assert said in str([detail["ctx"]["found"] for detail in error.value.errors()])


def test_an_agents_program_has_no_judge() -> None:
    verifier = {"kind": "judge", "base_url": "http://127.0.0.1:1/v1", "model": "m", "rubric": "r"}
    with pytest.raises(ValidationError, match="asks no server"):
        AgentConfig.model_validate({"command": ["python"], "verifier": verifier})
