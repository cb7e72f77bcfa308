"""One merge with three teachers of three engines and two objectives, through the real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import write_pipeline, write_prompts

ROOT = Path(__file__).parents[2]


def start_merge(*args: object, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cli", "merge", *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OPD_TEST_KEY": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def with_three_engines(root: Path, pipeline: dict[str, Any], served_model: tuple[Path, str]) -> dict[str, Any]:
    """The pipeline with its expert `left` in the default engine, `right` in vLLM, and a third one on a server."""
    model, url = served_model
    pipeline["experts"]["right"]["engine"] = {"kind": "vllm"}
    pipeline["experts"]["far"] = {
        "model": str(model),
        "domain": "far-domain",
        "engine": {
            "kind": "openai",
            "payload": "sampled_logprobs",
            "servers": {"far": {"base_url": url, "model": "expert"}},
            "api_key_env": "OPD_TEST_KEY",
        },
    }
    pipeline["domains"]["far-domain"] = {
        "prompts": str(write_prompts(root / "far.jsonl", "far", 40, 1)),
        "objective": {"kind": "sampled", "baseline": "leave_one_out"},
    }
    pipeline["trainer"] |= {"steps": 5, "samples_per_step": 24}
    return pipeline


@pytest.mark.slow
def test_three_engines_in_one_merge_that_is_killed_and_resumed(
    tmp_path: Path, pipeline: dict[str, Any], served_model: tuple[Path, str]
) -> None:
    file = write_pipeline(tmp_path, with_three_engines(tmp_path, pipeline, served_model))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    merge = start_merge(file, "--run-dir", whole, cwd=tmp_path)
    out, _ = merge.communicate(timeout=500)
    assert merge.returncode == 0, out
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert {name: d["samples"] for name, d in record["domains"].items()} == dict.fromkeys(pipeline["domains"], 8)
        assert record["quarantined"] == {} and record["logprob_gap"] < 1e-3
    for domain in ("left-domain", "right-domain"):
        assert records[-1]["domains"][domain]["loss"] < records[0]["domains"][domain]["loss"]
    report = json.loads((whole / "report.json").read_text())
    assert report["steps"] == 5
    page = (whole / "report.html").read_text()
    assert "Loss of objective adaptive_kl" in page and "Loss of objective sampled" in page

    killed = start_merge(file, "--run-dir", broken, cwd=tmp_path)
    deadline = time.monotonic() + 300
    while not (broken / "targets" / "step-000004").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=60)
    manifest = json.loads((broken / "targets" / "step-000004" / "step.json").read_text())
    assert {manifest["kind"][1]} | {kind[1] for kind in manifest["kinds"].values()} == {
        "hidden_states",
        "sampled_logprobs",
    }
    resumed = start_merge("--resume", broken, cwd=tmp_path)
    out, _ = resumed.communicate(timeout=500)
    assert resumed.returncode == 0 and "resumed from step 2" in out, out
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
