"""Measure what DeepSpeed's hooks cost one trainer rank: forward and backward pass of a model whose arithmetic is next to nothing.

    python -m benchmarks.hooks --json hooks.json
    python -m benchmarks.hooks --quick

Three arms in turn, each in a process of its own: plain torch, the trainer's engine as it is, and the same engine with what it
leaves out at one rank (hooks around every module, and DeepSpeed's own linear layer). The figure is a time against plain torch's.
A GPU starts small kernels about as slowly as this CPU computes this model, so there it tells most of a step of a small model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine
from opd.files import atomic_write_text
from opd.report.tables import markdown_table

ARMS = ("torch", "engine", "engine with every hook")


def measure(arm: str, layers: int, hidden: int, times: int) -> dict[str, float]:
    """Median seconds of a forward and of a backward pass."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=4, vocab_size=256
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.arange(4, 12)[None]
    forward: Callable[[], Any] = partial(_loss, model, ids)
    backward: Callable[[Any], object] = torch.Tensor.backward
    if arm != "torch":
        rank = _engine(model, every_hook=arm == ARMS[-1])
        forward, backward = partial(rank.model, ids), partial(rank.add_gradients, last=False)
    seconds = [timed(forward, backward) for _ in range(times + 2)][2:]
    return {"forward_s": median(s for s, _ in seconds), "backward_s": median(s for _, s in seconds)}


def timed(forward: Callable[[], Any], backward: Callable[[Any], object]) -> tuple[float, float]:
    """Seconds of both passes; the second is given what the first returns."""
    began = time.perf_counter()
    loss = forward()
    between = time.perf_counter()
    backward(loss)
    return between - began, time.perf_counter() - between


def _engine(model: Any, every_hook: bool) -> Any:
    """One rank around the model."""
    from torch import nn

    from opd.train import zero
    from opd.train.optimizer import AdamWOptions

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = model

        def forward(self, ids: Any) -> Any:
            return _loss(self.lm, ids)

    if every_hook:
        _with_every_hook(zero)
    options = zero.ZeroOptions(
        name="model", world_size=1, dtype="bfloat16", vocab_size=256, max_grad_norm=1.0, grad_accum_dtype="float32",
        adamw=AdamWOptions(betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0), gradient_checkpointing=False, timeout_s=60,
    )  # fmt: skip
    rank = zero.ZeroEngine(options, 0, Loss)
    rank.start(*rank.open_meeting_point("127.0.0.1"))
    return rank


def _with_every_hook(zero: Any) -> None:
    """The engine as it was before it left anything out at one rank."""
    config = zero._deepspeed_config

    def whole(options: Any, trained: int) -> dict[str, Any]:
        made: dict[str, Any] = config(options, trained)
        made["zero_optimization"].pop("memory_efficient_linear")
        return made

    zero._deepspeed_config = whole
    zero.gathered_together = lambda *_: []


def _loss(model: Any, ids: Any) -> Any:
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float().square().mean()


def table(rows: dict[str, dict[str, float]]) -> str:
    """One row for each arm, as Markdown."""
    plain = sum(rows[ARMS[0]].values())
    cells = [
        (arm, f"{1e3 * row['forward_s']:.0f}", f"{1e3 * row['backward_s']:.0f}", f"{sum(row.values()) / plain:.2f}")
        for arm, row in rows.items()
    ]
    return markdown_table(("", "forward, ms", "backward, ms", "against torch"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="layers of the model (default 30)")
    parser.add_argument("--hidden", type=int, default=64, help="its width (default 64)")
    parser.add_argument("--times", type=int, default=15, help="passes of each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all arms; the median round counts")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--quick", action="store_true", help="two layers, one round: does everything run?")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.layers, args.times, args.rounds = 2, 2, 1
    if args.arm:
        print(json.dumps(measure(args.arm, args.layers, args.hidden, args.times)))
        return
    shape = ["--layers", str(args.layers), "--hidden", str(args.hidden), "--times", str(args.times)]
    rounds: list[dict[str, dict[str, float]]] = [{arm: _child(arm, shape) for arm in ARMS} for _ in range(args.rounds)]
    rows = {arm: {key: median(r[arm][key] for r in rounds) for key in rounds[0][arm]} for arm in ARMS}
    print(table(rows))
    if args.json:
        facts = machine(1, "torch", "transformers", "deepspeed")
        atomic_write_text(args.json, json.dumps({"machine": facts, "arms": rows, "rounds": rounds}, indent=2) + "\n")


def _child(arm: str, shape: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.hooks", "--arm", arm, *shape]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
