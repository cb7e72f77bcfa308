"""DeepSpeed's settings that a user may choose: steps, export and resume are those without them, bit for bit, on the real DeepSpeed.

Run as a program this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.config.deepspeed import DeepSpeedConfig
from opd.train.load import load_share
from opd.train.lora import LoraOptions, add_adapters
from opd.train.optimizer import AdamWOptions
from opd.train.zero import ZeroEngine, ZeroOptions
from tests.integration.rank_processes import run_ranks
from tests.integration.test_shards import Says

IDS = torch.arange(4, 40)[None]
OFFLOADED = {"device": "cpu"}
CASES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "optimizer_in_memory": (2, {"zero_optimization": {"offload_optimizer": OFFLOADED}}, False),
    "all_in_memory": (
        2,
        {"zero_optimization": {"offload_optimizer": OFFLOADED, "offload_param": OFFLOADED}},
        False,
    ),
    "frozen_weights_in_memory": (2, {"zero_optimization": {"offload_param": OFFLOADED}}, True),
    "groups_of_two": (4, {"zero_optimization": {"zero_hpz_partition_size": 2, "overlap_comm": True}}, False),
    "groups_of_two_lora": (4, {"zero_optimization": {"zero_hpz_partition_size": 2}}, True),
}
"""Case -> ranks, settings, whether adapters are trained."""
QUICK = ("all_in_memory",)


def build_module(model: Path, lora: bool, settings: dict[str, Any]) -> Says:
    lm = load_share(model, torch.float32, deepspeed=settings)
    if lora:
        add_adapters(lm, LoraOptions(r=4, alpha=8.0, targets=("q_proj", "down_proj"), seed=3))
    return Says(lm)


def start_engine(model: Path, lora: bool, settings: dict[str, Any], rank: int, ranks: int) -> ZeroEngine:
    options = ZeroOptions(
        name="student", world_size=ranks, dtype="float32", vocab_size=96, max_grad_norm=1e9,
        adamw=AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1), grad_accum_dtype="float32",
        gradient_checkpointing=False, timeout_s=60.0, deepspeed=settings,
    )  # fmt: skip
    engine = ZeroEngine(options, rank, partial(build_module, model, lora, settings))
    engine.start("127.0.0.1", int(os.environ["MASTER_PORT"]))
    return engine


def take_steps(engine: ZeroEngine, steps: range, rank: int) -> list[float]:
    norms = []
    for step in steps:
        for index in range(2):
            engine.add_gradients(engine.model(IDS + rank + index + step), last=index == 1)
        norms.append(engine.take_step(step, 1e-2))
    return norms


def run_rank(model: Path, out: Path, name: str, run: str, rank: int) -> None:
    """Take four steps and save after the second. The run `resumed` loads what the run `chosen` saved, and takes the last two again."""
    ranks, chosen, lora = CASES[name]
    settings = {} if run == "default" else DeepSpeedConfig.model_validate(chosen).settings
    engine = start_engine(model, lora, settings, rank, ranks)
    norms = []
    if run == "resumed":
        engine.load(out / "chosen" / "saved")
    else:
        norms = take_steps(engine, range(2), rank)
        engine.begin_save(out / run / "saved")
        assert engine.saved(60.0)
    norms += take_steps(engine, range(2, 4), rank)
    engine.export(out / run)
    if rank == 0:
        (out / run / "norms.json").write_text(json.dumps(norms))


def run_all_ranks(model: Path, out: Path, name: str, run: str) -> tuple[list[float], bytes]:
    """Run all ranks. Returns the norms of the gradients, and the exported weights."""
    (out / run / "saved").mkdir(parents=True)
    run_ranks(__name__, [[str(model), str(out), name, run, str(rank)] for rank in range(CASES[name][0])], 240)
    return json.loads((out / run / "norms.json").read_text()), (out / run / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are too large for DeepSpeed to keep whole on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=320, intermediate_size=400, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_settings_change_where_things_are_and_no_bit(name: str, model: Path, tmp_path: Path) -> None:
    (default_norms, default), (norms, chosen), (last_norms, resumed) = (
        run_all_ranks(model, tmp_path, name, run) for run in ("default", "chosen", "resumed")
    )
    assert chosen == resumed == default != (model / "model.safetensors").read_bytes()
    assert last_norms == norms[2:]
    # DeepSpeed adds up the norm of gradients in the machine's memory in another order. No gradient is clipped here.
    assert norms == pytest.approx(default_norms, rel=1e-6)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
