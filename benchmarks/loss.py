"""Time and peak extra memory of exact reverse KL from hidden states, forward and backward, several ways in one run.

    python benchmarks/loss.py --quick
    python benchmarks/loss.py --liger-python /tmp/benchenv/bin/python --json loss.json

Every measurement is a process of its own: it builds the same inputs from a seed, warms up on a few rows, and times one
forward and backward pass that leaves gradients for the hidden states and the head. Extra memory is the process's peak
resident size in that pass minus what was resident before it. A round measures every variant once, so a machine that
becomes slower slows all of them; figures are medians over rounds, ratios are taken within a round. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import add_dtype, machine, trim

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
ITEM = {"float32": 4, "bfloat16": 2}
QUICK = (2048, 64, 256)
MEMORY = ((49152, 576), (512, 1024, 2048, 4096, 8192))
MEMORY_QUICK = ((2048, 64), (512, 2048))
TRL_TILE = (4096, 32768)
"""Tokens and vocabulary rows of TRL's tile; fixed in its source (1.16)."""
LABELS = {
    "materialised": "materialised torch",
    "ours": "ours",
    "ours_compiled": "ours, compiled",
    "liger": "Liger chunked JSD",
    "liger_compiled": "Liger, compiled",
    "trl": "TRL chunked divergence",
}
PEERS = ("liger", "liger_compiled", "trl")


@dataclass(frozen=True)
class Case:
    """One measurement: T tokens of width d, V vocabulary rows, the teacher as wide as the student."""

    variant: str
    vocab: int
    width: int
    tokens: int
    dtype: str
    chunk: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.vocab, self.width, self.tokens


@dataclass
class Result:
    """Figures of one worker; `note` instead if it has none."""

    wall_s: float | None = None
    cpu_s: float | None = None
    warm_up_s: float | None = None
    peak_extra_bytes: int | None = None
    value: float | None = None
    """Mean KL(student || teacher), nats; the variants should agree."""
    grad_error: float | None = None
    """Error of the first hidden states' gradient, |got - float64 reference| / |reference|. Rounding to bfloat16 gives 0.0017."""
    note: str = ""


@dataclass
class Row:
    """One variant at one shape: medians over rounds."""

    case: Case
    estimate_bytes: int
    rounds: list[Result] = field(default_factory=list)
    time_ratio: float | None = None
    """Median over rounds of time by the materialised version's time in the same round."""

    def median(self, name: str) -> float | None:
        values = [getattr(r, name) for r in self.rounds if getattr(r, name) is not None]
        return statistics.median(values) if values else None

    @property
    def note(self) -> str:
        return next((r.note for r in self.rounds if r.note), "")


# ---- Worker: one measurement in a fresh process ----------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    hidden_T_D: Tensor
    head_V_D: Tensor
    teacher_hidden_T_D: Tensor
    teacher_head_V_D: Tensor
    token_T: Tensor

    def first(self, rows: int) -> Inputs:
        """The same heads and the first rows, as new leaves."""
        return Inputs(
            self.hidden_T_D[:rows].detach().clone().requires_grad_(),
            self.head_V_D,
            self.teacher_hidden_T_D[:rows],
            self.teacher_head_V_D,
            self.token_T[:rows],
        )


def make_inputs(case: Case) -> Inputs:
    """Logits of a spread of about 2; the teacher shares the head, its states are the student's with some noise."""
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    hidden = torch.randn(case.tokens, case.width, dtype=dtype)
    head = torch.randn(case.vocab, case.width, dtype=dtype).mul_(2 / case.width**0.5)
    noisy = hidden + 0.3 * torch.randn_like(hidden)
    token = torch.randint(case.vocab, (case.tokens,))
    return Inputs(hidden.requires_grad_(), head.requires_grad_(), noisy, head.detach().clone(), token)


def materialised(inputs: Inputs, case: Case) -> Tensor:
    """Compute the loss as one writes it first: all logits at once, autograd does the rest."""
    import torch

    logp_T_V = (inputs.hidden_T_D @ inputs.head_V_D.T).float().log_softmax(-1)
    with torch.no_grad():
        logq_T_V = (inputs.teacher_hidden_T_D @ inputs.teacher_head_V_D.T).float().log_softmax(-1)
    return (logp_T_V.exp() * (logp_T_V - logq_T_V)).sum(-1).mean()


def ours(inputs: Inputs, case: Case, **options: Any) -> Tensor:
    import torch

    from opd.losses.chunked import Loss, LossHead, Tokens
    from opd.losses.reverse_kl import ReverseKLConfig
    from opd.payloads.hidden_states import TeacherBlock

    num = len(inputs.token_T)
    loss = Loss(
        objective=ReverseKLConfig(kind="reverse_kl").build(), chunk=case.chunk, vocab_size=case.vocab, **options
    )
    tokens = Tokens(inputs.token_T, torch.full((num,), 1 / num), torch.zeros(num))
    teacher = TeacherBlock(inputs.teacher_hidden_T_D, inputs.teacher_head_V_D)
    value, _ = LossHead(inputs.head_V_D, loss)(inputs.hidden_T_D, tokens, [teacher])
    return value


def ours_compiled(inputs: Inputs, case: Case) -> Tensor:
    return ours(inputs, case, compiled=True)


def liger(inputs: Inputs, case: Case, compiled: bool = False) -> Tensor:
    loss = _peer("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(
        0.0, 1.0, beta=1.0, compiled=compiled, chunk_size=case.chunk
    )
    return loss(
        inputs.hidden_T_D,
        inputs.head_V_D,
        inputs.teacher_hidden_T_D,
        inputs.teacher_head_V_D,
        inputs.token_T,
    )


def liger_compiled(inputs: Inputs, case: Case) -> Tensor:
    return liger(inputs, case, compiled=True)


def trl(inputs: Inputs, case: Case) -> Tensor:
    """The loss of its stable DistillationTrainer; tiles of fixed size, float32 products on a CPU."""
    import torch

    loss, *_ = _peer("trl.trainer.distillation_trainer")._chunked_divergence_loss(
        inputs.hidden_T_D[None],
        inputs.teacher_hidden_T_D[None],
        inputs.head_V_D,
        inputs.teacher_head_V_D,
        torch.ones(1, len(inputs.token_T)),
        1.0,
    )
    return loss


VARIANTS: dict[str, Callable[[Inputs, Case], Tensor]] = {
    "materialised": materialised,
    "ours": ours,
    "ours_compiled": ours_compiled,
    "liger": liger,
    "liger_compiled": liger_compiled,
    "trl": trl,
}


class Unavailable(Exception):
    """A variant that cannot run here; the message goes into the table."""


def _peer(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = error.name == module.split(".")[0]
        raise Unavailable("not installed" if absent else f"cannot be imported: {error}") from None


def measure(case: Case) -> Result:
    """Warm up on as many rows as a chunk has (what is compiled has that shape), then one pass that counts."""
    run = VARIANTS[case.variant]
    inputs = make_inputs(case)
    started = time.perf_counter()
    run(inputs.first(min(case.chunk, case.tokens)), case).backward()
    warm_up_s = time.perf_counter() - started
    inputs.head_V_D.grad = None
    _reset_peak()
    before, wall, cpu = _resident_bytes(), time.perf_counter(), time.process_time()
    loss = run(inputs, case)
    loss.backward()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert inputs.hidden_T_D.grad is not None and inputs.head_V_D.grad is not None
    return Result(wall_s, cpu_s, warm_up_s, peak - before, float(loss.detach()), grad_error(inputs))


def grad_error(inputs: Inputs, rows: int = 8, block: int = 8192) -> float:
    """Relative error of the first rows' hidden gradient against float64, the head taken in blocks."""
    import torch

    assert inputs.hidden_T_D.grad is not None
    with torch.no_grad():
        spans = [slice(i, i + block) for i in range(0, len(inputs.head_V_D), block)]
        logp, logq = (
            torch.cat([hidden[:rows].double() @ head[span].double().T for span in spans], 1).log_softmax(-1)
            for hidden, head in (
                (inputs.hidden_T_D, inputs.head_V_D),
                (inputs.teacher_hidden_T_D, inputs.teacher_head_V_D),
            )
        )
        slope = logp.exp() * (logp - logq)
        by_logits = (slope - logp.exp() * slope.sum(-1, keepdim=True)) / len(inputs.token_T)
        wanted = sum(by_logits[:, span] @ inputs.head_V_D[span].double() for span in spans)
        assert isinstance(wanted, torch.Tensor)
        return float((inputs.hidden_T_D.grad[:rows].double() - wanted).norm() / wanted.norm())


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _reset_peak() -> None:
    """Give freed memory back and forget the peak of imports and warm-up, which ru_maxrss would otherwise still hold."""
    trim()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def worker(text: str) -> None:
    """Entry of a child process: a case as JSON in, a result as the last line out."""
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(ROOT))
    try:
        result = measure(Case(**json.loads(text)))
    except Unavailable as error:
        result = Result(note=str(error))
    except Exception as error:  # noqa: BLE001 - another library's failure is a line of the table
        result = Result(note=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
    print(json.dumps(asdict(result)))


# ---- Parent: never imports torch, for a child's ru_maxrss starts at its parent's size --------------------------------


def estimate_bytes(case: Case) -> int:
    """Rough peak of a pass, inputs included, to leave out what would not fit."""
    item, head = ITEM[case.dtype], case.vocab * case.width
    inputs = 2 * item * (head + case.tokens * case.width)
    if case.variant == "materialised":
        return inputs + case.tokens * case.vocab * (12 + 4 * item) + 2 * item * head
    if case.variant == "trl":
        rows, columns = min(case.tokens, TRL_TILE[0]), min(case.vocab, TRL_TILE[1])
        return inputs + 28 * rows * columns + 4 * case.tokens * case.width + (4 + item) * head
    return inputs + 40 * min(case.chunk, case.tokens) * case.vocab + (8 + item) * head


def run_case(case: Case, interpreter: str, threads: int, timeout_s: float) -> Result:
    """One measurement in a fresh process."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    command = [interpreter, str(Path(__file__).resolve()), "--worker", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Result(note=f"over {timeout_s:.0f} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return Result(note=f"exit status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:120]}")
    return Result(**json.loads(lines[-1]))


@dataclass(frozen=True)
class Plan:
    """Settings of a run, whatever it measures."""

    rounds: int
    threads: int
    budget_bytes: float
    liger_python: str
    timeout_s: float


def measure_group(cases: Sequence[Case], plan: Plan, say: Callable[[str], None]) -> list[Row]:
    """All variants of one shape, in turn, round after round."""
    rows = [Row(case, estimate_bytes(case)) for case in cases]
    for turn, row in itertools.product(range(plan.rounds), rows):
        row.rounds.append(_one(row, plan))
        _tell(row, turn, plan, say)
    base = next((r for r in rows if r.case.variant == "materialised"), None)
    for row in rows:
        row.time_ratio = _paired_ratio(row.rounds, base.rounds) if base else None
    return rows


def _one(row: Row, plan: Plan) -> Result:
    if row.estimate_bytes > plan.budget_bytes:
        return Result(note=f"skipped: about {row.estimate_bytes / 2**30:.1f} GiB")
    if row.note:
        return Result(note=row.note)
    interpreter = plan.liger_python if row.case.variant in PEERS else sys.executable
    return run_case(row.case, interpreter, plan.threads, plan.timeout_s)


def _tell(row: Row, turn: int, plan: Plan, say: Callable[[str], None]) -> None:
    last, case = row.rounds[-1], row.case
    what = last.note or f"{last.wall_s:.3f} s, +{(last.peak_extra_bytes or 0) / MIB:.0f} MiB"
    say(
        f"V={case.vocab} d={case.width} T={case.tokens} round {turn + 1}/{plan.rounds} {case.variant}: "
        f"{what} (load {os.getloadavg()[0]:.2f})"
    )


def _paired_ratio(rounds: Sequence[Result], base: Sequence[Result]) -> float | None:
    ratios = [a.wall_s / b.wall_s for a, b in zip(rounds, base, strict=True) if a.wall_s and b.wall_s]
    return statistics.median(ratios) if ratios else None


def memory_rows(case: Case, tokens: Sequence[int], plan: Plan, say: Callable[[str], None]) -> list[Row]:
    """Ours, eager and compiled, over T at one chunk: what does not grow with T, seen."""
    cases = [replace(case, variant=v, tokens=t) for v, t in itertools.product(("ours", "ours_compiled"), tokens)]
    rows = [Row(one, estimate_bytes(one)) for one in cases]
    for turn, row in itertools.product(range(plan.rounds), rows):
        row.rounds.append(_one(row, plan))
        _tell(row, turn, plan, say)
    return rows


# ---- Output ----------------------------------------------------------------------------------------------------------


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, form)


def _memory_ratio(row: Row, rows: Sequence[Row]) -> float | None:
    base = next((r for r in rows if r.case.variant == "materialised" and r.case.shape == row.case.shape), None)
    theirs, mine = base.median("peak_extra_bytes") if base else None, row.median("peak_extra_bytes")
    return mine / theirs if mine and theirs else None


def show_times(rows: Sequence[Row], console: Any) -> None:
    from rich.table import Table

    table = Table("V", "d", "T", "variant", title="Reverse KL from hidden states: forward + backward, medians")
    for name in ("wall s", "CPU s", "time / mat.", "extra MiB", "memory / mat.", "KL, nats", "dh error"):
        table.add_column(name, justify="right")
    for row, following in itertools.zip_longest(rows, rows[1:]):
        figures = (
            _number(row.median("wall_s"), ".3f"),
            _number(row.median("cpu_s"), ".3f"),
            _number(row.time_ratio, ".2f"),
            _number(row.median("peak_extra_bytes"), ".0f", MIB),
            _number(_memory_ratio(row, rows), ".2f"),
            _number(row.median("value"), ".5f"),
            _number(row.median("grad_error"), ".4f"),
        )
        label = LABELS[row.case.variant] + (f" ({row.note})" if row.note else "")
        ends = following is None or following.case.shape != row.case.shape
        table.add_row(*map(str, row.case.shape), label, *figures, end_section=ends)
    console.print(table)


def show_memory(rows: Sequence[Row], console: Any) -> None:
    """The rest: measured minus the hidden states' gradients (2 T d items) and the head's float32 sum and gradient."""
    from rich.table import Table

    first = rows[0].case
    head, item = first.vocab * first.width, ITEM[first.dtype]
    table = Table(
        "variant", "T", title=f"V={first.vocab}, d={first.width}, chunk {first.chunk}, {first.dtype}: extra MiB"
    )
    for name in ("measured", "2·T·d items", "head's sum and gradient", "rest", "T·V float32 would be"):
        table.add_column(name, justify="right")
    for row in rows:
        peak, states = row.median("peak_extra_bytes"), 2 * item * row.case.tokens * first.width
        rest = None if peak is None else peak - states - (4 + item) * head
        table.add_row(
            LABELS[row.case.variant] + (f" ({row.note})" if row.note else ""),
            str(row.case.tokens),
            _number(peak, ".0f", MIB),
            _number(states, ".1f", MIB),
            _number((4 + item) * head, ".0f", MIB),
            _number(rest, ".0f", MIB),
            _number(4 * row.case.tokens * first.vocab, ".0f", MIB),
        )
    console.print(table)


def _record(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    medians = {name: row.median(name) for name in ("wall_s", "cpu_s", "warm_up_s", "peak_extra_bytes")}
    return asdict(row) | {"median": medians, "memory_ratio": _memory_ratio(row, rows), "note": row.note}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time and peak extra memory of exact reverse KL; never a verdict.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one small shape, one round")
    add_dtype(parser, "of hidden states and heads")
    add("--rounds", type=int, default=3, help="every variant once per round")
    add("--chunk", type=int, default=512, help="tokens a chunk, ours and Liger's")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads")
    add("--memory-gib", type=float, default=12.0, help="leave out what is estimated above")
    add("--variants", nargs="+", choices=LABELS, default=list(LABELS), help="which to measure")
    add("--vocab", nargs="+", type=int, default=[49152, 151936], help="V, rows of the head")
    add("--width", nargs="+", type=int, default=[576, 2048], help="d, student's and teacher's")
    add("--tokens", nargs="+", type=int, default=[512, 1024, 4096], help="T, response tokens of a micro-batch")
    add("--liger-python", default=sys.executable, help="interpreter that has liger-kernel and trl")
    add("--timeout-s", type=float, default=900.0, help="bound on one measurement")
    add("--json", type=Path, help="write all figures here")
    return parser.parse_args()


def write_json(
    path: Path | None, facts: dict[str, Any], plan: Plan, rows: Sequence[Row], memory: Sequence[Row]
) -> None:
    """All figures so far: a long run that is interrupted keeps what it has."""
    facts["load_after"] = os.getloadavg()
    figures = {
        "machine": facts,
        "plan": asdict(plan),
        "shapes": [_record(r, rows) for r in rows],
        "memory": [_record(r, ()) for r in memory],
    }
    if path:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    from rich.console import Console

    args = parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    say = Console(stderr=True, highlight=False).print
    plan = Plan(
        1 if args.quick else args.rounds, args.threads, args.memory_gib * 2**30, args.liger_python, args.timeout_s
    )
    facts = machine(args.threads, "torch")
    rows: list[Row] = []
    shapes: Iterable[tuple[int, int, int]] = itertools.product(args.vocab, args.width, args.tokens)
    for shape in [QUICK] if args.quick else shapes:
        cases = [Case(name, *shape, dtype=args.dtype, chunk=args.chunk) for name in args.variants]
        rows += measure_group(cases, plan, say)
        write_json(args.json, facts, plan, rows, [])
    (vocab, width), lengths = MEMORY_QUICK if args.quick else MEMORY
    memory = memory_rows(Case("ours", vocab, width, 0, args.dtype, args.chunk), lengths, plan, say)
    write_json(args.json, facts, plan, rows, memory)
    if rows:
        show_times(rows, console)
    show_memory(memory, console)
    console.print(f"{args.dtype}, chunk {args.chunk}, {plan.rounds} round(s); {facts}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        main()
