"""Memory and time of a trainer rank against the length of a row, alone and with ranks that share the row.

    python -m benchmarks.long_rows --json long_rows.json
    python -m benchmarks.long_rows --quick
    python -m benchmarks.long_rows --plan

Each case is one micro-batch with one row, trained by real ranks on DeepSpeed and gloo: one rank, or several of
`trainer.sequence_parallel_size`, with whole MLPs or `trainer.mlp_tile_tokens`. A process that ends after its case measures its own
peak. Beside it stands what the sums of `opd check` expect. `--plan` measures nothing: it prints these sums for an 8B student with rows
of up to a million tokens, as a Markdown table. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine

WIDTH, LAYERS, HEADS, VOCABULARY = 256, 2, 4, 512
TILE = 512
WAYS = ((1, None), (2, None), (2, TILE))
"""Ranks that share a row, and tokens of a tile of an MLP."""
MIB = 2**20
SHORT = 16384
"""Tokens up to which a row is trained twice."""
PLANNED = {"128k tokens, 8 GPUs": (2**17, 8), "1M tokens, 8 GPUs": (2**20, 8), "1M tokens, 64 GPUs": (2**20, 64)}
"""Column of the plan -> tokens of a row, and GPUs with a trainer rank each."""
STUDENT = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 2**20,
}  # fmt: skip


def peak_bytes() -> int:
    """Return the most memory of this process alone, without files and shared memory."""
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, files, shared = (int(sizes[key].split()[0]) * 1024 for key in ("VmHWM", "RssFile", "RssShmem"))
    return peak - files - shared


def run_rank(case: dict[str, Any], rank: int) -> dict[str, float]:
    """Train one micro-batch with one row. Of short rows the second pass is timed, because the first has work of its own."""
    from opd.losses.sampled import SampledConfig
    from opd.payloads.sampled_logprobs import SampledLogprobs
    from opd.records.types import Rollout
    from opd.stream.schema import TargetRow, write_stream
    from opd.train.components import Component
    from opd.train.optimizer import AdamWOptions
    from opd.train.rank import RankOptions, RankWork, TrainerRank

    ranks, tokens = case["ranks"], case["tokens"]
    options = RankOptions(
        name="student", model_dir=Path(case["model"]), world_size=ranks, dtype="float32", vocab_size=VOCABULARY,
        adamw=AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0), max_grad_norm=1.0,
        grad_accum_dtype="float32", gradient_checkpointing=True, timeout_s=3600.0, sequence_parallel_size=ranks,
        objective=SampledConfig(kind="sampled"), temperature=1.0, head_memory_bytes=1, mlp_tile_tokens=case["tile"],
    )  # fmt: skip
    trainer = TrainerRank(options, rank)
    trainer.start("127.0.0.1", int(os.environ["MASTER_PORT"]))
    trainer.use_layout("padded")
    response = tuple(int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, tokens - 8))
    rollout = Rollout.from_tokens("a", tuple(range(8)), response)
    stream = write_stream(
        [TargetRow(rollout=rollout, teacher="t", answer=SampledLogprobs([-3.0] * len(response)))],
        "float32",
        "sampled_logprobs",
    )
    before, seconds = peak_bytes(), 0.0
    for step in range(1, 2 if tokens > SHORT else 3):
        work = RankWork(
            step=step, lr=1e-4, micro_batches=(("a",),), components={"divergence": Component(weights={"a": 1 / tokens})}
        )
        trainer.begin_step(work, {})
        began = time.monotonic()
        trainer.accumulate_micro_batch(0, frozenset(), np.frombuffer(stream, dtype=np.uint8))
        seconds = time.monotonic() - began
        trainer.finish_step(1.0)
    return {"bytes": peak_bytes() - before, "seconds": seconds}


def run_case(case: dict[str, Any]) -> dict[str, float]:
    """Run all ranks of a case in processes of their own. Returns the figures of the rank with the most memory."""
    from opd.train.ranks import FREES_MEMORY

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(2 // case["ranks"])
    env = os.environ | FREES_MEMORY | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads, "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.long_rows", "--rank", str(rank), "--case", json.dumps(case)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(case["ranks"])
    ]
    outputs = [process.communicate(timeout=3600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank of {case} failed")
    return max((json.loads(output.splitlines()[-1]) for output in outputs), key=lambda figures: figures["bytes"])


def expected_bytes(tokens: int, ranks: int, tile: int | None, shape: Path) -> int:
    """Return the bytes that `opd check` adds up for one rank and its micro-batch of one row. `shape`: directory of the model's config."""
    # The row and no other: see `pipelines.sizing.micro_batch.count_rank_tokens`.
    trainer = {"ranks": ranks, "sequence_parallel_size": ranks, "mlp_tile_tokens": tile, "micro_batch_tokens": 16}
    from pipelines.sizing.micro_batch import micro_batch_parts

    config, models = read_merge(tokens, shape, trainer, {"kind": "sampled"})
    return sum(micro_batch_parts(config, models).values())


def read_merge(
    tokens: int, model: Path, trainer: dict[str, Any], objective: dict[str, Any], **others: Any
) -> tuple[Any, Any]:
    """Return a merge of one expert with rows of `tokens` tokens, and the facts about its models from their shapes."""
    from opd.config import PipelineConfig
    from pipelines.plan.models import read_models

    config = PipelineConfig.model_validate(
        {
            "name": "long-rows",
            "student": {"model": str(model)} | others.pop("student", {}),
            "experts": {"e": {"model": str(model), "domain": "d"}},
            "domains": {"d": {"prompts": "d.jsonl"}},
            "rollout": {"max_model_len": tokens, "max_new_tokens": tokens // 4} | others.pop("rollout", {}),
            "objective": objective,
            "teachers": {"payload": "sampled_logprobs" if objective["kind"] == "sampled" else "hidden_states"}
            | others.pop("teachers", {}),
            "trainer": {"steps": 1, "samples_per_step": 8, "gradient_checkpointing": True} | trainer,
        }
        | others
    )
    return config, read_models(config).merge


def plan_rank(tokens: int, gpus: int, model: Path) -> dict[str, float]:
    """Return the bytes of each part of a trainer rank by the sums of `opd plan`, and the engine's keys and values of a row."""
    from pipelines.sizing.cache import sequence_bytes
    from pipelines.sizing.parts import worker_parts

    config, models = read_merge(
        tokens,
        model,
        {
            "ranks": gpus, "sequence_parallel_size": 8, "dtype": "bfloat16", "micro_batch_tokens": 16, "mlp_tile_tokens": 4096,
            "activation_offloading": True, "bucket": 100_000_000,
        },
        {"kind": "reverse_kl", "chunk": 512},
        student={"lora": {"r": 32}},
        rollout={"dtype": "bfloat16", "kv_cache_dtype": "fp8", "tensor_parallel_size": 8},
        teachers={"dtype": "bfloat16", "engine": "vllm", "tensor_parallel_size": 8},
        cluster={"rollout_gpus": 1, "teacher_gpus": 1, "trainer_gpus": 1},
    )  # fmt: skip
    parts = worker_parts(config, models, on_gpus=True, cache=0.0, rows=config.trainer.samples_per_step)
    rank = {part.part: part.nbytes for part in parts if part.role == "trainer rank"}
    on_gpu = sum(nbytes for part, nbytes in rank.items() if "(host)" not in part)
    cache = {"engine: keys and values of one row, on each of 8 GPUs": sequence_bytes(config, models)}
    return rank | {"together, on the GPU": on_gpu} | cache


def print_plan() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(STUDENT))
        columns = [plan_rank(*case, Path(folder)) for case in PLANNED.values()]
    print(f"| GiB of one rank | {' | '.join(PLANNED)} |\n| --- |{' ---: |' * len(PLANNED)}")
    for part in columns[0]:
        print(f"| {part} | {' | '.join(f'{column[part] / 2**30:.3g}' for column in columns)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="short rows alone")
    parser.add_argument(
        "--plan", action="store_true", help="print what the sums say of a million tokens, and measure nothing"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_rank(args.case, args.rank)))
        return
    if args.plan:
        print_plan()
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    lengths = (1024, 2048) if args.quick else (2048, 8192, 32768)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=11 * WIDTH // 4, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            vocab_size=VOCABULARY, max_position_embeddings=max(lengths),
        )  # fmt: skip
        model, shape = Path(folder) / "model", Path(folder) / "shape"
        LlamaForCausalLM(config).save_pretrained(model)
        config.save_pretrained(shape)
        print("tokens  ranks  tile  MiB  expected  seconds")
        for tokens in lengths:
            for ranks, tile in WAYS:
                figures = run_case({"model": str(model), "tokens": tokens, "ranks": ranks, "tile": tile})
                expected = expected_bytes(tokens, ranks, tile, shape)
                rows.append({"tokens": tokens, "ranks": ranks, "tile": tile, "expected": expected} | figures)
                mib, expected_mib = figures["bytes"] / MIB, expected / MIB
                print(f"{tokens} {ranks} {tile} {mib:.0f} {expected_mib:.0f} {figures['seconds']:.1f}", flush=True)
    if args.json:
        args.json.write_text(
            json.dumps(
                {"machine": machine(2, "torch", "deepspeed"), "model": config.to_diff_dict(), "rows": rows}, indent=1
            )
        )


if __name__ == "__main__":
    main()
