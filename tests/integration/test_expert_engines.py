"""One merge with four teachers of four engines and three objectives, through the real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import write_pipeline, write_prompts
from tests.integration.test_merge import kill_when_logged, opd, records


def with_four_engines(root: Path, pipeline: dict[str, Any], served_model: tuple[Path, str]) -> dict[str, Any]:
    """The pipeline with its expert `left` in the default engine, `right` in vLLM, one that a server scores with, and one of which the
    same server only writes text: for two steps its answers are learned, then a discriminator learns for one, then it rewards."""
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
    pipeline["experts"]["writer"] = {
        "domain": "written-domain",
        "engine": {
            "kind": "text",
            "base_url": url,
            "model": "expert",
            "api": "completions",
            "api_key_env": "OPD_TEST_KEY",
            "steps": 2,
            "max_calls": 100,
            "price": {"input": 1.0, "output": 2.0},
        },
    }
    for domain in pipeline["domains"].values():
        domain["reward"] = False
    pipeline["domains"]["far-domain"] = {
        "prompts": str(write_prompts(root / "far.jsonl", "far", 40, 1)),
        "objective": {"kind": "sampled", "baseline": "leave_one_out"},
    }
    pipeline["domains"]["written-domain"] = {
        "prompts": str(write_prompts(root / "written.jsonl", "written", 40, 2)),
        "objective": {"kind": "sft"},
    }
    pipeline["objective"] = {"reward": {"preference": {"warm_up": 1}}}
    pipeline["trainer"] |= {"steps": 6, "samples_per_step": 32}
    return pipeline


@pytest.mark.slow
def test_four_engines_in_one_merge_that_is_killed_and_resumed(
    tmp_path: Path, pipeline: dict[str, Any], served_model: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPD_TEST_KEY", "secret")
    file = write_pipeline(tmp_path, with_four_engines(tmp_path, pipeline, served_model))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    merged = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert merged.returncode == 0, merged.stderr
    steps = records(whole)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    for record in steps:
        assert {name: d["samples"] for name, d in record["domains"].items()} == dict.fromkeys(pipeline["domains"], 8)
        assert record["quarantined"] == {} and record["logprob_gap"] < 1e-3
    for domain in ("left-domain", "right-domain"):
        assert steps[-1]["domains"][domain]["loss"] < steps[0]["domains"][domain]["loss"]
    written = [record["domains"]["written-domain"]["loss"] for record in steps]
    assert min(written[:2]) > 0 and written[2:] == [0.0] * 4, "cross-entropy for two steps, then rewards alone"
    rewarded = [record["reward"]["domains"].get("written-domain", {}).get("episodes", 0) for record in steps]
    assert rewarded == [0, 0, 0, 8, 8, 8]
    assert ["preference_loss" in record["reward"]["credit"] for record in steps] == [False] * 2 + [True] * 4
    asked = [json.loads(line) for line in (whole / "texts.jsonl").read_text().splitlines() if line]
    spent = steps[-1]["texts"]["writer"]
    assert spent["calls"] == len(asked) == len({line["prompt_id"] for line in asked}) and not spent["failed"]
    assert spent["cost"] == (spent["prompt_tokens"] + 2 * spent["completion_tokens"]) / 1e6 > 0
    report = json.loads((whole / "report.json").read_text())
    assert report["steps"] == 6 and report["texts"]["writer"] == spent
    page = (whole / "report.html").read_text()
    assert "Loss of objective adaptive_kl" in page and "Loss of objective sampled" in page

    kill_when_logged(file, broken, 6)
    manifest = json.loads((broken / "targets" / "step-000006" / "step.json").read_text())
    assert {manifest["kind"][1]} | {kind[1] for kind in manifest["kinds"].values()} == {
        "hidden_states",
        "sampled_logprobs",
        "text",
    }
    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0 and "resumed from step 4" in resumed.stdout + resumed.stderr, resumed.stderr
    again = [json.loads(line) for line in (broken / "texts.jsonl").read_text().splitlines() if line]
    assert sorted(line["prompt_id"] for line in again) == sorted(line["prompt_id"] for line in asked)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
