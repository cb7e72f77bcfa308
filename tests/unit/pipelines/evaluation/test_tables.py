"""Tables that `opd evaluate` prints and writes of agents' exams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opd.errors import RunError
from opd.evaluation.lengths import by_length
from opd.records.scores import DomainScore, Evaluation
from pipelines.evaluation import command
from pipelines.evaluation.command import EvaluateOptions, EvaluateOutput

TASKS = [(2, [1.0])] * 4 + [(9, [1.0]), (9, [0.0])]
TITLE = "success by the length of the task (95 % interval)"


def found(name: str, tasks: list[tuple[int, list[float]]]) -> Evaluation:
    letters = DomainScore(accuracy=0.5, stderr=0.1, low=0.4, high=0.6, questions=6)
    maze = DomainScore(
        accuracy=0.5, stderr=0.1, low=0.4, high=0.6, questions=6, turns=9.0, invalid_calls=2, by_length=by_length(tasks)
    )
    return Evaluation(model=name, scores={"letters": letters, "maze": maze})


def evaluated(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, Evaluation], *, side_by_side: bool = False
) -> EvaluateOutput:
    monkeypatch.setattr(command, "find_pipeline", lambda pipeline: Path(pipeline))
    monkeypatch.setattr(command, "load_pipeline", lambda file, overrides: None)
    monkeypatch.setattr(command, "with_all_domains", lambda config: Config())
    monkeypatch.setattr(command, "evaluate_models", lambda *_: models)
    options = EvaluateOptions(models=[Path(name) for name in models], pipeline="p.yaml", side_by_side=side_by_side)
    return command.run_evaluation(options, print)


class Config:
    """As much of a pipeline as the tables need."""

    from opd.config.evaluate import EvaluateConfig

    name, evaluate = "p", EvaluateConfig()
    rollout = SimpleNamespace(dtype="float32")


def test_a_models_success_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    output = evaluated(monkeypatch, {"models/a": found("models/a", TASKS)})
    assert output.tables[1] == (
        TITLE,
        ("domain", "right moves", "tasks", "models/a"),
        [("maze", "1-3", "4", "1.000 (0.51 to 1.00)"), ("maze", "8-14", "2", "0.500 (0.09 to 0.91)")],
    )
    short, long = output.data["models"]["models/a"]["scores"]["maze"]["by_length"]
    assert (short["fewest"], short["most"], short["questions"], short["accuracy"]) == (1, 3, 4, 1.0)
    assert (long["low"], long["high"]) == pytest.approx((0.0945312, 0.9054688), abs=1e-6)


def test_exams_are_not_lost_with_a_public_task_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RunError("the harness ended with exit code 1")

    monkeypatch.setattr(command, "lm_eval_models", fails)
    monkeypatch.setattr(Config, "evaluate", Config.EvaluateConfig.model_validate({"lm_eval": ["gsm8k"]}))
    monkeypatch.setattr(command.harness, "check_tasks", lambda settings: None)
    output = evaluated(monkeypatch, {"models/a": found("models/a", TASKS)})
    assert output.tables and output.data["models"] and str(output.failure) == "the harness ended with exit code 1"


def test_models_side_by_side_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"a": found("a", TASKS), "b": found("b", TASKS[:4])}
    title, columns, rows = evaluated(monkeypatch, models, side_by_side=True).tables[1]
    assert (title, columns) == (TITLE, ("domain", "right moves", "tasks", "a", "b"))
    assert [row[-1] for row in rows] == ["1.000 (0.51 to 1.00)", "-"]
    each = evaluated(monkeypatch, models).tables
    assert [table[0] for table in each] == ["a", TITLE, "b", TITLE]


@pytest.mark.parametrize("side_by_side", [True, False])
def test_nothing_is_printed_where_tasks_do_not_say_their_moves(
    monkeypatch: pytest.MonkeyPatch, side_by_side: bool
) -> None:
    output = evaluated(monkeypatch, {"a": found("a", [])}, side_by_side=side_by_side)
    assert len(output.tables) == 1 and output.data["models"]["a"]["scores"]["maze"]["by_length"] == ()


def test_a_column_tells_the_tokens_of_a_pass_where_a_draft_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = found("a", TASKS)
    drafted = replace(evaluation.scores["letters"], accepted_length=1.754)
    models = {"a": evaluation, "b": replace(evaluation, scores={**evaluation.scores, "letters": drafted})}
    (_, plain, _), _, (_, columns, rows), _ = evaluated(monkeypatch, models).tables
    assert columns == (*plain, "tokens of a pass") and [row[-1] for row in rows] == ["1.75", "-"]
