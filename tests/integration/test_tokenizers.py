"""A merge with an expert that has another tokenizer, through the real engines: killed, resumed, and checked before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import write_pipeline
from tests.tokenizers import train_sentencepiece

ROOT = Path(__file__).parents[2]


def start(*args: object, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cli", *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def with_other_tokens(root: Path, pipeline: dict[str, Any], make_model_dir: Callable[..., Path]) -> dict[str, Any]:
    """The pipeline with an expert `right` whose tokens are pieces of words, and has all special tokens of the student."""
    rows = [json.loads(line) for line in (root / "right.jsonl").read_text().splitlines()]
    tokenizer = train_sentencepiece(
        340, [row["prompt"] + row["answer"] for row in rows], more_specials=["<pad>", "<bos>", "<eos>"]
    )
    pipeline["experts"]["right"] = {
        "model": str(make_model_dir(root / "foreign", seed=7, tokenizer=tokenizer)),
        "domain": "right-domain",
        "engine": {"kind": "transformers", "payload": "aligned_states"},
    }
    pipeline["domains"]["right-domain"]["objective"] = {"kind": "aligned_kl"}
    pipeline["trainer"] |= {"steps": 5}
    return pipeline


@pytest.mark.slow
def test_an_expert_with_another_tokenizer_in_a_merge_that_is_killed_and_resumed(
    tmp_path: Path, pipeline: dict[str, Any], make_model_dir: Callable[..., Path]
) -> None:
    file = write_pipeline(tmp_path, with_other_tokens(tmp_path, pipeline, make_model_dir))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    merge = start("merge", file, "--run-dir", whole, cwd=tmp_path)
    out, _ = merge.communicate(timeout=400)
    assert merge.returncode == 0, out
    assert out.count("right: mean accuracy") == 1, out  # its exam is taken once
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert record["quarantined"] == {} and record["domains"]["right-domain"]["samples"] == 12
        assert 0 < record["domains"]["right-domain"]["teacher_mass"] < 1
    experts = {
        name: values["expert"] for name, values in json.loads((whole / "report.json").read_text())["domains"].items()
    }
    assert None not in experts.values() and len(experts) == 2
    assert "right-domain" in (whole / "report.html").read_text()

    killed = start("merge", file, "--run-dir", broken, cwd=tmp_path)
    deadline = time.monotonic() + 300
    while not (broken / "targets" / "step-000004").exists():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=60)
    resumed = start("merge", "--resume", broken, cwd=tmp_path)
    out, _ = resumed.communicate(timeout=400)
    assert resumed.returncode == 0 and "resumed from step 2" in out, out
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    check = start("check", file, "--samples", 4, cwd=tmp_path)
    out, _ = check.communicate(timeout=200)
    (line,) = [line for line in out.splitlines() if "reads tokens of its own: " in line]
    assert "unreadable 0 of 8 responses" in line
