"""The loss on a GPU: how long does it take, how much memory beyond its inputs, how many kernels, is its gradient right?

The variants are those of `benchmarks/loss.py`, all in one process: CUDA events time, torch's allocator counts bytes, its profiler
kernels. First comes the shape of a 7B student, beside all logits at once and Liger.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.check import Check
from benchmarks.gpu.work import measured
from opd.losses.adaptive_kl import AdaptiveKLConfig
from opd.losses.blocks import Block
from opd.losses.chunked import Loss, LossHead, Tokens
from opd.losses.forward_kl import ForwardKLConfig
from opd.losses.jsd import JSDConfig
from opd.losses.reverse_kl import ReverseKLConfig
from opd.losses.sampled import SampledConfig
from opd.losses.skew import SkewConfig
from opd.losses.top_k import TopKConfig
from opd.payloads.hidden_states import TeacherBlock
from opd.payloads.sampled_logprobs import SampledBlock
from opd.payloads.top_k import TopKBlock

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where `python benchmarks/loss.py` finds its helper

from loss import VARIANTS, Case, Inputs, Unavailable, grad_error, make_inputs

CHUNK = 1024
CHUNKS = (128, 256, 512, 1024, 2048, 4096)
VOCAB, WIDTH, TOKENS = (32768, 151936), (1024, 2048, 4096), (2048, 8192)
DTYPES = ("bfloat16", "float32")
LARGEST_FIRST = ("materialised", "ours_compiled", "ours", "liger", "liger_compiled", "trl")
"""Variants in the order in which the largest shape is measured."""
TIMED = 5
SMALL = (96, 512, 64)
"""T, V, D of the case whose gradients are held against float64."""


def measure(check: Check) -> None:
    """The largest shape with all variants, then with our chunk lengths; gradients; the other shapes."""
    largest, *others = _shapes(check.quick)
    for variant in LARGEST_FIRST:
        _time(check, "time and memory", _case(variant, largest))
    for variant, chunk in itertools.product(("ours_compiled", "ours"), CHUNKS):
        _time(check, "our chunk length", _case(variant, largest, chunk))
    for dtype, (name, config) in itertools.product(DTYPES, _objectives().items()):
        if check.in_time(f"gradients of {name}, {dtype}", 0 if check.quick else 10):
            errors = _gradient_errors(config, dtype, check)
            check.add("gradients against float64", objective=name, dtype=dtype, **errors)
    # What compiles takes half a minute for a new shape: first what does not, at every shape.
    compiled = [variant for variant in VARIANTS if variant.endswith("_compiled")]
    for variants in ([v for v in VARIANTS if v not in compiled], *([v] for v in compiled)):
        for shape, variant in itertools.product(others, variants):
            _time(check, "time and memory", _case(variant, shape))


def _case(variant: str, shape: tuple[tuple[int, int, int], str], chunk: int = CHUNK) -> Case:
    sizes, dtype = shape
    return Case(variant, *sizes, dtype=dtype, chunk=chunk)


def _shapes(quick: bool) -> Iterator[tuple[tuple[int, int, int], str]]:
    """(V, D, T) and type; the largest first, in case the time runs out."""
    if quick:
        yield from (((512, 64, 256), dtype) for dtype in DTYPES)
        return
    for dtype, tokens, width, vocab in itertools.product(DTYPES, TOKENS[::-1], WIDTH[::-1], VOCAB[::-1]):
        yield (vocab, width, tokens), dtype


def _time(check: Check, table: str, case: Case) -> None:
    what = f"{case.variant}, V={case.vocab} D={case.width} T={case.tokens} {case.dtype}, chunk {case.chunk}"
    if not check.in_time(what, 45 if "compiled" in case.variant and not check.quick else 5):
        return
    row: dict[str, Any] = {
        "variant": case.variant, "V": case.vocab, "D": case.width, "T": case.tokens,
        "dtype": case.dtype, "chunk": case.chunk,
    }  # fmt: skip
    if case.variant.endswith("_compiled") and table == "time and memory":
        torch._dynamo.reset()  # a run has one vocabulary; after eight shapes torch would go on without compiling
    try:
        row |= _figures(case, check)
    except Unavailable as error:
        check.leave_out(case.variant, str(error))
        return
    except Exception as error:  # noqa: BLE001 - another library's failure is a line of the table
        row["note"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    check.add(table, **row)
    if check.device == "cuda":
        torch.cuda.empty_cache()


def _figures(case: Case, check: Check) -> dict[str, Any]:
    with torch.device(check.device):
        inputs = make_inputs(case)
        with measured(check.device) as warm_up:
            _pass(case, inputs)
        spans = []
        for _ in range(1 if check.quick else TIMED):
            inputs.hidden_T_D.grad = inputs.head_V_D.grad = None
            with measured(check.device) as span:
                value = _pass(case, inputs)
            spans.append(span)
        return {
            "ms": 1000 * statistics.median(span.seconds for span in spans),
            "extra_bytes": spans[0].extra_bytes,
            "warm_up_ms": 1000 * warm_up.seconds,
            "value": value,
            "gradient_error": grad_error(inputs),
            "kernels": _count_kernels(case, inputs, check),
        }


def _count_kernels(case: Case, inputs: Inputs, check: Check) -> int | None:
    """Kernels and copies of one pass, by torch's profiler; None on a CPU."""
    if check.device != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _pass(case, inputs)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def _pass(case: Case, inputs: Inputs) -> float:
    loss = VARIANTS[case.variant](inputs, case)
    loss.backward()
    return float(loss.detach())


# ---- Gradients -------------------------------------------------------------------------------------------------------


def _objectives() -> dict[str, Any]:
    return {
        "reverse_kl": ReverseKLConfig(kind="reverse_kl"),
        "forward_kl": ForwardKLConfig(kind="forward_kl"),
        "adaptive_kl": AdaptiveKLConfig(kind="adaptive_kl"),
        "jsd": JSDConfig(kind="jsd"),
        "skew": SkewConfig(kind="skew"),
        "sampled": SampledConfig(kind="sampled"),
        "top_k": TopKConfig(kind="top_k", k=16),
        "reverse_kl, compiled": ReverseKLConfig(kind="reverse_kl", compile=True),
        "reverse_kl, eager": ReverseKLConfig(kind="reverse_kl", compile=False),
    }


def _gradient_errors(config: Any, dtype: str, check: Check) -> dict[str, float]:
    """Relative errors of this device's gradients, the inputs rounded to `dtype`: the reference starts from these.

    The reference is float64 on the CPU; of reverse KL by autograd through all logits, of the others by the same code,
    which the unit tests hold against finite differences.
    """
    inputs = make_inputs(Case("ours", SMALL[1], SMALL[2], SMALL[0], dtype=dtype, chunk=40))
    wanted = _gradients(config, inputs, "cpu", torch.float64)
    if isinstance(config, ReverseKLConfig):
        wanted = _by_autograd(inputs)
    found = _gradients(config, inputs, check.device, getattr(torch, dtype))
    errors = [
        float((f.double().cpu() - w.double()).norm() / w.double().norm()) for f, w in zip(found, wanted, strict=True)
    ]
    return {"hidden_error": errors[0], "head_error": errors[1]}


def _gradients(config: Any, inputs: Inputs, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    hidden, head, teacher_hidden, teacher_head = (
        t.detach().to(device, dtype)
        for t in (inputs.hidden_T_D, inputs.head_V_D, inputs.teacher_hidden_T_D, inputs.teacher_head_V_D)
    )
    hidden.requires_grad_()
    head.requires_grad_()
    token_N = inputs.token_T.to(device)
    weight_N = torch.full((len(token_N),), 1 / len(token_N), device=device, dtype=torch.float64).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    block = _block(config, teacher_hidden, teacher_head, token_N)
    compiled = config.compile if dtype != torch.float64 else False
    loss = Loss(objective=config.build(), chunk=40, vocab_size=len(head), compiled=compiled)
    tokens = Tokens(token_N, weight_N, torch.zeros_like(weight_N))
    value, _ = LossHead(head, loss)(hidden, tokens, [block])
    value.backward()
    assert hidden.grad is not None and head.grad is not None
    return hidden.grad, head.grad


def _block(config: Any, hidden_N_D: Tensor, head_V_D: Tensor, token_N: Tensor) -> Block:
    if config.kind not in ("sampled", "top_k"):
        return TeacherBlock(hidden_N_D, head_V_D)
    logq_N_V = (hidden_N_D.double() @ head_V_D.double().T).log_softmax(-1)
    if config.kind == "sampled":
        return SampledBlock(logq_N_V.gather(1, token_N[:, None])[:, 0])
    top = logq_N_V.topk(config.k, dim=-1)
    return TopKBlock(top.indices, top.values)


def _by_autograd(inputs: Inputs) -> tuple[Tensor, Tensor]:
    hidden, head = (t.detach().double().requires_grad_() for t in (inputs.hidden_T_D, inputs.head_V_D))
    logp_T_V = (hidden @ head.T).log_softmax(-1)
    logq_T_V = (inputs.teacher_hidden_T_D.double() @ inputs.teacher_head_V_D.double().T).log_softmax(-1)
    (logp_T_V.exp() * (logp_T_V - logq_T_V)).sum(-1).mean().backward()
    assert hidden.grad is not None and head.grad is not None
    return hidden.grad, head.grad
