"""A merge beyond its experts with a LoRA student, and a second merge that takes over the exams of the first. `test_teachers.py` has
a merge beyond its experts of all weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from opd.stream.schema import TargetRow, read_stream

ROOT = Path(__file__).parents[2]
FACTOR = {"left-domain": 1.5, "right-domain": 1.0}
MERGE = """
import shutil
from pathlib import Path

from pipelines import merge

if __name__ == "__main__":
    run = Path("RUN")
    def keep(record):
        if record.step == 1:
            shutil.copytree(run / "targets" / "step-000001", run.with_name("RUN-step-1"))
    merge("pipeline.yaml", run_dir=run, on_step=keep, tell=print)
"""
"""The log of a step is dropped once a checkpoint holds what it came to."""


def merge(root: Path, run: str) -> str:
    """Merge, and return what was said."""
    script = root / f"{run}.py"
    script.write_text(MERGE.replace("RUN", run))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=root, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OPD_EXAM_CACHE": str(root / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@torch.no_grad()
def written_out(rows: dict[str, TargetRow], models: dict[str, str]) -> dict[str, list[float]]:
    """Domain -> KL(student || expert^f start^(1 - f) / Z) at every response token, by whole forward passes of plain models."""
    from transformers import AutoModelForCausalLM

    loaded = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in models.items()}
    losses: dict[str, list[float]] = {domain: [] for domain in FACTOR}
    for row in rows.values():
        ids = torch.tensor([[*row.rollout.prompt_ids, *row.rollout.response_ids]])
        places = slice(len(row.rollout.prompt_ids) - 1, -1)
        domain = row.rollout.domain
        start, expert = (
            loaded[name](ids).logits[0, places].double().log_softmax(-1)
            for name in ("student", domain.removesuffix("-domain"))
        )
        target = expert.exp() ** FACTOR[domain] * start.exp() ** (1 - FACTOR[domain])
        target = (target / target.sum(-1, keepdim=True)).log()
        losses[domain] += (
            (start.exp() * (start - target)).sum(-1).tolist()
        )  # in its first step the student is the start
    return losses


def write(root: Path, pipeline: dict[str, Any]) -> None:
    pipeline["objective"] = {"extrapolate": FACTOR["left-domain"]}
    pipeline["domains"]["right-domain"]["extrapolate"] = FACTOR["right-domain"]
    pipeline["trainer"] |= {"steps": 2, "ranks": 1}
    pipeline["checkpoint"]["every"] = 100
    (root / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))


@pytest.mark.slow  # test_lora.py has such a student in the engines
def test_a_lora_student_needs_no_teacher_to_go_beyond_them(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    """The rows that were logged are those of experts, and the loss is made of them."""
    pipeline["student"]["lora"] = {"r": 4, "alpha": 8}
    write(tmp_path, pipeline)
    assert "cached from" not in merge(tmp_path, "first")

    parts = sorted((tmp_path / "first-step-1").glob("worker-*.arrow"))
    rows = [row for part in parts for row in read_stream(part.read_bytes()).rows]
    weights = {(r.rollout.domain, r.teacher): r.weight for r in rows}
    assert weights == {("left-domain", "left"): 1.5, ("right-domain", "right"): 1.0}
    samples = {row.rollout.sample_id: row for row in rows}
    models = {"student": pipeline["student"]["model"]}
    models |= {name: expert["model"] for name, expert in pipeline["experts"].items()}
    first = json.loads((tmp_path / "first" / "metrics.jsonl").read_text().splitlines()[0])
    for domain, losses in written_out(samples, models).items():
        assert first["domains"][domain]["tokens"] == len(losses) > 0
        assert first["domains"][domain]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-3)


@pytest.mark.slow  # two merges; tests/unit has what makes two exams the same
def test_a_merge_that_knows_the_exams(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    write(tmp_path, pipeline)
    assert "cached from" not in merge(tmp_path, "first")
    write(tmp_path, pipeline | {"seed": 1})
    said = merge(tmp_path, "second")
    assert said.count(f"cached from {tmp_path / 'first'}") == 4, "the student on two domains, and two experts"
    for exam in ("before", "expert"):
        ours, theirs = (
            json.loads((tmp_path / run / "evaluation" / f"{exam}.json").read_text()) for run in ("second", "first")
        )
        assert set(ours.pop("cached")) == set(FACTOR) and theirs.pop("cached") == {}
        assert json.dumps(ours) == json.dumps(theirs)
    assert json.loads((tmp_path / "second" / "evaluation" / "after.json").read_text())["cached"] == {}
    assert "cached from" in (tmp_path / "second" / "report.html").read_text()
