"""A whole merge with all roles on one GPU, whose engine sleeps while the others compute: the seconds of each phase."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.check import Check, within
from tests.conftest import build_model_dir

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ROOT = Path(__file__).parents[2]
WARM = 2
"""First steps, which compile and allocate, and are not counted."""
SIZES: dict[bool, dict[str, int]] = {False: {"hidden": 2048, "heads": 64, "layers": 12}, True: {}}
"""True for a quick check -> sizes of the random models: 610 million parameters, or those of the tests."""


def measure(check: Check) -> None:
    """Two random experts and a random student, in bfloat16 on a GPU; responses end where the random student ends them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        pipeline = root / "pipeline.yaml"
        pipeline.write_text(yaml.safe_dump(_make_pipeline(check, root)))
        command = ["-m", "cli", "merge", str(pipeline), "--run-dir", str(root / "run")]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = within([sys.executable, *command], max(30.0, check.left_s - 5), env)
        metrics = root / "run" / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        if done.code != 0:
            last = (done.errors.strip().splitlines() or ["no last words"])[-1]
            check.leave_out("the end of the merge", f"exit code {done.code} after {len(records)} steps: {last}")
        if len(records) > WARM:
            _add_phases(check, records[WARM:])


def _add_phases(check: Check, records: list[dict[str, Any]]) -> None:
    for phase in records[0]["phase_s"]:
        check.add(
            "seconds of a step, median", phase=phase, seconds=statistics.median(r["phase_s"][phase] for r in records)
        )
    check.add(
        "steps", steps=len(records), probe_gap=max(record["probe_gap"] for record in records),
        first_loss=records[0]["loss"], last_loss=records[-1]["loss"],
    )  # fmt: skip


def _make_pipeline(check: Check, root: Path) -> dict[str, Any]:
    on_gpu, sizes = check.device == "cuda", SIZES[check.quick]
    models = {
        name: str(build_model_dir(root / name, seed=seed, **sizes))  # type: ignore[arg-type]
        for seed, name in enumerate(("student", "left", "right"))
    }
    domains = {}
    for name in ("left", "right"):
        prompts = root / f"{name}.jsonl"
        lines = [json.dumps({"prompt": f"{name} {LETTERS[i:]}{LETTERS[:i]}=", "answer": name}) for i in range(26)]
        prompts.write_text("\n".join(lines) + "\n")
        domains[f"{name}-domain"] = {"prompts": str(prompts)}
    dtype = "bfloat16" if on_gpu else "float32"
    return {
        "name": "gpu-check",
        "student": {"model": models["student"]},
        "experts": {name: {"model": models[name], "domain": f"{name}-domain"} for name in ("left", "right")},
        "domains": domains,
        "rollout": {
            "max_new_tokens": 8 if check.quick else 256, "max_model_len": 64 if check.quick else 384, "dtype": dtype,
            "gpu_memory_utilization": 0.4, "sleep": on_gpu,
        },
        "teachers": {"dtype": dtype},
        "trainer": {
            "ranks": 1, "steps": 4 if check.quick else 8, "samples_per_step": 8 if check.quick else 128, "dtype": dtype,
            "micro_batch_tokens": 256 if check.quick else 16384,
        },
        "schedule": {"mode": "sync"},
        "evaluate": {"every": 0},
        "cluster": {"rollout_gpus": 0.4, "teacher_gpus": 0.2, "trainer_gpus": 0.4} if on_gpu else {},
    }  # fmt: skip
