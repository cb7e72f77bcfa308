"""Memory and time of a trainer rank against the length of a row, alone and with ranks that share the row.

    python -m benchmarks.long_rows --json long_rows.json
    python -m benchmarks.long_rows --quick

Each case is one micro-batch with one row, trained by real ranks on DeepSpeed and gloo: one rank, or several of
`trainer.sequence_parallel_size`. A process that ends after its case measures its own peak. Beside it stands what the sums of
`opd check` expect. Linux only.
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

WIDTH, LAYERS, HEADS, VOCABULARY = 256, 4, 4, 512
MIB = 2**20


def peak_bytes() -> int:
    """Return the most memory of this process alone, without files and shared memory."""
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, files, shared = (int(sizes[key].split()[0]) * 1024 for key in ("VmHWM", "RssFile", "RssShmem"))
    return peak - files - shared


def run_rank(case: dict[str, Any], rank: int) -> dict[str, float]:
    """Train one micro-batch with one row, twice; the second time is measured, the memory of both."""
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
        objective=SampledConfig(kind="sampled"), temperature=1.0, head_memory_bytes=1,
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
    for step in (1, 2):
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(2 // case["ranks"]), "MASTER_PORT": str(port)}
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


def expected_bytes(tokens: int, ranks: int, model: Path) -> int:
    """Return the activations that `opd check` adds up for one rank."""
    from pipelines.sizing.models import read_body

    return tokens // ranks * read_body(model).activation_width(WIDTH, checkpointing=True) * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="short rows alone")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_rank(args.case, args.rank)))
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    lengths = (1024, 2048) if args.quick else (2048, 4096, 8192, 16384, 32768)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=11 * WIDTH // 4, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            vocab_size=VOCABULARY, max_position_embeddings=max(lengths),
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
        print("tokens  ranks  MiB  expected  seconds")
        for tokens in lengths:
            for ranks in (1, 2):
                figures = run_case({"model": folder, "tokens": tokens, "ranks": ranks})
                expected = expected_bytes(tokens, ranks, Path(folder))
                rows.append({"tokens": tokens, "ranks": ranks, "expected": expected} | figures)
                print(
                    f"{tokens:6d}  {ranks:5d}  {figures['bytes'] / MIB:.0f}  {expected / MIB:.0f}  {figures['seconds']:.1f}"
                )
    if args.json:
        args.json.write_text(
            json.dumps(
                {"machine": machine(2, "torch", "deepspeed"), "model": config.to_diff_dict(), "rows": rows}, indent=1
            )
        )


if __name__ == "__main__":
    main()
