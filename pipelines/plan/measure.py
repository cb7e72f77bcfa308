"""Measure the rates of this machine for `opd plan --measure`: by a matrix product, a copy, small calls, and a layer of the student."""

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
"""Sizes of the matrix product: states times the output head of a model such as SmolLM2. The factors of two-cores are shares of its rate."""
COPIED = 128 << 20
"""Bytes of one copy: more than a processor's cache holds."""
LAYER_ROWS, LAYER_WIDTH, LAYER_BATCH = 13, 128, 64
"""Rows, and tokens of each, in a pass of the layer forward and backward; sequences in a decode step of an engine."""
LARGEST = 50_000_000
"""Most parameters of a layer that is measured: a larger one takes seconds for a pass."""
SMALL, CALLS = 8, 1000
"""Width of the small operation, the product of one row and a square matrix; and how many of them are timed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer:
    """The sizes of a dense decoder layer, on which its time depends."""

    whose: str
    """The model that has the layer, for people."""
    hidden: int
    queries: int
    """Width of the queries of all heads."""
    keys: int
    """Width of the keys of all heads, and of the values."""
    head: int
    """Width of one head."""
    inside: int
    """Width of the feed-forward block."""

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each matrix, in the order in which `_layer_forward` takes them."""
        ends = {"q_proj": (self.hidden, self.queries), "k_proj": (self.hidden, self.keys)}
        ends |= {"v_proj": (self.hidden, self.keys), "o_proj": (self.queries, self.hidden)}
        ends |= {"gate_proj": (self.hidden, self.inside), "up_proj": (self.hidden, self.inside)}
        return ends | {"down_proj": (self.inside, self.hidden)}

    @property
    def parameters(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.products.values())


SMOLLM2 = MeasuredLayer(whose="SmolLM2", hidden=576, queries=576, keys=192, head=64, inside=1536)
"""The layer that is measured if the student's own is not dense, or too large."""


def choose_layer(model_dir: Path) -> MeasuredLayer:
    """Return the student's own layer, or SmolLM2's if that is not dense or too large. Raises: as `read_config`."""
    config = read_config(model_dir)
    heads = config.num_attention_heads
    head = config.head_dim or config.hidden_size // heads
    student_layer = MeasuredLayer(
        whose="the student",
        hidden=config.hidden_size,
        queries=heads * head,
        keys=(config.num_key_value_heads or heads) * head,
        head=head,
        inside=config.intermediate_size,
    )
    dense = KINDS.get(config.model_type) == (grouped_attention, dense_layers)
    return student_layer if dense and student_layer.parameters <= LARGEST else SMOLLM2


def measured_spec(base: ClusterSpec, layer: MeasuredLayer = SMOLLM2) -> ClusterSpec:
    """Measure this machine, and return `base` with its cores, memory and rates, and with the shares of a matrix product's rate that the
    layer reaches. The machine counts as one without GPUs."""
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
    data = base.model_dump() | {"name": "this-machine", "machines": 1, "machine": machine, "rates": rates}
    # The shares differ among machines and shapes, so they are measured too, not taken from the base.
    data["factors"] |= measured_factors(torch, rates["float32"], layer)
    # Processes of one machine pass bytes on by copying them; `memory` counts the bytes read and those written.
    data["links"] |= {"inside": rates["memory"] / 2, "between": rates["memory"] / 2, "load": rates["memory"] / 2}
    return ClusterSpec.model_validate(data)


def measured_factors(torch: Any, rate: float, layer: MeasuredLayer) -> dict[str, dict[str, Any]]:
    """Return the factors `forward`, `backward` and `decode`: shares of `rate`, the FLOP/s of the float32 product, that the layer reaches
    with whole rows forward, with the same forward and backward, and with one token of each of some sequences."""
    rows, batch = f"{LAYER_ROWS} rows of {LAYER_WIDTH}", f"{LAYER_BATCH} rows of 1"
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
    """Return the FLOP/s of a layer: forward if `passes` is 1, forward and backward if it is 3, since a backward pass has the products of
    two forward passes."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(outputs, inputs, generator=draw).mul_(0.02) for inputs, outputs in layer.products.values()]
    hidden_B_T_D = torch.randn(LAYER_ROWS, LAYER_WIDTH, layer.hidden, generator=draw)
    for leaf in (*weights, hidden_B_T_D):
        leaf.requires_grad_(passes > 1)

    def run() -> None:
        output_B_T_D = _layer_forward(torch, layer, weights, hidden_B_T_D)
        if passes > 1:
            output_B_T_D.sum().backward()

    # A token looks at half of its row on average: queries with keys, and weights with values.
    pairs = 2 * layer.queries * LAYER_WIDTH / 2
    flops = 2 * LAYER_ROWS * LAYER_WIDTH * (layer.parameters + pairs)
    with torch.set_grad_enabled(passes > 1):
        return float(passes * flops / _quickest_seconds(run))


def _layer_forward(torch: Any, layer: MeasuredLayer, weights: Sequence[Any], hidden_B_T_D: Any) -> Any:
    """Return the [B, T, D] output of one layer, without norms and positions."""
    q, k, v, o, gate, up, down = weights
    linear = torch.nn.functional.linear

    def split_heads(projected_B_T_I: Any) -> Any:
        return projected_B_T_I.unflatten(-1, (-1, layer.head)).transpose(1, 2)

    attended_B_H_T_K = torch.nn.functional.scaled_dot_product_attention(
        split_heads(linear(hidden_B_T_D, q)),
        split_heads(linear(hidden_B_T_D, k)),
        split_heads(linear(hidden_B_T_D, v)),
        is_causal=True,
        enable_gqa=True,
    )
    residual_B_T_D = hidden_B_T_D + linear(attended_B_H_T_K.transpose(1, 2).flatten(-2), o)
    inner_B_T_F = torch.nn.functional.silu(linear(residual_B_T_D, gate)) * linear(residual_B_T_D, up)
    return residual_B_T_D + linear(inner_B_T_F, down)


def _decode_rate(torch: Any, layer: MeasuredLayer) -> float:
    """Return the FLOP/s of a layer's matrices with one token of each of `LAYER_BATCH` sequences."""
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(LAYER_BATCH, inputs, generator=draw), torch.randn(outputs, inputs, generator=draw))
        for inputs, outputs in layer.products.values()
    ]

    def run() -> None:
        for tokens_B_I, weight_O_I in pairs:
            torch.nn.functional.linear(tokens_B_I, weight_O_I)

    with torch.inference_mode():
        return 2 * LAYER_BATCH * layer.parameters / _quickest_seconds(run)


def cluster_spec(name_or_path: str | None, measure: Path | None, model_dir: Path) -> ClusterSpec:
    """Return the spec that a plan is made with: a named one, or this machine's, which is also written to the file `measure`.

    Raises: ConfigError if both are named; as `load_spec` and `measure_to`.
    """
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
    """Measure this machine with a layer of the student in `model_dir`, write its spec to a file and return it. If the file is there, its
    overheads, its lengths and its other factors stay as they are.

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
    spec = measured_spec(load_spec(str(path) if path.is_file() else DEFAULT), choose_layer(model_dir))
    with raise_storage_errors(path):
        atomic_write_text(path, yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True), sort_keys=False))
    return spec


def _measure_matmul(torch: Any, dtype: Any) -> float:
    """Return the FLOP/s of the quickest matrix product within a second."""
    hidden_N_D, head_V_D = torch.randn(ROWS, WIDTH).to(dtype), torch.randn(IDS, WIDTH).to(dtype)
    return 2 * ROWS * WIDTH * IDS / _quickest_seconds(lambda: hidden_N_D @ head_V_D.T)


def _measure_copies(torch: Any) -> float:
    """Return the bytes a second that a copy reads and writes, together."""
    source = torch.ones(COPIED, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * COPIED / _quickest_seconds(lambda: target.copy_(source))


def _measure_fresh_memory(torch: Any) -> float:
    """Return the bytes a second that are written to memory which is asked for anew each time."""
    return COPIED / _quickest_seconds(lambda: torch.empty(COPIED, dtype=torch.uint8).fill_(1))


def _measure_small_calls(torch: Any) -> float:
    """Return the small operations a second that one core begins. They are too small for their arithmetic to matter: this is the time of
    Python and torch."""
    row_1_D, square_D_D = torch.ones(1, SMALL), torch.ones(SMALL, SMALL)

    def multiply_rows() -> None:
        for _ in range(CALLS):
            torch.nn.functional.linear(row_1_D, square_D_D)

    with torch.inference_mode():
        return CALLS / _quickest_seconds(multiply_rows)


def _quickest_seconds(work: Callable[[], Any]) -> float:
    """Return the seconds of the quickest run of `work`, of as many as fit into `SECONDS`."""
    work()
    end, best = time.perf_counter() + SECONDS, float("inf")
    while time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best
