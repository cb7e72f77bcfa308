"""A run that was made longer, and a branch of it, end with the weights of the run that was that long from the beginning."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from opd.files import blake3_file
from opd.records.scores import Evaluation
from tests.integration.test_merge import opd, records, write

STEPS, SHORT = 5, 3


def merged(*args: object, root: Path) -> None:
    done = opd("merge", *args, cwd=root)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # four merges
def test_an_extended_run_and_a_branch_are_the_longer_run(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    pipeline["balance"] = {"kind": "tokens"}  # prompts that rest on the records of all steps before
    pipeline["trainer"]["steps"] = STEPS
    merged(write(tmp_path, pipeline), "--run-dir", "whole", root=tmp_path)
    short = copy.deepcopy(pipeline)
    short["trainer"]["steps"] = SHORT
    merged(write(tmp_path, short), "--run-dir", "run", root=tmp_path)
    before = Evaluation.load(tmp_path / "run" / "evaluation" / "after.json")
    merged("--from", "run@2", "--run-dir", "branch", "--set", f"trainer.steps={STEPS}", root=tmp_path)
    merged("--extend", "run", "--steps", STEPS - SHORT, root=tmp_path)

    whole = tmp_path / "whole"
    weights = blake3_file(whole / "model" / "model.safetensors")
    for other, past in (("run", "extended after step 3 from 3 to 5 steps"), ("branch", "branched from step 2 of run")):
        root = tmp_path / other
        assert blake3_file(root / "model" / "model.safetensors") == weights, other
        for mine, theirs in zip(records(root), records(whole), strict=True):
            assert all(mine[key] == theirs[key] for key in ("step", "loss", "grad_norm", "lr", "response_tokens")), (
                other
            )
        (line,) = json.loads((root / "report.json").read_text())["lineage"]
        assert line.startswith(past) and past in (root / "model" / "README.md").read_text()
    assert Evaluation.load(tmp_path / "run" / "evaluation" / "step-000003.json").scores == before.scores
    assert (tmp_path / "run" / "pipeline.yaml").read_text() == (whole / "pipeline.yaml").read_text()
