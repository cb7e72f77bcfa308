"""The dictionary of environments, and names and import paths that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from opd.environments import ENVIRONMENTS, find_environment, find_import_name
from opd.errors import ConfigError
from opd.records.environments import Action, Outcome, Tool

WITHOUT_TASKS_OF_ITS_OWN = {"verifiers"}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_name_is_an_environment(name: str) -> None:
    made = find_environment(name, "here")
    assert made.name == name and (made.__doc__ or "").strip()
    assert all(isinstance(tool, Tool) for tool in made.tools)
    for method in ("reset", "step", "close", "tasks"):
        assert callable(getattr(made, method))


@pytest.mark.parametrize("name", sorted(set(ENVIRONMENTS) - WITHOUT_TASKS_OF_ITS_OWN - {"sandbox"}))
def test_every_solver_ends_its_own_tasks_with_the_full_reward(name: str) -> None:
    kind: Any = find_environment(name, "here")
    for row in kind.tasks(3, 11):
        made = kind()
        try:
            made.reset(row["metadata"], 0)
            for _ in range(200):
                outcome: Outcome = made.step(made.solve())
                if outcome.done:
                    break
            assert outcome.done and outcome.reward == 1
        finally:
            made.close()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("mase", "did you mean `maze`"),
        ("no such thing", "one of: calculator"),
        ("opd.environments.nowhere:Maze", "no module `opd.environments.nowhere`"),
        ("opd.environments.maze:Nowhere", "no `Nowhere` in opd.environments.maze"),
        ("opd.environments.maze:WORDS", "`WORDS` is a dict"),
    ],
)
def test_a_name_that_is_none_is_refused(name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)domains.a.environment.*{match}"):
        find_environment(name, "domains.a.environment")


def test_an_import_path_is_an_environment_too() -> None:
    kind = find_environment("tests.environments:Sleeper", "here")
    made = kind(seconds=0.0, turns=2)
    assert made.reset({}, 0) == ""
    assert not made.step(made.solve()).done
    assert made.step(Action(text="nothing")).done
    assert find_import_name("tests.environments:Sleeper", "here") == "tests.environments:Sleeper"
