"""The run directory has one owner: what its names are, and that nobody else spells them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from opd.run.paths import ComparisonPaths, RunPaths, parse_step_name, step_name
from tests.unit.sources import files, tree

# Names that are nothing but a run directory's; `model`, `before` and the like are words too.
DISTINCT = {
    "pipeline.yaml", "metrics.jsonl", "layouts.json", "report.json", "report.html", "rounds.json", "matrix.json",
    "lm-eval.json", "comparison.json", "comparison.md", "comparison.svg", "tensorboard", "mlflow-run-id",
}  # fmt: skip
SINK_KEY = "opd.sinks"
"""`tensorboard` is also a key of the pipeline there."""


def test_nobody_else_spells_a_name() -> None:
    spelt = [
        f"{module}: {node.value}"
        for module in files()
        if module not in ("opd.run.paths", SINK_KEY)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and node.value in DISTINCT
    ]
    assert spelt == []


def test_what_lies_where() -> None:
    paths = RunPaths(Path("runs/a"))
    assert paths.evaluation_file("before") == Path("runs/a/evaluation/before.json")
    assert paths.evaluation_file(step_name(12)) == Path("runs/a/evaluation/step-000012.json")
    assert paths.round_dir(2).model == Path("runs/a/round-2/model")
    assert paths.baseline_run("opd-0.3").report == Path("runs/a/baselines/runs/opd-0.3/report.json")
    assert ComparisonPaths(Path("c")).seed_dir(3).metrics == Path("c/seed-3/metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-000012", 12),
        ("step-1234567", 1234567),
        ("step-12", None),
        ("step-00001x", None),
        (".tmp-step-000012", None),
    ],
)
def test_the_step_of_a_name(name: str, step: int | None) -> None:
    assert parse_step_name(name) == step
    assert step is None or step_name(step) == name


def test_evaluations_on_the_way_are_in_order(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert paths.evaluations_by_step() == {}
    paths.evaluation.mkdir()
    for name in ("step-1000000", "step-000020", "before", "step-x"):
        paths.evaluation_file(name).touch()
    assert list(paths.evaluations_by_step().items()) == [
        (20, paths.evaluation_file("step-000020")),
        (10**6, paths.evaluation_file("step-1000000")),
    ]


def test_a_directory_is_a_run_by_both_of_its_files(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.pipeline.touch()
    assert not paths.is_run, "a pipeline alone may lie anywhere"
    paths.manifest.touch()
    assert paths.is_run


def test_a_round_belongs_to_the_whole(tmp_path: Path) -> None:
    inside, beside = RunPaths(tmp_path).round_dir(2), RunPaths(tmp_path / "round-x")
    assert inside.merge_root == inside.root, "without a plan it is a directory like any other"
    RunPaths(tmp_path).rounds.touch()
    assert (inside.merge_root, beside.merge_root) == (tmp_path, beside.root)
