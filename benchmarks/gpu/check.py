"""Common parts of the GPU check: where figures go, what is left out and why, and how long there is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.merging.memory import end_family

RECORD = "gpu.json"


@dataclass(frozen=True)
class Part:
    """One part of the check, run in a process of its own: an error on a GPU breaks everything after it."""

    name: str
    title: str
    needs: tuple[str, ...]
    """Modules without which the part is left out."""
    weight: int
    """Its part of the time that is left, beside the weights of the parts that come after it."""

    def missing(self) -> list[str]:
        """Names of the modules that are not here."""
        return [name for name in self.needs if not is_here(name)]


CORE = ("torch", "transformers", "pydantic", "pyarrow", "blake3", "safetensors")
PARTS = (
    Part("loss", "Loss: exact reverse KL from hidden states", CORE, 5),
    Part("engines", "Rollout engine: weight push, CUDA graphs, sleep mode", (*CORE, "pytest", "vllm"), 2),
    Part("push", "Weight push: files, object store, directly", (*CORE, "vllm", "ray", "deepspeed", "accelerate"), 4),
    Part(
        "merge",
        "A merge on one GPU with sleep: seconds by phase",
        (*CORE, "pytest", "vllm", "ray", "deepspeed", "accelerate", "typer"),
        4,
    ),
    Part("trainer", "Trainer: one rank of DeepSpeed ZeRO-3", (*CORE, "deepspeed", "accelerate"), 3),
    Part("scorer", "Scorer: hidden states by transformers", (*CORE, "accelerate"), 2),
    Part(
        "packing",
        "Packing: several sequences in a row against each alone",
        (*CORE, "pytest", "opd.models.layouts", "tests.models.families"),
        3,
    ),
    Part(
        "architectures", "Architecture table", (*CORE, "pytest", "vllm", "ray", "deepspeed", "tests.models.__main__"), 8
    ),
)
"""In the order in which they run, what matters most first; what one does not use is left to the next."""
USUAL = tuple(part.name for part in PARTS if part.name not in ("packing", "architectures"))
"""Parts that run if none are named: those that fit into nine minutes."""


@dataclass(frozen=True)
class Ended:
    """End of a command."""

    code: int | None
    """None: its time was over."""
    out: str
    errors: str


def within(command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None, shown: bool = False) -> Ended:
    """Run a command; when its time is over it is killed with all processes that it started. `shown`: what it prints is ours."""
    out = None if shown else subprocess.PIPE
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, env=env)
    code: int | None = None
    try:
        said, errors = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        end_family(process.pid)
        said, errors = process.communicate()
    finally:  # Ctrl-C too
        if process.poll() is None:
            end_family(process.pid)
    return Ended(code, said or "", errors)


def is_here(module: str) -> bool:
    """Return True if a module could be imported; nothing is imported but the packages around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True)
class Check:
    """One part at work."""

    part: str
    device: str
    """torch's name: cuda or cpu."""
    quick: bool
    """Tiny sizes: does everything run?"""
    ends: float
    """time.time() at which the part should be over."""
    output: Path

    @property
    def left_s(self) -> float:
        return self.ends - time.time()

    def add(self, table: str, **figures: Any) -> None:
        """A row of one of the part's tables; on disk at once, so that a part that dies keeps what it has."""
        with self._record() as part:
            part["tables"].setdefault(table, []).append(figures)
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        print(f"[{self.part}] {table}: {shown}", flush=True)

    def leave_out(self, what: str, why: str) -> None:
        """Say what was not measured."""
        with self._record() as part:
            said = {"what": what, "why": why}
            if said in part["left_out"]:
                return
            part["left_out"].append(said)
        print(f"[{self.part}] left out: {what}: {why}", flush=True)

    def in_time(self, what: str, seconds: float) -> bool:
        """Return True if there is time for something that takes so long; leave it out if not."""
        if self.left_s >= seconds:
            return True
        self.leave_out(what, f"{max(0.0, self.left_s):.0f} s were left of the time given")
        return False

    def _record(self) -> _Update:
        return _Update(self.output / RECORD, self.part)


class _Update:
    """The record of one part, read, changed and written: `with _Update(path, name) as part`."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name

    def __enter__(self) -> dict[str, Any]:
        self._all: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {"parts": {}}
        part: dict[str, Any] = self._all["parts"].setdefault(self._name, {"tables": {}, "left_out": []})
        return part

    def __exit__(self, *error: object) -> None:
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(self._all, indent=1) + "\n")
        beside.replace(self._path)


def finish(output: Path, name: str, **facts: Any) -> None:
    """Facts about a part that is over: its seconds, and its error if it ended with one."""
    with _Update(output / RECORD, name) as part:
        part.update(facts)
