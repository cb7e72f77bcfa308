"""Baselines' result files: what is written is what is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd.evaluation.baselines import BaselineResult
from opd.records.scores import DomainScore
from opd.run.paths import RunPaths


def score(accuracy: float) -> DomainScore:
    return DomainScore(accuracy=accuracy, stderr=0.05, low=accuracy - 0.1, high=accuracy + 0.1, questions=100)


@pytest.fixture
def ties() -> BaselineResult:
    return BaselineResult(
        method="ties",
        label="TIES 0.5",
        strength=0.5,
        seed=3,
        scores={"math": score(0.5), "code": score(0.8)},
        validation={"0.5": 0.7, "1": 0.2},
        wall_s=12.5,
    )


def test_a_result_is_read_as_it_was_written(ties: BaselineResult, tmp_path: Path) -> None:
    ties.save(tmp_path / "ties.json")
    assert BaselineResult.load(tmp_path / "ties.json") == ties
    assert ties.accuracy == pytest.approx(0.65)


def test_other_programs_find_the_keys_they_were_promised(ties: BaselineResult, tmp_path: Path) -> None:
    ties.save(tmp_path / "ties.json")
    data = json.loads((tmp_path / "ties.json").read_text())
    promised = {"format", "method", "strength", "label", "token_share", "tokens", "seed", "scores", "wall_s"}
    assert promised <= set(data)
    assert (data["format"], data["token_share"], data["tokens"]) == (1, None, None)
    assert data["scores"]["code"]["accuracy"] == 0.8


def test_a_run_directory_has_those_that_are_there(ties: BaselineResult, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert paths.baseline_results() == []
    (tmp_path / "baselines" / "models").mkdir(parents=True)
    ties.save(tmp_path / "baselines" / "ties.json")
    assert paths.baseline_results() == [paths.baseline_file("ties")]
