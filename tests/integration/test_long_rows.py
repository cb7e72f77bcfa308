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
from tests.integration.test_large_student import limited_opd
from tests.integration.test_merge import records, write
from tests.integration.test_rank_memory import write_student

LAYERS, WIDTH, TOKENS = 6, 512, 4096
LIMIT = 2350 * MIB
"""Memory of a rank, with what malloc takes ahead: in its first step a rank with shared rows needs 2,150 MiB, one with whole rows 2,550."""


def pipeline(root: Path, make_model_dir: Callable[..., Path]) -> dict[str, Any]:
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
            "ranks": 2, "sequence_parallel_size": 2, "steps": 1, "samples_per_step": 2, "lr": 1.0e-3,
            "micro_batch_tokens": TOKENS,
        },
        "checkpoint": {"every": 1},
        "cluster": {"max_restarts": 0},
    }  # fmt: skip


@pytest.mark.slow
def test_ranks_that_share_rows_train_what_one_has_no_memory_for(
    tmp_path: Path, make_model_dir: Callable[..., Path]
) -> None:
    data = pipeline(tmp_path, make_model_dir)
    file = write(tmp_path, data)

    def merge(run: str, *args: str) -> tuple[int, str]:
        process = limited_opd(["merge", *args, "--run-dir", tmp_path / run], tmp_path, LIMIT)
        output = process.communicate(timeout=560)[0]
        return process.returncode, output

    alone = merge("alone", str(file), "--set", "trainer.sequence_parallel_size=1")
    assert alone[0] == 1 and "can't allocate memory" in alone[1], alone[1][-3000:]

    whole = merge("whole", str(file))
    assert whole[0] == 0, whole[1][-3000:]
    assert [record["step"] for record in records(tmp_path / "whole")] == [1]
