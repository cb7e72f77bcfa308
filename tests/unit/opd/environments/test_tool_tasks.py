"""The environments of small tasks with one tool, `lookup` and `boxes`: what the tool says, and that every mistake can be mended."""

from __future__ import annotations

import random
from typing import Any

import pytest

from opd.environments.boxes import BOXES, DONE, THINGS, Boxes
from opd.environments.lookup import CITIES, FIELDS, NAMES, PEOPLE, Lookup
from opd.errors import ConfigError, PromptError
from opd.records.environments import Action, Outcome, ToolCall
from tests.spoken import tagged_calls

KINDS: list[Any] = [Lookup, Boxes]


def started(kind: Any, row: dict[str, Any], **options: Any) -> Any:
    made = kind(**options)
    assert made.reset(row["metadata"], 0) == ""
    return made


def look_up(name: str, field: str) -> Action:
    return Action(text="", calls=(ToolCall(name="look_up", arguments={"name": name, "field": field}),))


def move(thing: str, box: str) -> Action:
    return Action(text="", calls=(ToolCall(name="move", arguments={"thing": thing, "box": box}),))


@pytest.mark.parametrize("kind", KINDS)
def test_the_solver_needs_as_many_turns_as_the_task_says_and_writes_calls_that_can_be_read(kind: Any) -> None:
    for row in kind.tasks(30, 5):
        made = started(kind, row)
        for turn in range(1, row["metadata"]["moves"] + 1):
            action = made.solve()
            assert tagged_calls(action.text, made.tools) == action.calls
            outcome: Outcome = made.step(action)
            assert outcome.done == (turn == row["metadata"]["moves"])
        assert outcome.reward == 1 and outcome.info == {"tries": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_the_solver_wins_from_wherever_mistakes_led(kind: Any) -> None:
    rng = random.Random(0)
    rows = kind.tasks(30, 6)
    elsewhere = [started(kind, row).solve() for row in rows]
    for row in rows:
        made = started(kind, row)
        outcome = made.step(Action(text="Stockholm"))
        for mistake in rng.sample(elsewhere, 5):
            outcome = made.step(mistake)
        turns = 0
        while not outcome.done:
            outcome, turns = made.step(made.solve()), turns + 1
        assert outcome.reward == 1 and turns <= 4


def test_a_question_is_looked_up_step_by_step() -> None:
    table = {"Ann": {"boss": "Tom", "room": "12"}, "Tom": {"boss": "Ann", "room": "34"}}
    row = {"metadata": {"start": "Ann", "path": ["boss", "room"], "table": table}}
    made = started(Lookup, row, tries=2)
    assert made.step(look_up("Zoe", "boss")).observation == ("error: there is nobody called Zoe",)
    assert made.step(look_up("Z\u0007\ud800oe", "boss")).observation == ("error: there is nobody called Zoe",), (
        "as text"
    )
    assert made.step(look_up("Ann", "room")).observation == ("12",), "true, but it does not help"
    wrong = made.step(Action(text="The room is 12."))
    assert not wrong.done and wrong.observation.startswith("That is not right.")
    assert made.step(look_up("Ann", "boss")).observation == ("Tom",)
    assert made.solve().calls[0].arguments == {"name": "Tom", "field": "room"}
    both = look_up("Tom", "room").calls + look_up("Tom", "boss").calls
    assert made.step(Action(text="", calls=both)).observation == ("34", "Ann")
    assert made.solve() == Action(text="34")
    assert made.step(Action(text="It is room 34.")).reward == 1


def test_questions_have_their_answers_in_their_tables() -> None:
    for row in Lookup.tasks(40, 1, hops=3):
        known = row["metadata"]
        value = known["start"]
        for field in known["path"]:
            value = known["table"][value][field]
        assert value == row["answer"] and 1 <= len(known["path"]) <= 3
        asked = row["prompt"][0]["content"]
        assert asked.startswith("Who is" if known["path"][-1] in PEOPLE else "What is") and known["start"] in asked
        assert all(set(facts) == set(FIELDS) and name not in facts.values() for name, facts in known["table"].items())
    assert len(set(NAMES)) == len(NAMES) and not set(NAMES) & set(CITIES)


def test_things_are_moved_and_moved_back() -> None:
    row = {"metadata": {"start": {"key": "red", "cup": "red"}, "goal": {"key": "blue", "cup": "red"}}}
    made = started(Boxes, row, tries=2)
    told = made.step(move("pen", "red")).observation
    assert told == ("error: there is no pen. key: red, cup: red",)
    assert made.step(move("p\x1ben", "red")).observation == told, "as text"
    assert made.step(move("cup", "white")).observation == ("key: red, cup: white",)
    early = made.step(Action(text=DONE))
    assert (early.done, early.observation) == (False, "That is not done yet. key: red, cup: white")
    made.step(made.solve())
    assert made.solve().calls[0].arguments == {"thing": "cup", "box": "red"}, "the mistake is mended"
    made.step(made.solve())
    assert made.solve().text == DONE and made.step(made.solve()).reward == 1


def test_tasks_of_boxes_have_as_many_things_in_wrong_boxes_as_asked_for() -> None:
    for row in Boxes.tasks(40, 1, things=4, moves=3):
        start, goal = row["metadata"]["start"], row["metadata"]["goal"]
        assert list(start) == list(goal) and len(goal) == 4 and set(goal) <= set(THINGS)
        assert set(start.values()) | set(goal.values()) <= set(BOXES)
        wrong = sum(start[thing] != goal[thing] for thing in goal)
        assert 1 <= wrong <= 3 and row["metadata"]["moves"] == wrong + 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_try_ends_without_reward_and_tasks_come_again(kind: Any) -> None:
    end = started(kind, kind.tasks(1, 0)[0], tries=1).step(Action(text="no idea"))
    assert end.done and end.reward == 0
    assert kind.tasks(5, 1) == kind.tasks(5, 1) != kind.tasks(5, 2)


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        (Lookup, {}),
        (Lookup, {"start": "Ann", "path": [], "table": {"Ann": {}}}),
        (Lookup, {"start": "Ann", "path": ["boss"], "table": {"Ann": {"city": "Rome"}}}),
        (Lookup, {"start": "Ann", "path": ["boss"], "table": ["Ann"]}),
        (Boxes, {}),
        (Boxes, {"start": {"key": "red"}, "goal": {"cup": "red"}}),
        (Boxes, {"start": {"key": "pink"}, "goal": {"key": "red"}}),
        (Boxes, {"start": {"key": ["red"]}, "goal": {"key": "red"}}),
        (Boxes, {"start": {}, "goal": {}}),
    ],
)
def test_metadata_of_another_kind_is_refused_by_name(kind: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(
        PromptError, match=rf"(?s)environment {kind.name}: metadata.*opd environments tasks {kind.name}"
    ):
        kind().reset(metadata, 0)


@pytest.mark.parametrize(("kind", "options"), [(Lookup, {"hops": 9}), (Boxes, {"things": 0}), (Boxes, {"move": 1})])
def test_odd_options_are_refused(kind: Any, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"environment {kind.name}: {next(iter(options))}"):
        kind.tasks(1, 0, **options)
