"""Is `opd plan` right? Short merges in four settings of two pipelines, beside what the plan says of them. Never a verdict.

    python -m benchmarks.plan quickstart --folder DIR --json FILE     DIR: where `make demo` has made models and prompts
    python -m benchmarks.plan smollm2 --folder DIR --json FILE        DIR: where models/smollm2 and prompts/reasoning are
    python -m benchmarks.plan tiny --json FILE                        the merges that the overheads of a spec come from,
    python -m benchmarks.plan tiny-ten --json FILE                    and one of them with ten experts
    python -m benchmarks.plan recorded                                no merge: docs/results/plan.json as rows beside the plan

Rates and three factors are those of a matrix product, copies, small calls and a layer alone, on the cores that the merge has,
measured before and after each merge. Lengths are those that the merge's own records show. Nothing else is taken from what is compared. Merges of the same
name in FILE are replaced, others stay. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.planning.cases import CASES, ROOT, TINY_EXPERTS, Case, Setting, prepared, shapes
from benchmarks.planning.lengths import lengths_of
from benchmarks.planning.peaks import peaks

PHASES = ("rollout", "score", "train", "sync")
RECORDED = ROOT / "docs/results/plan.json"
TOLERANCE = 0.3
OUTSIDE: dict[str, tuple[str, ...]] = {
    "smollm2, 64 x 64": ("sync",),
    "quickstart, two engines and two scorers": ("rollout", "score"),
    "quickstart, 80 samples, four to a prompt": ("sync",),
}
"""Merge -> what of it the plan misses by more than the tolerance."""
GIB = 2**30
MEASURED_FACTORS = ("forward", "backward", "decode")


def predicted(run: Mapping[str, Any], folder: Path | None = None) -> dict[str, float]:
    """Return what the plan says of a measured merge: seconds of each phase and of a step, GiB of a worker of each role at its
    fullest. Model paths are relative to `folder`."""
    from opd.config import PipelineConfig
    from pipelines.plan.plan import make_plan
    from pipelines.plan.spec import ClusterSpec, load_spec

    config = PipelineConfig.model_validate(run["pipeline"])
    data = load_spec(run["spec"]).model_dump()
    machine = data["machine"] | {"cores": run["cores"]}
    # Processes of one machine pass bytes on by copying them.
    links = dict.fromkeys(("inside", "between", "load"), run["rates"]["memory"] / 2)
    changed = {
        "rates": run["rates"],
        "factors": data["factors"] | run.get("factors", {}),
        "lengths": run["lengths"],
        "machine": machine,
        "links": data["links"] | links,
    }
    here = Path.cwd()
    os.chdir(folder or here)
    try:
        plan = make_plan(config, ClusterSpec.model_validate(data | changed))
    finally:
        os.chdir(here)
    seconds = {phase.name: phase.seconds for phase in plan.phases} | {"step": plan.step_s}
    return seconds | {f"{role}, GiB": nbytes / GIB for role, nbytes in plan.fullest.items()}


def found(run: Mapping[str, Any]) -> dict[str, float]:
    """The same of the merge itself, as far as it was measured. Where engines write beside the other phases, the merge's phase has
    only what it waits for them; the seconds in which they write are taken."""
    ahead = run["pipeline"].get("schedule", {}).get("mode") == "one_step_off"
    written = {"rollout": run["busy_s"]["rollout"]} if ahead else {}
    memory = {f"{role}, GiB": nbytes / GIB for role, nbytes in run.get("memory", {}).items()}
    return {**run["phase_s"], **written, **memory}


def take(file: Path, case: Case, setting: Setting) -> dict[str, Any]:
    """One merge: its settings, lengths, the medians of its phases, and most memory of its workers."""
    import yaml

    with tempfile.TemporaryDirectory(prefix="opd-plan-") as scratch:
        run = Path(scratch) / "run"
        steps = case.warm_up + case.steps
        always = (
            f"trainer.steps={steps}",
            f"checkpoint.every={steps}",
            "evaluate.every=0",
            "logging.tensorboard=false",
        )
        sets = [part for change in (*always, *case.always, *setting.changes) for part in ("--set", change)]
        command = [sys.executable, "-m", "cli", "merge", file.name, "--run-dir", str(run), "--quiet", *sets]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with (
            subprocess.Popen(command, cwd=file.parent, env=environment, stdout=subprocess.DEVNULL) as process,
            peaks(process.pid) as most,
        ):
            try:
                code = process.wait(timeout=3600)
            finally:
                process.terminate()  # nothing, if it has ended
        if code:
            raise SystemExit(f"{shlex.join(command)}: exit code {code}")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][case.warm_up :]
        # What is kept names no folder of this machine.
        config = yaml.safe_load((run / "pipeline.yaml").read_text().replace(f"{file.parent.absolute()}/", ""))
    kept = summary(config, records, ["opd", "merge", file.name, *sets])
    return {"name": setting.name, **kept, "memory": dict(sorted(most.items()))}


def measured(model_dir: Path) -> dict[str, Any]:
    """Rates, and the factors that are measured, of the cores that this process has; in a process of its own."""
    code = (
        "import json, sys; from pathlib import Path; from pipelines.plan.measure import choose_layer, measured_spec; "
    )
    code += "from pipelines.plan.spec import load_spec; layer = choose_layer(Path(sys.argv[1])); "
    code += "print(measured_spec(load_spec('two-cores'), layer).model_dump_json(include={'rates', 'factors'}))"
    command = [sys.executable, "-c", code, str(model_dir)]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.PIPE)
    there: dict[str, Any] = json.loads(done.stdout)
    return {"rates": there["rates"], "factors": {name: there["factors"][name] for name in MEASURED_FACTORS}}


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The means of what was measured before and after a merge."""
    rates = {name: statistics.fmean((rate, after["rates"][name])) for name, rate in before["rates"].items()}
    factors = {
        name: one | {"share": statistics.fmean((one["share"], after["factors"][name]["share"]))}
        for name, one in before["factors"].items()
    }
    return {"rates": rates, "factors": factors}


def summary(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]], command: Sequence[str]) -> dict[str, Any]:
    """Return what is kept of a merge's own records."""
    from opd.config import PipelineConfig

    def of(key: str, name: str) -> float:
        return statistics.median(record[key].get(name, 0.0) for record in records)

    phases = {name: of("phase_s", name) for name in PHASES}
    return {
        "command": shlex.join(command),
        "pipeline": PipelineConfig.model_validate(config).model_dump(mode="json", exclude_defaults=True),
        "lengths": lengths_of(records, config["rollout"]["max_new_tokens"]),
        "cores": len(os.sched_getaffinity(0)),
        "steps": len(records),
        "phase_s": phases | {"step": statistics.median(sum(r["phase_s"].get(n, 0.0) for n in PHASES) for r in records)},
        "busy_s": {role: of("busy_s", role) for role in ("rollout", "teachers", "trainer")},
    }


def compared(run: Mapping[str, Any], folder: Path | None = None) -> list[tuple[str, ...]]:
    """Merge, what, measured, planned, and how far off the plan is, for each phase, the whole step, and each role's memory."""
    plan = predicted(run, folder)
    return [
        (run["name"], what, f"{value:.3g}", f"{plan[what]:.3g}", f"{plan[what] / value - 1:+.0%}")
        for what, value in found(run).items()
        if value
    ]


def recorded(folder: Path) -> list[str]:
    """Rows for the merges of docs/results/plan.json; `folder` is empty, and gets the shapes of models."""
    shapes(folder)
    merges = json.loads(RECORDED.read_text(encoding="utf-8"))
    ordered = sorted(merges, key=lambda one: bool(one["overheads"]))
    return [f"| {' | '.join(row)} |" for merge in ordered for row in compared(merge, folder)]


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The chosen settings of a pipeline; each is written as soon as it is there."""
    from opd.settings.yaml_files import load_yaml

    case, file = CASES[args.pipeline], prepared(args.pipeline, folder)
    student = folder.absolute() / load_yaml(file)["student"]["model"]
    runs, before = [], measured(student)
    for number, setting in enumerate(case.settings):
        if args.settings is not None and number not in args.settings:
            continue
        facts = machine(len(os.sched_getaffinity(0)), "torch", "transformers", "deepspeed", "ray")
        run, after = take(file, case, setting), measured(student)
        facts["load_after"] = os.getloadavg()
        run |= {
            **between(before, after),
            "spec": args.spec,
            "overheads": args.pipeline in TINY_EXPERTS,
            "machine": facts,
        }
        before = after
        runs.append(run)
        print(run["name"], found(run), run["lengths"], run["rates"], file=sys.stderr, flush=True)
        if args.json:
            keep(args.json, run)
    return runs


def keep(file: Path, run: Mapping[str, Any]) -> None:
    """Put a merge among those of a file, in the place of one of the same name."""
    there = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    names = [one["name"] for one in there]
    if run["name"] in names:
        there[names.index(run["name"])] = run
    else:
        there.append(run)
    file.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Short merges beside what `opd plan` says of them; never a verdict.")
    parser.add_argument("pipeline", choices=[*CASES, "recorded"])
    parser.add_argument("--folder", type=Path, default=Path(), help="where the pipeline's relative paths begin")
    parser.add_argument("--spec", default="two-cores", help="whose overheads, and other factors, the plan takes")
    parser.add_argument("--settings", nargs="+", type=int, help="numbers of the settings, from 0; default: all")
    parser.add_argument("--json", type=Path, help="keep what was measured in this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="opd-plan-") as scratch:
        if args.pipeline == "recorded":
            print("\n".join(recorded(Path(scratch))))
            return
        folder = Path(scratch) if args.pipeline in TINY_EXPERTS else args.folder
        rows = [row for run in measure(args, folder) for row in compared(run, folder)]
        from pipelines.commands.shell import print_table

        print_table("the plan beside the merge", ("merge", "what", "measured", "planned", "off"), rows)


if __name__ == "__main__":
    main()
