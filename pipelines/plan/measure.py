"""`opd plan --measure`: the rates of this machine, from a matrix product, a copy and small calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from opd.files import atomic_write_text
from pipelines.inputs.machine_memory import machine_bytes
from pipelines.plan.spec import ClusterSpec, load_spec

SECONDS = 1.0
"""How long each rate is measured."""
ROWS, WIDTH, IDS = 512, 576, 49152
"""The product: states with the output head of a model such as SmolLM2. Every factor of two-cores is a share of it."""
COPIED = 128 << 20
"""Bytes that are copied at a time: more than any cache holds."""
LAYER = {
    "q_proj": (576, 576),
    "k_proj": (576, 192),
    "v_proj": (576, 192),
    "o_proj": (576, 576),
    "gate_proj": (576, 1536),
    "up_proj": (576, 1536),
    "down_proj": (1536, 576),
}
"""Inputs and outputs of a layer's products, those of SmolLM2."""
LAYER_HEADS, LAYER_HEAD, LAYER_ROWS, LAYER_WIDE = 9, 64, 13, 128
SMALL, CALLS = 8, 1000
"""The small operation, a product of a row of so many numbers, and how often it is called at a time."""


def measured_spec(base: ClusterSpec) -> ClusterSpec:
    """The spec with this machine's cores, memory and rates; a machine without GPUs."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rates = {
        "float32": _products(torch, torch.float32),
        "bfloat16": _products(torch, torch.bfloat16),
        "memory": _copies(torch),
        "fresh": _fresh(torch),
        "calls": _calls(torch),
    }
    machine = {"cores": len(os.sched_getaffinity(0)), "memory": machine_bytes()}
    # How much of a product a body reaches differs among machines, so it is measured, not taken from the base.
    data = base.model_dump() | {"name": "this-machine", "machines": 1, "machine": machine, "rates": rates}
    # Processes of one machine pass bytes on by copying them.
    data["factors"] |= measured_factors(torch, rates["float32"])
    data["links"] |= {"inside": rates["memory"] / 2, "between": rates["memory"] / 2, "load": rates["memory"] / 2}
    return ClusterSpec.model_validate(data)


def measured_factors(torch: Any, rate: float) -> dict[str, dict[str, Any]]:
    """Shares of the float32 product that a layer of SmolLM2's shape reaches, `LAYER_ROWS` rows of `LAYER_WIDE` tokens."""
    layer_and_back = [_layer_rate(torch, passes) / rate for passes in (1, 3)]
    shape = f"measured: a layer of SmolLM2's shape, {LAYER_ROWS} rows of {LAYER_WIDE}, in float32"
    return {
        name: {"share": round(min(1.0, share), 3), "why": f"{shape}: {share:.2f} of the product"}
        for name, share in zip(("forward", "backward"), layer_and_back, strict=True)
    }


def _layer_rate(torch: Any, passes: int) -> float:
    """FLOP/s of a layer: forward, or with three passes' products forward and backward."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(out, of, generator=draw).mul_(0.02).requires_grad_(passes > 1) for of, out in LAYER.values()]
    hidden_B_T_D = torch.randn(LAYER_ROWS, LAYER_WIDE, LAYER_HEADS * LAYER_HEAD, generator=draw).requires_grad_(
        passes > 1
    )
    q, k, v, o, gate, up, down = weights
    linear = torch.nn.functional.linear

    def split(projected_B_T_I: Any) -> Any:
        return projected_B_T_I.unflatten(-1, (-1, LAYER_HEAD)).transpose(1, 2)

    def run() -> None:
        looked_B_H_T_K = torch.nn.functional.scaled_dot_product_attention(
            split(linear(hidden_B_T_D, q)),
            split(linear(hidden_B_T_D, k)),
            split(linear(hidden_B_T_D, v)),
            is_causal=True,
            enable_gqa=True,
        )
        seen_B_T_D = hidden_B_T_D + linear(looked_B_H_T_K.transpose(1, 2).flatten(-2), o)
        inner_B_T_F = torch.nn.functional.silu(linear(seen_B_T_D, gate)) * linear(seen_B_T_D, up)
        made_B_T_D = seen_B_T_D + linear(inner_B_T_F, down)
        if passes > 1:
            made_B_T_D.sum().backward()

    pairs = 2 * LAYER_HEADS * LAYER_HEAD * LAYER_WIDE / 2
    flops = 2 * LAYER_ROWS * LAYER_WIDE * (sum(of * out for of, out in LAYER.values()) + pairs)
    with torch.set_grad_enabled(passes > 1):
        return float(passes * flops / _quickest(run))


def measure_to(path: Path) -> ClusterSpec:
    """Measure this machine and write its spec; overheads, lengths and the other factors of a file that is there
    stay as they are."""
    spec = measured_spec(load_spec(str(path) if path.is_file() else "two-cores"))
    atomic_write_text(path, yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True), sort_keys=False))
    return spec


def _products(torch: Any, dtype: Any) -> float:
    """FLOP/s of a matrix product, the best of one second's."""
    hidden_N_D, head_V_D = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(IDS, WIDTH).to(dtype)
    return 2 * ROWS * WIDTH * IDS / _quickest(lambda: hidden_N_D @ head_V_D.T)


def _copies(torch: Any) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPIED, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED / _quickest(lambda: target.copy_(source))


def _fresh(torch: Any) -> float:
    """Bytes a second that are written to memory which is asked for each time."""
    return COPIED / _quickest(lambda: torch.empty(COPIED, dtype=torch.uint8).fill_(1))


def _calls(torch: Any) -> float:
    """Small operations a second that one core begins: Python's part and torch's, no arithmetic worth the name."""
    row_1_D, square_D_D = torch.ones(1, SMALL), torch.ones(SMALL, SMALL)

    def some() -> None:
        for _ in range(CALLS):
            torch.nn.functional.linear(row_1_D, square_D_D)

    with torch.inference_mode():
        return CALLS / _quickest(some)


def _quickest(work: Callable[[], Any]) -> float:
    """Seconds of the quickest of the runs that a second has room for."""
    work()
    end, best = time.perf_counter() + SECONDS, float("inf")
    while time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best
