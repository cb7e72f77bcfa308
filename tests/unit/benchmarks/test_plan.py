"""`opd plan` beside merges that were measured: docs/results/plan.json holds them, with the commands that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.merging.inputs import TINY
from benchmarks.plan import SETTINGS, TOLERANCE, compared, lengths_of, predicted
from opd.config import PipelineConfig
from opd.settings import apply_overrides, load_yaml
from pipelines.catalog import find

MEASURED: list[dict[str, Any]] = json.loads((Path(__file__).parents[3] / "docs/results/plan.json").read_text())


PAGE = (Path(__file__).parents[3] / "docs/plan.md").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the models of the tiny merges are, as far as a plan looks at them."""
    shape = {"model_type": "llama", "tie_word_embeddings": True, **TINY}
    for name in ("student", "expert-00", "expert-01"):
        (tmp_path / "float32" / name).mkdir(parents=True)
        (tmp_path / "float32" / name / "config.json").write_text(json.dumps(shape))
    return tmp_path


@pytest.mark.parametrize("merge", [one for one in MEASURED if not one["overheads"]], ids=lambda one: one["name"])
def test_the_plan_is_within_30_percent_of_a_merge(merge: dict[str, Any]) -> None:
    """Each phase and the step; rates are of the same machine, lengths of the same merge, and nothing else is."""
    found = predicted(merge, merge["rates"])
    off = {name: round(found[name] / seconds - 1, 2) for name, seconds in merge["phase_s"].items()}
    assert off and {name: share for name, share in off.items() if abs(share) > TOLERANCE} == {}


@pytest.mark.parametrize("merge", [one for one in MEASURED if one["overheads"]], ids=lambda one: one["name"])
def test_overheads_are_those_of_the_merges_that_they_come_from(merge: dict[str, Any], folder: Path) -> None:
    """A tiny model has no work to speak of, so a step is its overheads."""
    found = predicted(merge, merge["rates"], folder)
    assert found["step"] == pytest.approx(merge["phase_s"]["step"], rel=TOLERANCE)


def test_the_page_shows_the_comparison(folder: Path) -> None:
    for merge in MEASURED:
        for _, phase, measured, planned, off in compared({"rates": merge["rates"], "runs": [merge]}, folder):
            assert f"| {merge['name']} | {phase} | {measured} | {planned} | {off} |" in PAGE


def test_every_setting_is_a_pipeline() -> None:
    for name in ("quickstart", "smollm2"):
        assert len(SETTINGS[name]) == 4
        for changes in SETTINGS[name]:
            PipelineConfig.model_validate(apply_overrides(load_yaml(find(name)), list(changes)))


def test_lengths_come_from_records() -> None:
    """Half of the responses reach 5 tokens, the mean is longer."""
    positions = {"0": 100, "1": 100, "2-3": 190, "4-7": 200, "8-15": 160, "16-31": 50}
    record = {
        "prompts": {"a": 60, "b": 40},
        "prompt_tokens": 900,
        "response_tokens": 800,
        "truncated": 5,
        "positions": {name: {"loss": 1.0, "tokens": tokens} for name, tokens in positions.items()},
    }
    found = lengths_of([record], 24)
    assert found["prompt"] == 9 and 5 < found["response"] < 7 and 3 < found["tail"] < 9
    whole = lengths_of([record | {"truncated": 100}], 24)
    assert whole == {"prompt": 9, "response": 24.0, "tail": 1.0}
