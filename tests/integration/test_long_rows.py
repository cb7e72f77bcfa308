"""Rows longer than a trainer rank has memory for: a merge whose ranks share them, through real vLLM, Ray and DeepSpeed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import build_tokenizer
from tests.integration.conftest import WORDS
from tests.integration.limited_rank import MIB
from tests.integration.test_large_student import kill_at, limited_opd
from tests.integration.test_merge import records, write
from tests.integration.test_rank_memory import write_student

LAYERS, WIDTH, TOKENS = 16, 256, 4096
LIMIT = 2250 * MIB
"""Memory of a rank, in addresses beyond its libraries: one with shared rows needs 1,930 MiB, one with whole rows 2,570."""


def pipeline(root: Path, make_model_dir: Callable[..., Path]) -> dict[str, Any]:
    """A merge of one row in each step, and a student of which the activations of such a row are most of a rank's memory."""
    tokenizer = build_tokenizer()
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    rows = {"vocab_size": len(tokenizer), "max_position_embeddings": TOKENS}
    write_student(root / "student", LAYERS, WIDTH, torch.float32, **rows, **ids)
    tokenizer.save_pretrained(root / "student")
    rng = random.Random(0)
    prompts = [{"prompt": "".join(rng.choices(WORDS, k=TOKENS - 40)), "answer": "a"} for _ in range(12)]
    (root / "d.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    expert = make_model_dir(root / "e", seed=1, positions=TOKENS)
    return {
        "name": "long",
        "student": {"model": str(root / "student")},
        "experts": {"e": {"model": str(expert), "domain": "d"}},
        "domains": {"d": {"prompts": str(root / "d.jsonl")}},
        "rollout": {"max_new_tokens": 8, "max_model_len": TOKENS, "max_num_seqs": 2},
        "objective": {"chunk": 64},
        "trainer": {
            "ranks": 2, "sequence_parallel_size": 2, "steps": 3, "samples_per_step": 1, "lr": 1.0e-3,
            # With a bucket a rank returns freed memory to the system, and the limit is about what it has.
            "micro_batch_tokens": TOKENS, "bucket": 2_000_000,
        },
        "checkpoint": {"every": 1},
        "cluster": {"max_restarts": 0},
    }  # fmt: skip


@pytest.mark.slow
def test_ranks_that_share_rows_train_and_resume_what_one_has_no_memory_for(
    tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    file = write(tmp_path, pipeline(tmp_path, make_model_dir))

    def merge(*args: object) -> tuple[int, str]:
        process = limited_opd(["merge", *args], tmp_path, LIMIT)
        output = process.communicate(timeout=300)[0]
        return process.returncode, output

    alone = merge(file, "--run-dir", tmp_path / "alone", "--set", "trainer.sequence_parallel_size=1")
    # It is torch that gets no memory, or a library of its own.
    refused = "can't allocate memory" in alone[1] or "mmap error: 12" in alone[1]
    assert alone[0] == 1 and refused and not records(tmp_path / "alone"), alone[1][-3000:]

    shared = merge(file, "--run-dir", tmp_path / "shared")
    assert shared[0] == 0, shared[1][-3000:]
    killed = tmp_path / "killed"
    kill_at(limited_opd(["merge", file, "--run-dir", killed], tmp_path, LIMIT), killed / "checkpoints" / "step-000002")
    resumed = merge("--resume", killed)
    assert resumed[0] == 0 and "resumed from step 2" in resumed[1], resumed[1][-3000:]
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (tmp_path / "shared", killed)]
    assert weights[0] == weights[1]
    assert [record["loss"] for record in records(killed)] == [record["loss"] for record in records(tmp_path / "shared")]
    assert len(records(killed)) == 3
