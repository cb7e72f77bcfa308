"""One merge with three teachers of three engines and two objectives, through the real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import write_pipeline, write_prompts
from tests.integration.test_merge import kill_when_logged, opd, records


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
    tmp_path: Path, pipeline: dict[str, Any], served_model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPD_TEST_KEY", "secret")
    file = write_pipeline(tmp_path, with_three_engines(tmp_path, pipeline, served_model))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    merged = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert merged.returncode == 0, merged.stderr
    steps = records(whole)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    for record in steps:
        assert {name: d["samples"] for name, d in record["domains"].items()} == dict.fromkeys(pipeline["domains"], 8)
        assert record["quarantined"] == {} and record["logprob_gap"] < 1e-3
    for domain in ("left-domain", "right-domain"):
        assert steps[-1]["domains"][domain]["loss"] < steps[0]["domains"][domain]["loss"]
    report = json.loads((whole / "report.json").read_text())
    assert report["steps"] == 5
    page = (whole / "report.html").read_text()
    assert "Loss of objective adaptive_kl" in page and "Loss of objective sampled" in page

    kill_when_logged(file, broken, 4)
    manifest = json.loads((broken / "targets" / "step-000004" / "step.json").read_text())
    assert {manifest["kind"][1]} | {kind[1] for kind in manifest["kinds"].values()} == {
        "hidden_states",
        "sampled_logprobs",
    }
    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0 and "resumed from step 2" in resumed.stdout + resumed.stderr, resumed.stderr
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
