"""Environments of verifiers: refused by name where the package is missing or another, played through its own methods where it is there.

The package is a stand-in with the methods of its `MultiTurnEnv`; the real one is not installed for tests.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from opd.environments.from_verifiers import FromVerifiers
from opd.errors import ConfigError, PromptError
from opd.records.environments import Action

State = dict[str, Any]


class Echo:
    """Wants its secret word within three turns, as `verifiers.MultiTurnEnv` would be written."""

    def __init__(self, word: str = "tea") -> None:
        self.rubric = self
        self._word = word

    def get_dataset(self, n: int, seed: int) -> list[State]:
        asked = [{"role": "user", "content": f"Say it ({seed})."}]
        return [{"prompt": [*asked, {"role": "user", "content": str(i)}], "answer": self._word} for i in range(n)]

    async def init_state(self, *, input: State, client: None, model: str, sampling_args: State) -> State:
        return {**input, "trajectory": []}

    async def setup_state(self, state: State) -> None:
        state["set_up"] = True

    async def add_trajectory_step(self, state: State, step: State) -> None:
        state["trajectory"].append(step)

    async def is_completed(self, state: State) -> bool:
        said = state["trajectory"][-1]["completion"][0]["content"]
        return len(state["trajectory"]) == 3 or said == state["answer"]

    async def get_prompt_messages(self, state: State) -> list[dict[str, str]]:
        if not state["trajectory"]:
            return list(state["prompt"])
        last = state["trajectory"][-1]
        return [*last["prompt"], *last["completion"], {"role": "user", "content": "no, again"}]

    async def score_group(self, states: list[State]) -> None:
        for state in states:
            assert state["set_up"]
            state["reward"] = float(state["trajectory"][-1]["completion"][0]["content"] == state["answer"])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("verifiers")

    def load_environment(id: str, **arguments: Any) -> Any:
        if id not in ("echo", "newer"):
            raise ValueError(f"could not import {id}")
        return Echo(**arguments) if id == "echo" else object()

    made.load_environment = load_environment  # type: ignore[attr-defined]
    made.__version__ = "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", made)
    return made


def test_a_missing_package_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"(?s)verifiers is not installed.*pip install verifiers"):
        FromVerifiers.tasks(1, 0, id="echo")
    with pytest.raises(ConfigError, match="verifiers is not installed"):
        FromVerifiers(id="echo")


@pytest.mark.usefixtures("installed")
def test_an_environment_is_played_through_its_own_methods() -> None:
    row = FromVerifiers.tasks(2, 5, id="echo", arguments={"word": "cup"})[1]
    assert row["answer"] == "cup" and row["prompt"][1]["content"] == "1"  # type: ignore[index]
    made = FromVerifiers(id="echo", arguments={"word": "cup"})
    assert made.reset(row["metadata"], 0) == ""
    for _ in range(2):
        outcome = made.step(Action(text="pot"))
        assert (outcome.observation, outcome.done, outcome.reward) == ("no, again", False, None)
    outcome = made.step(Action(text="cup"))
    assert (outcome.done, outcome.reward) == (True, 1.0)
    made.close()


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_played_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="could not import nowhere"):
        FromVerifiers(id="nowhere")
    with pytest.raises(ConfigError, match=r"(?s)verifiers 9.9, whose newer has no `get_dataset`.*endpoint"):
        FromVerifiers(id="newer")
    with pytest.raises(ConfigError, match=r"environment verifiers: id"):
        FromVerifiers()
    with pytest.raises(PromptError, match="environment verifiers: metadata"):
        FromVerifiers(id="echo").reset({}, 0)
