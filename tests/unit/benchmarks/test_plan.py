"""`opd plan` beside merges that were measured: docs/results/plan.json holds them, with the commands that made them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import OUTSIDE, TOLERANCE, found, keep, predicted, recorded
from benchmarks.planning.cases import CASES, shapes, without_exams
from benchmarks.planning.lengths import lengths_of
from benchmarks.planning.peaks import peaks
from opd.config import PipelineConfig
from opd.settings.yaml_files import apply_overrides

ROOT = Path(__file__).parents[3]
MEASURED: list[dict[str, Any]] = json.loads((ROOT / "docs/results/plan.json").read_text())
PAGE = (ROOT / "benchmarks/README.md").read_text()
COMPARED = [one for one in MEASURED if not one["overheads"]]


@pytest.mark.parametrize("merge", COMPARED, ids=lambda one: one["name"])
def test_the_plan_is_within_30_percent_of_a_merge(merge: dict[str, Any], tmp_path: Path) -> None:
    """Each phase, the step and each role's memory, but for what `OUTSIDE` names. Rates are of the same machine, lengths of the same
    merge, and nothing else is."""
    shapes(tmp_path)
    plan = predicted(merge, tmp_path)
    off = {what: abs(plan[what] / value - 1) for what, value in found(merge).items() if value}
    outside = {what for what, share in off.items() if share > TOLERANCE}
    assert off and outside == set(OUTSIDE.get(merge["name"], ()))


def test_a_merge_was_made_with_the_changes_of_its_setting() -> None:
    settings = {one.name: (*case.always, *one.changes) for case in CASES.values() for one in case.settings}
    there = {one["name"]: one["command"] for one in MEASURED if one["name"] in settings}
    assert sum(name.startswith("quickstart") for name in there) == 4
    assert all(change in command for name, command in there.items() for change in settings[name])


def test_memory_of_each_role_is_within_30_percent_everywhere() -> None:
    assert not any("GiB" in what for outside in OUTSIDE.values() for what in outside)
    assert sum("memory" in one for one in MEASURED) >= 7


def test_the_page_shows_the_step_of_every_merge_beside_its_plan(tmp_path: Path) -> None:
    """`python -m benchmarks.plan recorded` writes these rows. The tiny merges, which overheads come from, agree as a whole."""
    rows = recorded(tmp_path)
    assert [row for row in rows if "| step |" in row and "| tiny" not in row and row not in PAGE] == []
    tiny = [float(row.split("|")[5].strip(" %")) for row in rows if "tiny" in row and "| step |" in row]
    assert tiny and max(map(abs, tiny)) < 100 * TOLERANCE
    assert set(OUTSIDE) <= {one["name"] for one in COMPARED}


def test_every_setting_is_a_pipeline() -> None:
    for name in ("quickstart", "smollm2"):
        data = without_exams(name)
        assert not any("eval" in domain for domain in data["domains"].values())
        for setting in CASES[name].settings:
            PipelineConfig.model_validate(apply_overrides(data, [*CASES[name].always, *setting.changes]))


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
    made = lengths_of([record], 24)
    assert made["prompt"] == 9 and 5 < made["response"] < 7 and 3 < made["tail"] < 9
    whole = lengths_of([record | {"truncated": 100}], 24)
    assert whole == {"prompt": 9, "response": 24.0, "tail": 1.0}


def test_a_merge_takes_the_place_of_one_of_its_name(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for name, step in (("a", 1), ("b", 2), ("a", 3)):
        keep(file, {"name": name, "step": step})
    assert json.loads(file.read_text()) == [{"name": "a", "step": 3}, {"name": "b", "step": 2}]


def test_workers_memory_is_seen_from_outside() -> None:
    """A process that calls itself like a trainer rank and holds 64 MiB."""
    code = "held = bytearray(64 << 20); print('up', flush=True); input()"
    command = ["bash", "-c", f'exec -a ray::TrainerRank {sys.executable} -c "{code}"']
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == b"up\n"
        with peaks(process.pid) as most:
            deadline = time.monotonic() + 20
            while not most and time.monotonic() < deadline:
                time.sleep(0.05)
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert 64 << 20 <= most["trainer rank"] < 128 << 20
