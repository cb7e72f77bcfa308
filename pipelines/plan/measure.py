"""`opd plan --measure`: the rates of this machine, from a matrix product, a copy, small calls and a layer of the student."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from opd.cluster.environment import count_cores
from opd.errors import ConfigError
from opd.files import atomic_write_text, raise_storage_errors
from pipelines.plan.spec import DEFAULT, ClusterSpec, load_spec
from pipelines.sizing.formulas import KINDS, dense_layers, grouped_attention
from pipelines.sizing.machine import machine_bytes
from pipelines.sizing.models import read_config

SECONDS = 1.0
"""Seconds for which each rate is measured."""
ROWS, WIDTH, IDS = 512, 576, 49152
"""The product: states with the output head of a model such as SmolLM2. Every factor of two-cores is a share of it."""
COPIED = 128 << 20
"""Bytes that are copied at a time: more than any cache holds."""
LAYER_ROWS, LAYER_WIDE, LAYER_BATCH = 13, 128, 64
"""Rows and their width in a pass forward and backward; sequences in an engine's step."""
LARGEST = 50_000_000
"""Numbers of the largest layer that is measured: a larger one takes seconds for a pass."""
SMALL, CALLS = 8, 1000
"""The small operation, a product of a row of so many numbers, and how often it is called at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer:
    """A dense decoder layer, as far as its time goes."""

    whose: str
    """Source of the shape, for people."""
    hidden: int
    queries: int
    keys: int
    head: int
    inside: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of its matrices."""
        ends = {"q_proj": (self.hidden, self.queries), "k_proj": (self.hidden, self.keys)}
        ends |= {"v_proj": (self.hidden, self.keys), "o_proj": (self.queries, self.hidden)}
        ends |= {"gate_proj": (self.hidden, self.inside), "up_proj": (self.hidden, self.inside)}
        return ends | {"down_proj": (self.inside, self.hidden)}

    @property
    def parameters(self) -> int:
        return sum(of * out for of, out in self.products.values())


SMOLLM2 = MeasuredLayer(whose="SmolLM2", hidden=576, queries=576, keys=192, head=64, inside=1536)
"""The layer that is measured where the student's own is no dense layer, or too large."""


def layer_of(model_dir: Path) -> MeasuredLayer:
    """The student's own layer, or SmolLM2's. Raises: as `read_config`."""
    config = read_config(model_dir)
    heads = config.num_attention_heads
    head = config.head_dim or config.hidden_size // heads
    own = MeasuredLayer(
        whose="the student",
        hidden=config.hidden_size,
        queries=heads * head,
        keys=(config.num_key_value_heads or heads) * head,
        head=head,
        inside=config.intermediate_size,
    )
    dense = KINDS.get(config.model_type) == (grouped_attention, dense_layers)
    return own if dense and own.parameters <= LARGEST else SMOLLM2


def measured_spec(base: ClusterSpec, layer: MeasuredLayer = SMOLLM2) -> ClusterSpec:
    """The spec with this machine's cores, memory and rates, and the shares of a product that a layer reaches; a machine
    without GPUs."""
    import torch

    torch.set_num_threads(count_cores())
    rates = {
        "float32": _measure_matmul(torch, torch.float32),
        "bfloat16": _measure_matmul(torch, torch.bfloat16),
        "memory": _measure_copies(torch),
        "fresh": _measure_fresh_memory(torch),
        "calls": _measure_small_calls(torch),
    }
    machine = {"cores": count_cores(), "memory": machine_bytes()}
    # How much of a product a body reaches differs among machines and shapes, so it is measured, not taken from the base.
    data = base.model_dump() | {"name": "this-machine", "machines": 1, "machine": machine, "rates": rates}
    # Processes of one machine pass bytes on by copying them.
    data["factors"] |= measured_factors(torch, rates["float32"], layer)
    data["links"] |= {"inside": rates["memory"] / 2, "between": rates["memory"] / 2, "load": rates["memory"] / 2}
    return ClusterSpec.model_validate(data)


def measured_factors(torch: Any, rate: float, layer: MeasuredLayer) -> dict[str, dict[str, Any]]:
    """Shares of the float32 product that a layer reaches: whole rows forward, the same forward and backward, and one token of
    each of some sequences."""
    rows, batch = f"{LAYER_ROWS} rows of {LAYER_WIDE}", f"{LAYER_BATCH} rows of 1"
    rates = {
        "forward": (rows, _layer_rate(torch, layer, 1)),
        "backward": (rows, _layer_rate(torch, layer, 3)),
        "decode": (batch, _decode_rate(torch, layer)),
    }
    return {
        name: {
            "share": round(min(1.0, reached / rate), 3),
            "why": f"measured: a layer of {layer.whose}'s shape, {rows_text}, in float32: {reached / rate:.2f} of the product",
        }
        for name, (rows_text, reached) in rates.items()
    }


def _layer_rate(torch: Any, layer: MeasuredLayer, passes: int) -> float:
    """FLOP/s of a layer: forward, or with three passes' products forward and backward."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(out, of, generator=draw).mul_(0.02) for of, out in layer.products.values()]
    hidden_B_T_D = torch.randn(LAYER_ROWS, LAYER_WIDE, layer.hidden, generator=draw)
    for leaf in (*weights, hidden_B_T_D):
        leaf.requires_grad_(passes > 1)

    def run() -> None:
        made_B_T_D = _layer_forward(torch, layer, weights, hidden_B_T_D)
        if passes > 1:
            made_B_T_D.sum().backward()

    pairs = 2 * layer.queries * LAYER_WIDE / 2
    flops = 2 * LAYER_ROWS * LAYER_WIDE * (layer.parameters + pairs)
    with torch.set_grad_enabled(passes > 1):
        return float(passes * flops / _quickest_seconds(run))


def _layer_forward(torch: Any, layer: MeasuredLayer, weights: Sequence[Any], hidden_B_T_D: Any) -> Any:
    """[B, T, D] of one layer, without norms and positions."""
    q, k, v, o, gate, up, down = weights
    linear = torch.nn.functional.linear

    def split(projected_B_T_I: Any) -> Any:
        return projected_B_T_I.unflatten(-1, (-1, layer.head)).transpose(1, 2)

    looked_B_H_T_K = torch.nn.functional.scaled_dot_product_attention(
        split(linear(hidden_B_T_D, q)),
        split(linear(hidden_B_T_D, k)),
        split(linear(hidden_B_T_D, v)),
        is_causal=True,
        enable_gqa=True,
    )
    seen_B_T_D = hidden_B_T_D + linear(looked_B_H_T_K.transpose(1, 2).flatten(-2), o)
    inner_B_T_F = torch.nn.functional.silu(linear(seen_B_T_D, gate)) * linear(seen_B_T_D, up)
    return seen_B_T_D + linear(inner_B_T_F, down)


def _decode_rate(torch: Any, layer: MeasuredLayer) -> float:
    """FLOP/s of a layer's matrices with one token of each of `LAYER_BATCH` sequences."""
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(LAYER_BATCH, of, generator=draw), torch.randn(out, of, generator=draw))
        for of, out in layer.products.values()
    ]

    def run() -> None:
        for tokens_B_I, weight_O_I in pairs:
            torch.nn.functional.linear(tokens_B_I, weight_O_I)

    with torch.inference_mode():
        return 2 * LAYER_BATCH * layer.parameters / _quickest_seconds(run)


def cluster_spec(name_or_path: str | None, measure: Path | None, model_dir: Path) -> ClusterSpec:
    """The spec that a plan is made with: a named one, or this machine's, written to the file `measure`. Raises: ConfigError if both are
    given; as `load_spec` and `measure_to`."""
    if measure is None:
        return load_spec(name_or_path or DEFAULT)
    if name_or_path is not None:
        raise ConfigError.at(
            "--cluster",
            found=f"{name_or_path}, beside --measure {measure}",
            wanted="one of the two: the plan is made with what is measured",
            fix=f"leave one out; a measured machine is planned with again by --cluster {measure}",
        )
    return measure_to(measure, model_dir)


def measure_to(path: Path, model_dir: Path) -> ClusterSpec:
    """Measure this machine, with a layer of that student, and write its spec; overheads, lengths and the other factors of a file
    that is there stay as they are.

    Raises: StorageError, before anything is measured if the file's directory cannot be made; ConfigError if `path` is a
    directory, or in a file.
    """
    file = next((parent for parent in path.parents if parent.is_file()), None)
    if file or path.is_dir():
        problem = f"{file} is a file" if file else f"{path}, a directory"
        raise ConfigError.at(
            "--measure", found=problem, wanted="a file to write", fix="name another, such as here.yaml"
        )
    with raise_storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    spec = measured_spec(load_spec(str(path) if path.is_file() else DEFAULT), layer_of(model_dir))
    with raise_storage_errors(path):
        atomic_write_text(path, yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True), sort_keys=False))
    return spec


def _measure_matmul(torch: Any, dtype: Any) -> float:
    """FLOP/s of a matrix product, the best of one second's."""
    hidden_N_D, head_V_D = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(IDS, WIDTH).to(dtype)
    return 2 * ROWS * WIDTH * IDS / _quickest_seconds(lambda: hidden_N_D @ head_V_D.T)


def _measure_copies(torch: Any) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPIED, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED / _quickest_seconds(lambda: target.copy_(source))


def _measure_fresh_memory(torch: Any) -> float:
    """Bytes a second that are written to memory which is asked for each time."""
    return COPIED / _quickest_seconds(lambda: torch.empty(COPIED, dtype=torch.uint8).fill_(1))


def _measure_small_calls(torch: Any) -> float:
    """Small operations a second that one core begins: Python's part and torch's, no arithmetic worth the name."""
    row_1_D, square_D_D = torch.ones(1, SMALL), torch.ones(SMALL, SMALL)

    def multiply_rows() -> None:
        for _ in range(CALLS):
            torch.nn.functional.linear(row_1_D, square_D_D)

    with torch.inference_mode():
        return CALLS / _quickest_seconds(multiply_rows)


def _quickest_seconds(work: Callable[[], Any]) -> float:
    """Seconds of the quickest of the runs that a second has room for."""
    work()
    end, best = time.perf_counter() + SECONDS, float("inf")
    while time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best
