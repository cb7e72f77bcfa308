"""A merge of a student whose weights are more than a trainer rank may have: the whole way, through real vLLM, Ray and DeepSpeed.

Run as a program this file is `opd` with trainer ranks under a limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open

from opd.config import load_pipeline
from pipelines.inputs.read import read_inputs
from pipelines.sizing import memory
from tests.conftest import build_tokenizer
from tests.integration.conftest import write_prompts
from tests.integration.limited_rank import LIMIT, MIB, NOTES, RESERVED, LimitedRank
from tests.integration.test_merge import records, write
from tests.integration.test_rank_memory import write_student

ROOT = Path(__file__).parents[2]
RANKS, LAYERS, WIDTH = 2, 12, 2048
OVER = 1.1
"""Most that a rank may have, in what `opd check` adds up."""


def pipeline(root: Path, make_model_dir: Callable[..., Path]) -> tuple[dict[str, Any], int]:
    """A merge of a large student and a small expert as plain data, and the bytes of the student's weights."""
    tokenizer = build_tokenizer()
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    rows = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    numbers = write_student(root / "student", LAYERS, WIDTH, torch.float32, **rows, **ids)
    tokenizer.save_pretrained(root / "student")
    return {
        "name": "large",
        "student": {"model": str(root / "student"), "lora": {"r": 4, "alpha": 8, "targets": ["q_proj"]}},
        "experts": {"e": {"model": str(make_model_dir(root / "e", seed=1)), "domain": "d"}},
        "domains": {"d": {"prompts": str(write_prompts(root / "d.jsonl", "say", 40, 1))}},
        "rollout": {"max_new_tokens": 4, "max_model_len": 32},
        "objective": {"chunk": 64},
        "trainer": {
            "ranks": RANKS, "steps": 3, "samples_per_step": 4, "lr": 1.0e-3, "dtype": "float32",
            "micro_batch_tokens": 16, "bucket": 10_000_000,
        },
        "checkpoint": {"every": 1},
    }, 4 * numbers  # fmt: skip


def limited_opd(args: Sequence[object], root: Path, limit: int) -> subprocess.Popen[str]:
    (root / "notes").mkdir(exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(ROOT), LIMIT: str(limit), NOTES: str(root / "notes")}
    command = [sys.executable, "-m", "tests.integration.test_large_student", *map(str, args)]
    return subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_at(process: subprocess.Popen[str], sign: Path) -> None:
    deadline = time.monotonic() + 400
    while not sign.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-3000:]
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_a_student_larger_than_a_ranks_memory_goes_the_whole_way(
    tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    """Loaded, trained, pushed, killed, resumed from its checkpoint and exported."""
    data, limit = pipeline(tmp_path, make_model_dir)
    file, run = write(tmp_path, data), tmp_path / "run"
    config = load_pipeline(file)
    most = memory.rank_bytes(memory.estimate_memory(config, read_inputs(config)))
    assert 1.1 * most < limit, "a whole student is more than the sum of a rank"
    assert limit + RESERVED < memory.TRAINER_PROCESS + 1.5 * limit, "a rank that read the whole would end"
    kill_at(limited_opd(["merge", file, "--run-dir", run], tmp_path, limit), run / "targets" / "step-000003")
    resumed = limited_opd(["merge", "--resume", run], tmp_path, limit)
    said = resumed.communicate(timeout=400)[0]
    assert resumed.returncode == 0, said[-3000:]
    assert "resumed from step" in said and [r["step"] for r in records(run)] == [1, 2, 3]

    noted = [json.loads(line) for file in (tmp_path / "notes").iterdir() for line in file.read_text().splitlines()]
    assert {after for after, *_ in noted} == {"load", "step", "save", "resume", "push", "export"}
    for notes in (tmp_path / "notes").iterdir():
        peak = max(json.loads(line)[1] for line in notes.read_text().splitlines())
        print(notes.name, peak // MIB, "of", most // MIB, "MiB; the student:", limit // MIB)
        assert 0.9 * most <= peak <= OVER * most, (notes.read_text(), most)
    with (
        safe_open(tmp_path / "student" / "model.safetensors", "pt") as before,
        safe_open(run / "model" / "model.safetensors", "pt") as after,
    ):
        assert sorted(before.keys()) == sorted(after.keys())
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
            same = torch.equal(before.get_tensor(name), after.get_tensor(name))
            assert same == ("k_proj" in name), name


if __name__ == "__main__":
    from cli import app
    from opd.train import deepspeed

    with patch.object(deepspeed, "TrainerRank", LimitedRank):
        app()
