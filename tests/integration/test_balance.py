"""Balance through the real engines: what two domains keep beside one with ten times longer answers, and a kill on the way."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.integration.test_merge import kill_when_logged, records

ROOT = Path(__file__).parents[2]
SHORT = ("shift", "rotate", "double")
"""Of the suite `letters`: three to eight letters and an end token."""
BASE = ("reverse", "sort", "rotate", "shift", "double", "mask", "compare", "walk", "swap")
"""Tasks of the quickstart's base: it then solves a part of each, so that there is something to keep and something to learn."""
REPEATS = 13
"""A word said so often is ten times as long."""
SAMPLES = 16
"""Of each domain in a step, by weight."""
ALONE = 0.8
"""Least headroom that the short domains recover without the long one: else nothing is shown beside it."""


def opd(*args: object, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cli", *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr


def write_long_prompts(root: Path) -> None:
    """Prompts of the domain `long`, training and held-out apart: say this word thirteen times."""
    rng = random.Random(0)
    words = sorted({"".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.choice((3, 4)))) for _ in range(2500)})
    rng.shuffle(words)
    (root / "long").mkdir()
    for name, part in (("eval", words[:200]), ("train", words[200:2200])):
        rows = [{"prompt": f"say {w}=", "completion": w * REPEATS, "answer": w * REPEATS} for w in part]
        (root / "long" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base that knows a little of the short tasks, and an expert of each and of the long one."""
    root = tmp_path_factory.mktemp("balance")
    opd("prompts", "make", "letters", "--output", "prompts", "--domains", ",".join(BASE), cwd=root)
    write_long_prompts(root / "prompts")
    size = {"hidden_size": 128, "layers": 4, "heads": 4, "intermediate_size": 344, "max_position_embeddings": 128}
    data = {name: f"prompts/{name}/train.jsonl" for name in (*SHORT, "long")}
    spec = {
        "output_dir": "models",
        "registry": "registry",
        "base": {
            "from_scratch": {"tokenizer": "letters", **size},
            "data": [f"prompts/{name}/train.jsonl" for name in BASE],
            "train": {"max_steps": 200, "learning_rate": 3.0e-3},
        },
        "train": {
            "max_steps": 110,
            "learning_rate": 2.0e-3,
            "per_device_train_batch_size": 64,
            "warmup_steps": 10,
            "max_length": 72,
        },
        "experts": {name: {"domain": name, "data": file} for name, file in data.items()},
    }
    (root / "spec.yaml").write_text(yaml.safe_dump(spec))
    opd("experts", "train", "spec.yaml", cwd=root)
    return root


def merged(root: Path, name: str, domains: Sequence[str], balance: str) -> dict[str, Any]:
    """The full report of a merge of these domains' experts."""
    pipeline = {
        "name": name,
        "student": {"model": "models/base"},
        "registry": "registry",
        "experts": {"use": list(domains)},
        "domains": {
            d: {"prompts": f"prompts/{d}/train.jsonl", "eval": {"prompts": f"prompts/{d}/eval.jsonl"}} for d in domains
        },
        "balance": balance,
        "monitors": {"repetition": {"stop": None}},  # the long domain is too long for some students: that is the point
        "rollout": {"max_new_tokens": 56, "max_model_len": 72, "max_num_seqs": 64},
        "trainer": {
            "ranks": 1,
            "steps": 150,
            "samples_per_step": SAMPLES * len(domains),
            "lr": 2.0e-3,
            "warmup_steps": 10,
            "lr_scheduler_type": "cosine",
            "min_lr_ratio": 0.05,
        },
        "checkpoint": {"every": 1000},
    }
    (root / f"{name}.yaml").write_text(yaml.safe_dump(pipeline))
    opd("merge", f"{name}.yaml", "--run-dir", name, cwd=root)
    found: dict[str, Any] = json.loads((root / name / "report.json").read_text())
    return found


def late_share(report: dict[str, Any], of: str) -> float:
    """The long domain's share over the second half of the merge."""
    curve = report["curves"][f"{of}_share"]["long"]
    return fmean(curve[len(curve) // 2 :])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_neighbours_of_a_domain_with_ten_times_longer_answers_keep_their_headroom(experts: Path) -> None:
    alone = merged(experts, "alone", SHORT, "samples")
    runs = {kind: merged(experts, kind, [*SHORT, "long"], kind) for kind in ("samples", "tokens")}
    kept = {
        kind: {d: report["domains"][d]["headroom"] / alone["domains"][d]["headroom"] for d in SHORT}
        for kind, report in runs.items()
    }
    shares = {kind: {of: late_share(report, of) for of in ("sample", "token")} for kind, report in runs.items()}
    print(json.dumps({"alone": alone["domains"], "kept": kept, "shares": shares}, indent=2))
    assert min(alone["domains"][d]["headroom"] for d in SHORT) > ALONE
    answers = runs["samples"]["answers"]
    assert answers["long"]["expert"]["mean_tokens"] > 8 * answers["shift"]["expert"]["mean_tokens"]
    assert min(kept["tokens"].values()) >= 0.8
    even = 1 / (1 + len(SHORT))
    assert shares["samples"]["sample"] == pytest.approx(even) and shares["samples"]["token"] > 0.6
    assert shares["tokens"]["sample"] < 0.1 and shares["tokens"]["token"] == pytest.approx(even, abs=0.1)
    page = (experts / "tokens" / "report.html").read_text()
    assert "plot-token-share" in page and "plot-sample-share" in page


@pytest.mark.slow
def test_a_balanced_merge_that_was_killed_ends_with_the_same_weights(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    pipeline["balance"] = {"kind": "gap", "of": "tokens", "window": 1}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    opd("merge", file, "--run-dir", "whole", cwd=tmp_path)
    kill_when_logged(file, tmp_path / "broken", 4)
    opd("merge", "--resume", "broken", cwd=tmp_path)
    whole, broken = (records(tmp_path / name) for name in ("whole", "broken"))
    assert [r["prompts"] for r in broken] == [r["prompts"] for r in whole]
    assert all(sum(r["prompts"].values()) == 24 for r in whole)
    assert len({tuple(r["prompts"].values()) for r in whole}) > 1, "the shares did not move: this shows nothing"
    assert {3, 4} <= {r["step"] for r in broken if "replayed" in r}, "the log answers the balanced steps"
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
