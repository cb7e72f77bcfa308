"""Layouts on a GPU: with its attention kernels, do sequences of one row stay apart?

Tiny random models of the families of `tests/models`, each layout of `opd.models.layouts` with each attention implementation that
is installed. What is measured is what a run measures at its start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.check import Check, is_here
from opd.machine.devices import to_device
from opd.models.layouts import (
    ALONE_TOLERANCE,
    NEIGHBOUR_TOLERANCE,
    Packed,
    list_candidate_layouts,
    measure_layout_differences,
)
from opd.models.varlen import VARLEN, has_varlen_kernel, register_attention
from opd.models.weights import choose_attention
from tests.models.families import FAMILIES, Family, build_config

QUICK = ("Llama", "Qwen3-Next", "LFM2")


def measure(check: Check) -> None:
    """Every family in float32 and bfloat16."""
    kernels = ["sdpa"]
    if check.device != "cuda":
        check.leave_out("flash_attention_2", "it runs on GPUs only")
    elif not is_here("flash_attn"):
        check.leave_out("flash_attention_2", "the package flash-attn is not installed")
    else:
        kernels.append("flash_attention_2")
    if has_varlen_kernel(torch.device(check.device), torch.bfloat16):
        kernels.append(register_attention())
    else:
        check.leave_out(VARLEN, "torch's attention by lengths does not run here")
    if not (is_here("fla") and is_here("causal_conv1d")):
        absent = [name for name in ("fla", "causal_conv1d", "mamba_ssm") if not is_here(name)]
        check.leave_out("fused kernels of recurrent layers", f"not installed: {', '.join(absent)}; torch's own run")
    for name in QUICK if check.quick else FAMILIES:
        for dtype in ("float32", "bfloat16"):
            for kernel in kernels:
                if kernel == "sdpa" or dtype == "bfloat16":  # the others know no float32
                    _family(check, name, dtype, kernel)


def _family(check: Check, name: str, dtype: str, kernel: str) -> None:
    if not check.in_time(f"{name}, {dtype}, {kernel}", 0 if check.quick else 5):
        return
    row: dict[str, Any] = {"family": name, "dtype": dtype, "kernel": kernel}
    try:
        row |= _layouts(FAMILIES[name], getattr(torch, dtype), kernel, check.device)
    except Exception as error:  # noqa: BLE001 - what an architecture cannot do is a line of the table
        row["note"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    check.add("together against alone", **row)


def _layouts(family: Family, dtype: torch.dtype, kernel: str, device: str) -> dict[str, Any]:
    """Each layout's difference from alone, and the first that passes; those after it are not tried."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = build_config(family)
    if kernel == VARLEN and choose_attention(config, torch.device(device), dtype) != VARLEN:
        return {"chosen": "not tried: a layer has a window or a kernel of its own"}
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel).to(device).eval()

    def body(laid_out: Packed) -> Tensor:
        return model.base_model(**to_device(laid_out, device).inputs()).last_hidden_state.flatten(0, 1)

    found: dict[str, Any] = {}
    for layout in list_candidate_layouts(share=False, varlen=kernel == VARLEN):
        try:
            alone, neighbour = measure_layout_differences(body, layout, config.vocab_size)
            found |= {layout: alone, f"{layout}, other neighbours": neighbour}
            passes = alone <= ALONE_TOLERANCE[dtype] and neighbour <= NEIGHBOUR_TOLERANCE
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            found[layout], passes = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}", False
        if passes:
            return {"chosen": layout, **found}
    return {"chosen": "none", **found}
