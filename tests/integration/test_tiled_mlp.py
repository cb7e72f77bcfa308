"""MLPs in tiles on the real DeepSpeed: ranks with different numbers of tiles add the gradients that whole MLPs give.

Run as a program this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opd.config.sections import MAX_UNSHARDED
from opd.models.weights import load_causal_lm
from opd.train.optimizer import AdamWOptions
from opd.train.zero import ZeroEngine, ZeroOptions
from tests.integration.rank_processes import run_ranks
from tests.integration.test_rank_memory import ROWS, write_student
from tests.integration.test_shards import build

RANKS, WIDTH, TILE = 2, 256, 16
TOKENS = (90, 40)
"""Of a row of each rank: six tiles and three."""


def start_engine(case: dict[str, Any], rank: int, tile_tokens: int | None) -> ZeroEngine:
    options = ZeroOptions(
        name="says", world_size=RANKS, dtype="float32", vocab_size=ROWS, max_grad_norm=1e9,
        adamw=AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1), grad_accum_dtype="float32",
        gradient_checkpointing=case["recomputes"], timeout_s=60.0, bucket=case["bucket"], mlp_tile_tokens=tile_tokens,
    )  # fmt: skip
    engine = ZeroEngine(options, rank, partial(build, load_causal_lm, case, torch.float32))
    engine.start("127.0.0.1", int(os.environ["MASTER_PORT"]))
    return engine


def compare(case: dict[str, Any], rank: int) -> None:
    """Train two steps of two micro-batches, whole and in tiles. After the first step AdamW has made rounding errors larger."""
    engines = [start_engine(case, rank, tile_tokens) for tile_tokens in (None, TILE)]
    for step in (1, 2):
        gradients, norms = [], []
        for engine in engines:
            for index in range(2):
                ids = (torch.arange(TOKENS[rank]) + 7 * step + index)[None]
                engine.add_gradients(engine.model(ids), last=index == 1)
            gradients.append(engine.local_gradients())
            norms.append(engine.take_step(step, 1e-4))
        bound = 1e-6 if step == 1 else 1e-3
        for whole, tiled in zip(*gradients, strict=True):
            assert (whole - tiled).abs().max() <= bound * max(float(whole.abs().max()), 0.01 * norms[0]), (case, step)
        assert abs(norms[0] - norms[1]) <= bound * norms[0] > 0, (case, norms)


def test_ranks_with_different_numbers_of_tiles_add_the_gradients_of_whole_mlps(tmp_path: Path) -> None:
    write_student(tmp_path / "student", 2, WIDTH, torch.float32)
    assert WIDTH**2 < MAX_UNSHARDED < WIDTH * (11 * WIDTH // 4), (
        "weights of an MLP are sharded, and layers not gathered as one"
    )
    plain = {"model": str(tmp_path / "student"), "lora": False, "recomputes": False, "bucket": None}
    cases = [plain, plain | {"recomputes": True}, plain | {"lora": True, "recomputes": True, "bucket": 200_000}]
    run_ranks("tests.integration.test_tiled_mlp", [[json.dumps([cases, rank])] for rank in range(RANKS)], 240)


if __name__ == "__main__":
    every_case, own_rank = json.loads(sys.argv[1])
    for one_case in every_case:
        compare(one_case, own_rank)
