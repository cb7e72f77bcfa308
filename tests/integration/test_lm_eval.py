"""A task of lm-evaluation-harness through `opd evaluate` is what its own command line gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

QUESTIONS = [
    {"question": f"rev {a}{b}c=", "choices": [f"c{b}{a}", f"{a}{b}c", f"{b}c{a}"]} for a in "abdefg" for b in "xyz"
]


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    file = tmp_path / "letters.yaml"
    settings = {
        "task": "letters_backwards",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
    }
    file.write_text(yaml.safe_dump(settings))
    return file


def run(module: str, *args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HOME": str(cwd / "hf")}
    command = [sys.executable, "-m", module, *(str(a) for a in args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_a_local_task_equals_the_harness_itself(task: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    ours = run("cli", "evaluate", tiny_model_dir, "--lm-eval", task.name, "--json", cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    found: Any = json.loads(ours.stdout)["lm_eval"][str(tiny_model_dir)]["letters_backwards"]

    model = ("--model", "hf", "--model_args", f"pretrained={tiny_model_dir},dtype=float32")
    theirs = run("lm_eval", *model, "--tasks", task, "--output_path", tmp_path / "out", cwd=tmp_path)
    assert theirs.returncode == 0, theirs.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    wanted = json.loads(file.read_text())["results"]["letters_backwards"]
    assert {k: v for k, v in wanted.items() if isinstance(v, float)} == {k: v for k, v in found.items() if "," in k}
    assert 0 < found["acc,none"] < 1 and found["sample_len"] == len(QUESTIONS), "a result that could have been another"


def test_a_task_that_the_harness_lacks_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    done = run("cli", "evaluate", tiny_model_dir, "--lm-eval", "gsm8q", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "gsm8q" in done.stderr and "gsm8k" in done.stderr
