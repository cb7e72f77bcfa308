"""reasoning-gym's scorers are used where they run nothing, and nowhere else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from experts.suites.reasoning import DOMAINS
from opd.verifiers.reasoning_gym import TASKS, ReasoningGym

problem = ReasoningGym().problem


def test_every_task_of_the_suite_is_taken_and_no_task_that_is_runs_anything() -> None:
    gym = pytest.importorskip("reasoning_gym")
    assert {task for task, _ in DOMAINS.values()} | {"calendar_arithmetic"} == TASKS, (
        "one was read for a suite that asked it"
    )
    sources = {task: inspect.getsource(gym.get_score_answer_fn(task)) for task in TASKS}
    runs = {task for task, source in sources.items() if re.search(r"eval\(|exec\(|parse_expr|sympify", source)}
    assert runs == {"number_sorting"}
    assert problem("", {"task": "chain_sum", "entry": {}}) == ""


def test_a_prompts_file_cannot_make_a_scorer_run_code(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    ran = tmp_path / "ran"
    evil = f"open({str(ran)!r}, 'w').write('x') * [1]"
    entry = {"answer": evil, "metadata": {"direction": "ascending"}}
    metadata: dict[str, Any] = {"task": "number_sorting", "entry": entry}
    ReasoningGym()("[1]", "", metadata)
    assert ran.exists(), "the hole that is stopped at the door"
    assert "no JSON" in problem("", metadata)
    assert "no JSON" in problem("", metadata | {"entry": entry | {"answer": "['1', '2']"}})
    assert problem("", metadata | {"entry": {"answer": '["1", "2"]'}}) == ""
    for broken in (None, {}, {"answer": 3}):
        assert "no JSON" in problem("", metadata | {"entry": broken})
    for task in ("countdown", "n_queens", "codeio", ["chain_sum"], None):
        assert problem("", {"task": task, "entry": {}}).startswith("metadata.task ")
    assert problem("", {"task": "gcd"}).startswith("no metadata.entry")
