"""The calculator and the retries over reasoning-gym."""

from __future__ import annotations

from typing import Any

import pytest

from experts.suites.letters import CHARACTERS
from opd.environments.calculator import CALCULATE, Calculator, evaluate_expression
from opd.environments.retry import Retry
from opd.errors import ConfigError, PromptError
from opd.records.environments import Action, ToolCall


def call(expression: str) -> Action:
    return Action(text="", calls=(ToolCall(name="calculate", arguments={"expression": expression}),))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12+7-3", "16"),
        ("2*(3+4)", "14"),
        ("1/3", "0.333333"),
        ("-1/8", "-0.125"),
        ("0.1+0.2", "0.3"),
        ("10/4*2", "5"),
        ("3 × 4", "12"),
        ("999999*999999", "999998000001"),
    ],
)
def test_results_are_exact(expression: str, result: str) -> None:
    assert evaluate_expression(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1+", "2**9", "1//2", "__import__('os')", "a+1", "1/0", "(" * 150 + "1" + ")" * 150, "9" * 300, "1 2"),
        *("*".join(["9" * 9] * 15), "1_0", "1j", "()", "1 if 1 else 2", "-" * 190 + "("),
    ],
)
def test_what_is_no_expression_is_an_error_in_words(expression: str) -> None:
    assert evaluate_expression(expression).startswith("error: ")


@pytest.mark.parametrize("form", ["characters", "chat"])
def test_the_calculator_is_asked_and_then_answered(form: str) -> None:
    for row in Calculator.tasks(20, 3, form=form, terms=4):
        made = Calculator()
        made.reset(row["metadata"], 0)
        first = made.solve()
        assert first.calls and CALCULATE.name in first.text
        seen = made.step(first).observation
        assert isinstance(seen, tuple) and row["answer"] in seen[0]
        end = made.step(made.solve())
        assert end.done and end.reward == 1 and end.info == {"tries": 1}
        if form == "characters":
            assert set(str(row["prompt"]) + first.text + seen[0]) <= set(CHARACTERS)


def test_a_wrong_answer_or_a_wrong_call_can_be_mended() -> None:
    row = Calculator.tasks(1, 0, form="chat")[0]
    made = Calculator(tries=2)
    made.reset(row["metadata"], 0)
    assert made.step(call("nonsense")).observation[0].startswith("error: ")
    wrong = made.step(Action(text="It is 1000000000"))
    assert not wrong.done and "calculate" in wrong.observation
    assert made.solve().calls, "the result was not seen yet"
    made.step(made.solve())
    assert made.step(Action(text=f"Then it is {row['answer']}.")).reward == 1


def test_the_last_try_ends_without_reward() -> None:
    made = Calculator(tries=1)
    made.reset(Calculator.tasks(1, 0)[0]["metadata"], 0)
    end = made.step(Action(text="no idea"))
    assert end.done and end.reward == 0


def test_many_calls_in_a_turn_have_a_result_each() -> None:
    made = Calculator()
    made.reset(Calculator.tasks(1, 0, form="chat")[0]["metadata"], 0)
    two = ToolCall(name="calculate", arguments={"expression": "1+1"})
    assert made.step(Action(text="", calls=(two, two))).observation == ("2", "2")


def test_tasks_are_the_same_for_the_same_seed() -> None:
    assert Calculator.tasks(5, 1) == Calculator.tasks(5, 1) != Calculator.tasks(5, 2)
    assert Retry.tasks(3, 1) == Retry.tasks(3, 1) != Retry.tasks(3, 2)


@pytest.mark.parametrize("family", ["chain_sum", "number_sorting", "spell_backward"])
def test_a_question_can_be_answered_again(family: str) -> None:
    for row in Retry.tasks(3, 0, family=family):
        made = Retry(tries=3)
        made.reset(row["metadata"], 0)
        first = made.step(Action(text="certainly not"))
        assert not first.done and "2 more tries" in first.observation
        assert "1 more try." in made.step(Action(text="")).observation
        end = made.step(made.solve())
        assert end.done and end.reward == 1 and end.info == {"tries": 3}


def test_a_retry_plays_rows_of_the_reasoning_suite() -> None:
    from experts.suites.reasoning import make_rows

    row = make_rows("chain_sum", 1, 0)[0]
    made = Retry()
    assert made.reset(row["metadata"], 0) == ""
    assert made.step(Action(text=row["answer"])).reward == 1


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [(Calculator, {"expression": "1+1"}), (Retry, {}), (Retry, {"task": "sudoku", "entry": {"answer": "1"}})],
)
def test_metadata_of_another_kind_is_refused_by_name(kind: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match=r"(?s)environment \w+: metadata.*opd environments tasks"):
        kind().reset(metadata, 0)


def test_families_that_would_run_an_answer_and_odd_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="scoring functions of other families run code"):
        Retry.tasks(1, 0, family="countdown")
    with pytest.raises(ConfigError, match="environment retry: config"):
        Retry.tasks(1, 0, config={"min_terms": -5})
    with pytest.raises(ConfigError, match="environment calculator: tries"):
        Calculator(tries=0)
