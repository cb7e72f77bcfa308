"""`opd check` through the real engine: experts that know one word each; two are swapped, one is garbled, one is right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from experts.sft import encode_lines, fine_tune
from experts.spec import TrainSettings
from opd.prompts import PromptLine

ROOT = Path(__file__).parents[2]
WORDS = {"left": "aba", "right": "cdd", "third": "efe", "fourth": "bfb"}


def check(file: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", "check", str(file), *map(str, args)],
        cwd=file.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def row(output: str, domain: str) -> list[str]:
    """The cells of one domain."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"│ {domain} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def write_domain(root: Path, domain: str) -> dict[str, Any]:
    """Prompts that all want the domain's word."""
    files = {}
    for name, letters in (("train", "mnop"), ("eval", "ijkl")):
        lines = [f'{{"prompt": "{domain} {a}{b}=", "answer": "{WORDS[domain]}"}}\n' for a in letters for b in "qrst"]
        files[name] = root / f"{domain}-{name}.jsonl"
        files[name].write_text("".join(lines))
    return {"prompts": str(files["train"]), "eval": {"prompts": str(files["eval"])}}


def train(model_dir: Path, domain: str, scratch: Path) -> None:
    """Teach a tiny model to answer with the domain's word, whatever is asked."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    prompts = [f"{d} {a}{b}=" for d in WORDS for a in "uvwx" for b in "qrst"]
    lines = [PromptLine(prompt=p, completion=WORDS[domain]) for p in prompts]
    settings = TrainSettings(max_steps=40, learning_rate=3e-3, per_device_train_batch_size=16)
    fine_tune(
        model, encode_lines(tokenizer, lines, 64), settings, seed=0, scratch=scratch, report=lambda step, loss: None
    )
    model.save_pretrained(model_dir)


@pytest.fixture
def pipeline(tmp_path: Path, make_model_dir: Callable[..., Path]) -> dict[str, Any]:
    student = make_model_dir(tmp_path / "student")
    for domain in WORDS:
        shutil.copytree(student, tmp_path / domain)
        train(tmp_path / domain, domain, tmp_path / "scratch")
    return {
        "name": "four",
        "student": {"model": str(student)},
        "experts": {domain: {"model": str(tmp_path / domain), "domain": domain} for domain in WORDS},
        "domains": {domain: write_domain(tmp_path, domain) for domain in WORDS},
        "rollout": {"max_new_tokens": 6, "max_model_len": 48},
        "trainer": {"ranks": 1, "steps": 1, "samples_per_step": 4},
    }


def test_a_good_expert_passes_and_swapped_and_garbled_ones_are_named(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    """docs/walk.sh has a check whose experts are all right."""
    file = tmp_path / "pipeline.yaml"
    pipeline["experts"]["left"]["domain"], pipeline["experts"]["right"]["domain"] = "right", "left"
    file.write_text(yaml.safe_dump(pipeline))
    weights = tmp_path / "third" / "model.safetensors"
    state = {name: torch.randn_like(tensor) for name, tensor in load_file(weights).items()}
    save_file(state, weights, {"format": "pt"})
    bad = check(file, "--samples", 8, "--fix-up")
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert "fail: left: expert `right` scores 0.00 on left, `left` scores 1.00: swapped?" in bad.stdout
    assert "fail: right: expert `left` scores 0.00 on right, `right` scores 1.00: swapped?" in bad.stdout
    assert "fix: set domains.left.teachers: left" in bad.stdout
    assert "fail: third: expert `third`: NLL of its own domain" in bad.stdout
    assert [row(bad.stdout, domain)[-1] for domain in WORDS][:3] == ["fail"] * 3
    name, expert, student, alone, *_, verdict = row(bad.stdout, "fourth")
    assert (name, expert, student, alone) == ("fourth", "fourth", "0.00", "1.00")
    assert verdict != "fail" and "fail: fourth" not in bad.stdout

    pipeline["student"]["model"] = "nowhere"
    file.write_text(yaml.safe_dump(pipeline))
    refused = check(file)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "nowhere\n  found:  no such directory" in refused.stderr
