"""`opd plan` beside merges that were measured: docs/results/plan.json holds them, with the commands that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import SETTINGS, TOLERANCE, lengths_of, predicted, recorded
from opd.config import PipelineConfig
from opd.settings import apply_overrides, load_yaml
from pipelines.catalog import find

MEASURED: list[dict[str, Any]] = json.loads((Path(__file__).parents[3] / "docs/results/plan.json").read_text())


PAGE = (Path(__file__).parents[3] / "docs/plan.md").read_text()


@pytest.mark.parametrize("merge", [one for one in MEASURED if not one["overheads"]], ids=lambda one: one["name"])
def test_the_plan_is_within_30_percent_of_a_merge(merge: dict[str, Any]) -> None:
    """Each phase and the step; rates are of the same machine, lengths of the same merge, and nothing else is."""
    found = predicted(merge, merge["rates"])
    off = {name: round(found[name] / seconds - 1, 2) for name, seconds in merge["phase_s"].items()}
    assert off and {name: share for name, share in off.items() if abs(share) > TOLERANCE} == {}


def test_the_page_shows_every_merge_beside_its_plan(tmp_path: Path) -> None:
    """`python -m benchmarks.plan recorded` writes these rows. The tiny merges, which overheads come from, agree as a whole."""
    rows = recorded(tmp_path)
    assert len(rows) == 5 * len(MEASURED)
    assert [row for row in rows if row not in PAGE] == []
    tiny = [float(row.split("|")[5].strip(" %")) for row in rows if "tiny" in row and "| step |" in row]
    assert tiny and max(map(abs, tiny)) < 100 * TOLERANCE


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
