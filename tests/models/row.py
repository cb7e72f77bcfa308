"""One family through the whole merge on the real engines, as a user runs it: one row of the table."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import string
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from opd.files import blake3_file
from tests.models.families import Family, build_models

ROOT = Path(__file__).parents[2]
STEPS, RESUME_FROM = 6, 3
DEADLINE_S = 480.0
"""Of one command; on two quiet cores it takes 15 to 40 s, on busy ones five times as long."""
WORKERS = ("ray::", "raylet", "gcs_server")
"""Prefixes of the names of processes that a merge starts."""
EXPORT_NATS = 1e-5
"""Between trainer and exported model in plain transformers, float32."""
SCORER_NATS = 1e-4
"""Between scorer and plain transformers, float32."""
PACKING = 1e-5
"""Together against alone, relative, float32."""
ENGINE_NATS = {"float32": 2e-3, "bfloat16": 0.5}
"""Largest difference of one token between trainer and a new engine on the exported model."""


@dataclass
class Row:
    """The facts of a family; a value that was not measured is None."""

    family: str
    note: str
    state: str = "works"
    """`works`, `refused` (before the first worker started), `FAILED` or `deadline`."""
    said: list[str] = field(default_factory=list)
    """Refusals, and what failed."""
    engine: str = "vllm"
    engine_dtype: str = "float32"
    trainer_layout: str | None = None
    trainer_packing: float | None = None
    teacher_layouts: dict[str, str] = field(default_factory=dict)
    scorer_gaps: dict[str, float] = field(default_factory=dict)
    """Expert -> nats between scorer and plain transformers (for the adapter: PEFT)."""
    probe_gap: float | None = None
    """The largest of all pushes, nats."""
    losses: tuple[float, float] | None = None
    """Of the first and the last step."""
    export_transformers: float | None = None
    export_vllm: float | None = None
    resumed_alike: bool | None = None
    adapter: str | None = None
    """`scored`, or why it was refused."""
    seconds: float = 0.0

    def fail(self, what: str) -> None:
        """Note a defect."""
        self.said.append(what)
        if self.state != "deadline":
            self.state = "FAILED"


@dataclass(frozen=True)
class Ended:
    """The end of a command."""

    code: int | None
    """None: it did not before its deadline."""
    out: str
    errors: str
    started_workers: bool
    """A process of Ray was seen below it."""

    @property
    def last_words(self) -> str:
        """The error's line, in one."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        starts = [i for i, line in enumerate(lines) if line.startswith(("error: ", "failed: "))]
        shown = lines[starts[-1] :] if starts else lines[-1:]
        return " ".join(line.strip() for line in shown)[:600]


def run(args: Sequence[str | Path], place: Path, deadline_s: float = DEADLINE_S) -> Ended:
    """`python args` in `place`, watched; what is left of it after its deadline is ended."""
    number = len(list(place.glob("stderr-*")))
    out, errors = place / f"stdout-{number}", place / f"stderr-{number}"
    with out.open("w") as stdout, errors.open("w") as stderr:
        process = psutil.Popen(
            [sys.executable, *map(str, args)], cwd=place, stdout=stdout, stderr=stderr,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    seen: set[psutil.Process] = set()
    started, deadline = False, time.monotonic() + deadline_s
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen |= set(process.children(recursive=True))
        started = started or any(_is_worker(child) for child in seen)
        time.sleep(0.2)
    code = process.poll()
    if code is None:
        for one in (process, *seen):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
    return Ended(code=code, out=out.read_text(), errors=errors.read_text(), started_workers=started)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return " ".join(process.cmdline()).startswith(WORKERS) or process.name().startswith(WORKERS)
    except psutil.Error:
        return False


def write_prompts(path: Path, prefix: str, num: int = 40) -> Path:
    """Words of 8 to 14 letters, so that a sequence is longer than the sliding windows."""
    rng = random.Random(prefix)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(8, 14))) for _ in range(num)]
    path.write_text("".join(json.dumps({"prompt": f"{prefix} {word}="}) + "\n" for word in words))
    return path


def pipeline_of(family: Family, models: Mapping[str, Path], place: Path, experts: Sequence[str]) -> dict[str, Any]:
    """Two domains, one for each expert; the same expert for both if there is one alone."""
    return {
        "name": "row",
        "student": {"model": str(models["student"])},
        "experts": {name: {"model": str(models[name]), "domain": name} for name in experts},
        "domains": {
            name: {"prompts": str(write_prompts(place / f"{name}.jsonl", name[:3])), "teachers": expert}
            for name, expert in zip(("whole", "adapter"), (experts[0], experts[-1]), strict=True)
        },
        "rollout": {
            "engine": family.engine,
            "max_new_tokens": 12,
            "max_model_len": 64,
            "max_num_seqs": 16,
            "dtype": family.engine_dtype,
        },
        "trainer": {"ranks": 1, "steps": STEPS, "samples_per_step": 16, "lr": 4.0e-3, "micro_batch_tokens": 256},
        "checkpoint": {"every": RESUME_FROM},
        "cluster": {"start_timeout_s": 240, "phase_timeout_s": 240, "max_restarts": 0},
        "logging": {"tensorboard": False},
    }


def make_row(
    name: str, family: Family, place: Path, tell: Callable[[str], None] = lambda line: None, resumes: bool = True
) -> Row:
    """Build the models in `place`, merge, resume unless told not to, look at what came out."""
    began = time.monotonic()
    row = Row(family=name, note=family.note, engine=family.engine, engine_dtype=family.engine_dtype)
    models = build_models(family, place)
    experts = merge(row, family, models, place, tell)
    if experts:
        read_run(row, place / "run", experts)
        if resumes:
            resume(row, place, tell)
        look(row, place, experts, tell)
        judge(row)
    row.seconds = round(time.monotonic() - began, 1)
    return row


def merge(
    row: Row, family: Family, models: Mapping[str, Path], place: Path, tell: Callable[[str], None]
) -> Sequence[str]:
    """The experts of the merge that went through; none if none did. An adapter that is refused is left out."""
    for experts in (("whole", "adapter"), ("whole",)):
        tell(f"merge of {' and '.join(experts)}")
        file = place / "pipeline.yaml"
        file.write_text(yaml.safe_dump(pipeline_of(family, models, place, experts)))
        done = run(["-m", "cli", "merge", file, "--run-dir", place / "run"], place)
        if done.code == 0:
            row.adapter = row.adapter or "scored"
            return experts
        if done.code != 2:
            break
        if done.started_workers or (place / "run").exists():
            row.fail(f"refused after the workers started: {done.last_words}")
            return ()
        refusal = tidy(done.last_words, place)
        if "adapter" in experts:
            row.adapter = refusal
    else:
        row.state, row.adapter = "refused", None
        row.said.append(refusal)
        return ()
    ended(row, "merge", done, place)
    return ()


def resume(row: Row, place: Path, tell: Callable[[str], None]) -> None:
    """Go back to the checkpoint of step `RESUME_FROM` and compare what comes out of the same steps."""
    tell(f"resume from step {RESUME_FROM}")
    before = outcome(place / "run")
    (place / "run" / "model").rename(place / "model-of-the-whole")  # so that it has to come again
    done = run(["-m", "cli", "merge", "--resume", place / "run", "--resume-from", str(RESUME_FROM)], place)
    if done.code == 0:
        repeated = f"resumed from step {RESUME_FROM}" in done.errors
        row.resumed_alike = repeated and outcome(place / "run") == before
    else:
        ended(row, "resume", done, place)


def look(row: Row, place: Path, experts: Sequence[str], tell: Callable[[str], None]) -> None:
    """`tests.models.check` in a process of its own."""
    tell("plain transformers and a new engine")
    known = {
        "layout": row.trainer_layout,
        "experts": list(experts),
        "engine": row.engine,
        "engine_dtype": row.engine_dtype,
    }
    (place / "check.json").write_text(json.dumps(known))
    done = run(["-m", "tests.models.check", place], place)
    found: dict[str, Any] = {}
    for line in done.out.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    row.trainer_packing = found.get("trainer_packing")
    row.export_transformers, row.export_vllm = found.get("export_transformers"), found.get("export_vllm")
    row.scorer_gaps = {name: found[f"scorer_{name}"] for name in experts if f"scorer_{name}" in found}
    if done.code != 0:
        ended(row, "check", done, place)


def ended(row: Row, what: str, done: Ended, place: Path) -> None:
    """Note a command that did not do what it should."""
    if done.code is None:
        row.state = "deadline"
        row.said.append(f"{what}: not done after {DEADLINE_S:.0f} s")
    else:
        row.fail(f"{what}, exit code {done.code}: {tidy(done.last_words, place)}")


def tidy(text: str, place: Path) -> str:
    """Without the directories of this run."""
    return text.removeprefix("error: ").replace(f"{place}/", "")


def outcome(run_dir: Path) -> tuple[dict[str, str], list[float]]:
    """Hashes of the exported weights, and every step's loss."""
    weights = {file.name: blake3_file(file) for file in sorted((run_dir / "model").glob("*.safetensors"))}
    return weights, [record["loss"] for record in records(run_dir)]


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_run(row: Row, run_dir: Path, experts: Sequence[str]) -> None:
    """Read what the run says of itself."""
    steps = records(run_dir)
    gaps = [record["probe_gap"] for record in steps]
    row.probe_gap = math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)
    row.losses = (steps[0]["loss"], steps[-1]["loss"])
    layouts = json.loads((run_dir / "layouts.json").read_text())
    row.trainer_layout = layouts["student"]["layout"]
    row.teacher_layouts = {name: layouts["teachers"][name]["layout"] for name in experts}


def judge(row: Row) -> None:
    """Every figure that is not what it must be."""
    bounds = {
        "packed against alone, trainer": (row.trainer_packing, PACKING),
        "export in transformers": (row.export_transformers, EXPORT_NATS),
        "export in the engine": (row.export_vllm, ENGINE_NATS[row.engine_dtype]),
        **{f"scorer of {name}": (found, SCORER_NATS) for name, found in row.scorer_gaps.items()},
    }
    for what, (found, most) in bounds.items():
        if found is not None and not found <= most:  # NaN is not
            row.fail(f"{what}: {found:.1e}, wanted at most {most:.0e}")
    if row.losses is not None and not row.losses[1] < row.losses[0]:
        row.fail(f"the loss does not fall: {row.losses[0]:.3f}, then {row.losses[1]:.3f}")
    if row.resumed_alike is False:
        row.fail("the resume ends with other weights or losses")
