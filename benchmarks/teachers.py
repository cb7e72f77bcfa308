"""Measure what the hundredth expert costs: time per scored token, memory, swaps, bytes and disk of a scoring worker with N experts.

    python benchmarks/teachers.py --quick
    python benchmarks/teachers.py --json teachers.json

Every line of the table is a real `TeacherWorker` in a process of its own, with N full fine-tunes of one model (files of
their own, other bytes) or N LoRA adapters of it. Every step gives each expert equally many rows, so a step is N times as
long. All processes stay and take their steps in turn: a round is one step of each, ratios are taken within a round,
figures are medians over rounds. Peak memory is the process's largest resident size in a step minus what was resident
before it saw its first expert, when a throwaway worker had scored with a one-layer model; what a step's tokens take, with
any number of experts, is known from a step in which the first expert alone scored the rows of all. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import selectors
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import machine, score, trim

from opd.cluster.environment import SPIN_SETTINGS
from opd.text import format_or_dash

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
KINDS = ("full", "lora")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 16
SAMPLE_S = 0.005
"""Pause between two looks at a process's memory."""
MMAP_BYTES = 128 * 1024
"""Left alone, glibc raises this limit as large blocks are freed: processes with long steps then become a quarter faster
and hold more memory than those with short ones, whatever their experts."""
DEADLINE_S = 600.0
"""Deadline of one answer of a process."""
TIME_TARGETS = {16: 1.10, 64: 1.25}
"""Number of experts -> wanted ratio of time to one expert, at most. Both targets are only shown, never judged."""
MEMORY_TARGET = 1.15
"""Wanted ratio of peak memory, at most, to that of one expert with the same rows plus the budget or further adapters."""
SIZES = {
    "default": {"hidden": 192, "intermediate": 1024, "layers": 8, "vocab": 8192},
    "quick": {"hidden": 64, "intermediate": 256, "layers": 4, "vocab": 512},
}


@dataclass(frozen=True)
class Case:
    """One process: so many experts of a kind under a budget."""

    kind: str
    experts: int
    budget: float
    """`teachers.memory` in full models; 0 means a byte, under which only what is in use may stay."""
    folder: str
    """Holds `full-000`, `lora-000` ... and `throwaway`."""
    rows: int
    prompt: int
    response: int
    dtype: str
    payload: str


@dataclass
class Step:
    """One call of `TeacherWorker.score`; memory in bytes, over what was resident before the first expert."""

    wall_s: float
    cpu_s: float
    loads: int
    swap_s: list[float]
    """Seconds from a teacher's last batch to the next teacher's weights in the skeleton, for each teacher that was swapped in."""
    stream_bytes: int
    peak_bytes: int
    anon_bytes: int = 0
    """Largest anonymous part seen, and largest part of mapped files; not necessarily at one time."""
    file_bytes: int = 0


@dataclass
class Ready:
    """A process that has described all its experts."""

    before: dict[str, int]
    """Memory before the first expert, as `memory` gives it."""
    alone: Step
    """All rows scored by the first expert, when no other had been loaded."""
    describe_s: float | None
    """Load, check and hash of one expert, mean over all but the first; once in a run."""
    budget_bytes: int
    expert_bytes: int
    """Weight files of one full model, and of one adapter."""
    adapter_bytes: int
    disk_bytes: int
    """All weight files of the case's experts."""


@dataclass
class Row:
    case: Case
    ready: Ready
    steps: list[Step] = field(default_factory=list)
    time_ratio: float | None = None
    cpu_ratio: float | None = None

    @property
    def memory_ratio(self) -> float:
        """Peak memory relative to that of one expert with the same rows plus what the other experts may add."""
        return self.median(lambda s: s.peak_bytes) / (self.ready.alone.peak_bytes + self.allowed_bytes)

    @property
    def allowed_bytes(self) -> int:
        """The budgeted cache of full models, the other adapters of a LoRA set."""
        if self.case.kind == "lora":
            return (self.case.experts - 1) * self.ready.adapter_bytes
        return self.ready.budget_bytes if self.case.experts > 1 else 0

    @property
    def scored(self) -> int:
        """Tokens that go through a teacher in a step, prompts included."""
        return self.case.experts * self.case.rows * (self.case.prompt + self.case.response)

    def median(self, figure: Callable[[Step], float]) -> float:
        return statistics.median(figure(step) for step in self.steps)

    @property
    def swap_s(self) -> float | None:
        swaps = [s for step in self.steps for s in step.swap_s]
        return statistics.median(swaps) if swaps else None


# ---- Files -----------------------------------------------------------------------------------------------------------


def write_experts(folder: Path, model_dir: Path | None, full: int, lora: int, size: dict[str, int]) -> None:
    """`full` models, the first of which is the base of `lora` adapters; every tensor differs from expert to expert."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    base = folder / "full-000"
    if model_dir is None:
        _random_model(base, size)
    else:
        shutil.copytree(model_dir, base)
    _random_model(folder / "throwaway", {**SIZES["quick"], "layers": 1})
    shards = {path.name: load_file(path) for path in sorted(base.glob("*.safetensors"))}
    for index in range(1, full):
        expert = folder / f"full-{index:03}"
        shutil.copytree(base, expert, ignore=shutil.ignore_patterns("*.safetensors"))
        for name, tensors in shards.items():
            changed = {n: t * torch.empty_like(t).uniform_(0.99, 1.01) for n, t in tensors.items()}
            save_file(changed, expert / name, {"format": "pt"})
    weights = {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}
    for index in range(lora):
        _random_adapter(folder / f"lora-{index:03}", base, weights)


def _random_model(path: Path, size: dict[str, int]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["intermediate"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["hidden"] // 32,
        num_key_value_heads=size["hidden"] // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def _random_adapter(path: Path, base: Path, weights: dict[str, Any]) -> None:
    """Rank 16 on every linear layer, as PEFT writes it."""
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(LINEAR):
            outputs, inputs = weight.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = 0.02 * torch.randn(RANK, inputs, dtype=weight.dtype)
            tensors[f"base_model.model.{module}.lora_B.weight"] = 0.02 * torch.randn(outputs, RANK, dtype=weight.dtype)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "target_modules": LINEAR, "r": RANK}
    (path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * RANK}))


def weight_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


# ---- Worker: one case in a fresh process -----------------------------------------------------------------------------


def work(text: str) -> None:
    """Entry of a child process: a case as JSON; for the first line that comes in it describes its experts, for every
    other it takes a step. A line of JSON out for each."""
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(ROOT))
    scoring = Scoring(Case(**json.loads(text)))
    for turn, _ in enumerate(sys.stdin):
        print(json.dumps(asdict(scoring.step() if turn else scoring.describe())), flush=True)


class Scoring:
    """A scoring worker and the groups of its step."""

    def __init__(self, case: Case) -> None:
        from transformers import AutoConfig

        from opd.records.types import Teacher

        folder = Path(case.folder)
        full, adapter = folder / "full-000", folder / "lora-000"
        small = SIZES["quick"]["vocab"]
        throwaway = Teacher(name="throwaway", model_dir=folder / "throwaway")
        list(score(_worker(case, 1, small), [(throwaway, 1.0, tuple(make_rollouts(case, "throwaway", small)))]))
        vocab_size = AutoConfig.from_pretrained(full).get_text_config(decoder=True).vocab_size
        teachers = [
            Teacher(name=f"e{i}", model_dir=full, adapter_dir=folder / f"lora-{i:03}")
            if case.kind == "lora"
            else Teacher(name=f"e{i}", model_dir=folder / f"full-{i:03}")
            for i in range(case.experts)
        ]
        self._groups = [(t, 1.0, tuple(make_rollouts(case, t.name, vocab_size))) for t in teachers]
        self._budget_bytes = max(1, round(case.budget * held_bytes(full, case.dtype)))
        self._swaps: list[float] = []
        self._worker = _worker(case, self._budget_bytes, vocab_size)
        self._time_swaps()
        expert_bytes, adapter_bytes = weight_bytes(full), weight_bytes(adapter)
        self._disk = {
            "expert_bytes": expert_bytes,
            "adapter_bytes": adapter_bytes,
            "disk_bytes": expert_bytes + case.experts * adapter_bytes
            if case.kind == "lora"
            else case.experts * expert_bytes,
        }
        trim_all()
        self._before = memory()

    def describe(self) -> Ready:
        """Score all rows with the first expert; then load, check and hash every expert, and score a row with each."""
        first = self._groups[0][0]
        list(score(self._worker, [(first, 1.0, self._groups[0][2])]))
        alone = self._measured([(first, weight, rows) for _, weight, rows in self._groups])
        started, others = time.perf_counter(), self._groups[1:]
        for teacher, _, _ in others:
            self._worker.describe_head(teacher)
        describe_s = (time.perf_counter() - started) / len(others) if others else None
        list(score(self._worker, [(teacher, weight, rows[:1]) for teacher, weight, rows in self._groups]))
        return Ready(self._before, alone, describe_s, self._budget_bytes, **self._disk)

    def step(self) -> Step:
        """Every expert scores its rows."""
        return self._measured(self._groups)

    def _measured(self, groups: Sequence[Any]) -> Step:
        scorer: Any = self._worker._scorer
        self._swaps.clear()
        loads = scorer._weights.loads
        trim_all()
        reset_peak()
        started, cpu = time.perf_counter(), time.process_time()
        nbytes = sum(part.nbytes for part in score(self._worker, groups))
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        peak = memory()["VmHWM"] - self._before["VmRSS"]
        return Step(wall_s, cpu_s, scorer._weights.loads - loads, list(self._swaps), nbytes, peak)

    def _time_swaps(self) -> None:
        """Stand before the scorer's own `_load` with a watch."""
        scorer: Any = self._worker._scorer
        load = scorer._load_teacher

        def timed(teacher: Any) -> None:
            before, started = scorer._loaded_key, time.perf_counter()
            load(teacher)
            if scorer._loaded_key != before:
                self._swaps.append(time.perf_counter() - started)

        scorer._load_teacher = timed


def _worker(case: Case, budget_bytes: int, vocab_size: int) -> Any:
    from teachers.scorers import ScorerOptions
    from teachers.worker import TeacherWorker

    return TeacherWorker(
        "transformers",
        ScorerOptions(
            dtype=case.dtype, payload=case.payload, top_k=64, vocab_size=vocab_size, memory_bytes=budget_bytes
        ),
    )


def held_bytes(path: Path, dtype: str) -> int:
    """Bytes of a model's tensors in the type that teachers compute in."""
    import torch

    from teachers.weights import weights_nbytes

    return weights_nbytes(path, getattr(torch, dtype))


def make_rollouts(case: Case, domain: str, vocab_size: int) -> Iterator[Any]:
    from opd.records.types import Rollout, Span

    rng = random.Random(domain)
    for index in range(case.rows):
        sample_id = f"000012/{domain}/{index}"
        yield Rollout(
            sample_id=sample_id,
            group=sample_id,
            episode=sample_id,
            step=12,
            domain=domain,
            prompt_ids=tuple(rng.choices(range(vocab_size), k=case.prompt)),
            response_ids=tuple(rng.choices(range(vocab_size), k=case.response)),
            behaviour_logprobs=(-1.0,) * case.response,
            spans=(Span(length=case.response, origin="policy", policy_version=11),),
            stop_reason="stop",
        )


def memory(process: int | str = "self") -> dict[str, int]:
    """Resident bytes now (VmRSS), at most since the last reset (VmHWM), anonymous and mapped from files."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssAnon", "RssFile")}


def trim_all() -> None:
    """Give freed memory back, Arrow's too."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    trim()


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


# ---- Parent ----------------------------------------------------------------------------------------------------------


class Child:
    """A case's process, asked line by line and watched from outside."""

    def __init__(self, case: Case, threads: int, errors: Any) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            **SPIN_SETTINGS,
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            "MALLOC_MMAP_THRESHOLD_": str(MMAP_BYTES),
        }
        self._errors = errors
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(asdict(case))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        self._case = case

    def describe(self) -> Row:
        answer, _, _ = self._ask()
        ready = Ready(**answer | {"alone": Step(**answer["alone"])})
        self.row = Row(self._case, ready)
        return self.row

    def step(self) -> Step:
        answer, anon, file = self._ask()
        step, before = Step(**answer), self.row.ready.before
        step.anon_bytes, step.file_bytes = anon - before["RssAnon"], file - before["RssFile"]
        self.row.steps.append(step)
        return step

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self) -> tuple[dict[str, Any], int, int]:
        """Return what the process says, and the most anonymous and file memory that was seen until it did."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        anon = file = 0
        deadline = time.monotonic() + DEADLINE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(SAMPLE_S):
                if time.monotonic() > deadline:
                    raise SystemExit(f"a worker gave no answer in {DEADLINE_S:.0f} s")
                with contextlib.suppress(OSError, KeyError):  # it ended
                    now = memory(self._process.pid)
                    anon, file = max(anon, now["RssAnon"]), max(file, now["RssFile"])
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise SystemExit(f"a worker ended: {self._errors.read()[-2000:]}")
        return json.loads(line), anon, file


def measure(cases: Sequence[Case], rounds: int, threads: int, say: Callable[[str], None]) -> list[Row]:
    """Round after round a step of each case."""
    children: list[Child] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            children += [Child(case, threads, errors) for case in cases]
            for child in children:
                row = child.describe()
                say(f"{label(row.case)}: ready (load {os.getloadavg()[0]:.2f})")
            for turn, child in itertools.product(range(rounds), children):
                step = child.step()
                say(
                    f"round {turn + 1}/{rounds} {label(child.row.case)}: {step.wall_s:.2f} s, "
                    f"+{step.peak_bytes / MIB:.0f} MiB (load {os.getloadavg()[0]:.2f})"
                )
        finally:
            for child in children:
                child.stop()
    rows = [child.row for child in children]
    for row in rows:
        base = next((r for r in rows if r.case.kind == row.case.kind and r.case.experts == 1), None)
        if base is not None:
            _compare(row, base)
    return rows


def _compare(row: Row, base: Row) -> None:
    """Fill in the ratios to one expert of the same kind."""
    pairs, tokens = list(zip(row.steps, base.steps, strict=True)), row.scored / base.scored
    row.time_ratio = statistics.median(a.wall_s / b.wall_s / tokens for a, b in pairs)
    row.cpu_ratio = statistics.median(a.cpu_s / b.cpu_s / tokens for a, b in pairs)


def budget(case: Case) -> str:
    return f"{case.budget:g} models" if case.budget else "1 byte"


def label(case: Case) -> str:
    return f"{case.experts} {case.kind}, memory {budget(case)}"


# ---- Output ----------------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row], title: str, console: Any) -> None:
    from rich.table import Table

    wanted = ", ".join(f"{ratio:.2f} with {num}" for num, ratio in TIME_TARGETS.items())
    caption = f"Wanted: time / one at most {wanted} experts, peak / allowed at most {MEMORY_TARGET:.2f}"
    table = Table("experts", "memory", title=title, caption=caption)
    for name in (
        "ms/token", "time / one", "CPU / one", "peak MiB", "file", "anon", "stream", "one MiB", "peak / allowed",
        "swap ms", "loads", "B/token", "describe ms", "disk MiB",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row, following in itertools.zip_longest(rows, rows[1:]):
        case = row.case
        ends = following is None or (following.case.kind, following.case.budget) != (case.kind, case.budget)
        table.add_row(
            f"{case.experts} {case.kind}",
            budget(case),
            f"{1000 * row.median(lambda s: s.wall_s) / row.scored:.4f}",
            format_or_dash(row.time_ratio, ".2f"),
            format_or_dash(row.cpu_ratio, ".2f"),
            f"{row.median(lambda s: s.peak_bytes) / MIB:.0f}",
            f"{row.median(lambda s: s.file_bytes) / MIB:.0f}",
            f"{row.median(lambda s: s.anon_bytes) / MIB:.0f}",
            f"{row.median(lambda s: s.stream_bytes) / MIB:.0f}",
            f"{row.ready.alone.peak_bytes / MIB:.0f}",
            format_or_dash(row.memory_ratio, ".2f"),
            "-" if row.swap_s is None else f"{1000 * row.swap_s:.1f}",
            f"{row.median(lambda s: s.loads):g}",
            f"{row.median(lambda s: s.stream_bytes) / (case.experts * case.rows * case.response):,.1f}",
            "-" if row.ready.describe_s is None else f"{1000 * row.ready.describe_s:.0f}",
            f"{row.ready.disk_bytes / MIB:.0f}",
            end_section=ends,
        )
    console.print(table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Cost of N experts in one scoring worker; never a verdict.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, one round, few experts")
    add("--model-dir", type=Path, help="a real model instead of a random one; copied and perturbed")
    add("--full", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64], help="numbers of full fine-tunes")
    add("--cached", nargs="*", type=int, default=[16], help="those again, under a budget of --cache models")
    add("--cache", type=float, default=4.0, help="that budget")
    add("--lora", nargs="*", type=int, default=[1, 10, 16], help="numbers of LoRA adapters, all of which are kept")
    add("--rows", type=int, default=16, help="responses for each expert and step")
    add("--prompt", type=int, default=32, help="prompt tokens of a row")
    add("--response", type=int, default=96, help="response tokens of a row")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="teachers compute in it")
    add("--payload", choices=["hidden_states", "sampled_logprobs", "top_k"], default="hidden_states")
    add("--rounds", type=int, default=3, help="steps of each process")
    add("--threads", type=int, default=1, help="compute threads of each process (OMP_NUM_THREADS)")
    add("--folder", type=Path, help="parent of the temporary directory with the experts' files; default: the system's")
    add("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    if args.quick:
        args.full, args.cached, args.lora, args.rounds = [1, 4], [], [4], 1
    return args


def main() -> None:
    from rich.console import Console

    args = parse_args()
    console = Console(width=None if sys.stdout.isatty() else 170)
    say = Console(stderr=True, highlight=False).print
    facts = machine(args.threads, "torch", "transformers")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        size = SIZES["quick" if args.quick else "default"]
        adapters = max([1, *args.lora])
        write_experts(Path(folder), args.model_dir, max([1, *args.full, *args.cached]), adapters, size)
        shared = (folder, args.rows, args.prompt, args.response, args.dtype, args.payload)
        cases = [
            *(Case("full", n, 0, *shared) for n in args.full),
            *(Case("full", n, args.cache, *shared) for n in args.cached),
            *(Case("lora", n, 1 + adapters, *shared) for n in args.lora),
        ]
        rows = measure(cases, args.rounds, args.threads, say)
    facts["load_after"] = os.getloadavg()
    first = rows[0].ready
    title = (
        f"Scoring: {args.rows} rows of {args.prompt} + {args.response} tokens an expert and step, model of "
        f"{first.expert_bytes / MIB:.0f} MiB, adapters of {first.adapter_bytes / MIB:.1f} MiB, {args.dtype}"
    )
    show(rows, title, console)
    console.print(f"{args.rounds} round(s); {facts}")
    if args.json:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        args.json.write_text(
            json.dumps({"machine": facts, "options": options, "rows": [asdict(r) for r in rows]}, indent=2) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
