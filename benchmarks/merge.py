"""A whole merge against TRL's `DistillationTrainer`, equal work on both sides, and what keeps ours from its limits.

    python -m benchmarks.merge --quick --trl-python PYTHON
    python -m benchmarks.merge --trl-python PYTHON --json merge.json

Same student, teacher, prompts, numbers of responses and tokens, on both sides. Ours is `pipelines.merge`; TRL runs under an
interpreter of its own (benchmarks/README.md says how to make one). A turn is one process: its start and its first steps do
not count, then it takes the steps that do. Both sides take turns, and so do the parts of a step alone: rollout engine,
matrix product, model body, loss, optimiser. A round is one turn of each, ratios are taken within a round, figures are
medians over rounds. A step that has not exactly the tokens of its case ends the run. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import DTYPES, chosen_dtype, machine
from benchmarks.merging.case import LIMITS, OURS, SHARDED, TRL, Case
from benchmarks.merging.child import ROOT, Interpreters, environment, take_turn
from benchmarks.merging.inputs import Order
from benchmarks.merging.table import Measured, by_phase, by_process, compared, of_experts, of_limits, summary

QUICK: dict[str, Any] = {
    "tiny": True,
    "responses": [4],
    "new_tokens": [8],
    "prompt_tokens": 8,
    "dtypes": ["float32"],
    "experts": [1, 2],
    "rounds": 2,
    "micro_batch_tokens": 32,
}
VERSIONS = "import json; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in ('trl', 'torch', 'transformers')}))"


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A whole merge against TRL's; never a verdict.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, one case, two rounds: does everything run?")
    add("--trl-python", help="an interpreter that has TRL; without it only ours and the limits are measured")
    add("--model-dir", type=Path, help="a student; default: random weights of SmolLM2-135M's shape")
    add("--responses", nargs="+", type=int, default=[16, 64], help="in a step")
    add("--new-tokens", nargs="+", type=int, default=[64, 256], help="of each response")
    add("--prompt-tokens", type=int, default=43, help="of each prompt")
    add(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=list(dict.fromkeys(("float32", chosen_dtype("auto")))),
        help="bfloat16 is among the defaults if the cores have instructions for it",
    )
    add(
        "--experts",
        nargs="*",
        type=int,
        default=[1, 4, 10, 16],
        help="ours with so many experts: most responses, fewest new tokens, last type",
    )
    add("--rounds", type=int, default=5, help="turns of each side at each case")
    add("--warm-up", type=int, default=1, help="first steps of a turn, which do not count")
    add("--steps", type=int, default=1, help="steps of a turn that do")
    add("--micro-batch-tokens", type=int, default=2048, help="of both sides; prompts and responses")
    add(
        "--trl-bf16",
        choices=["weights", "autocast"],
        default="weights",
        help="TRL in bfloat16: weights of that type, or float32 weights under autocast",
    )
    add("--trl-compile", action="store_true", help="TRL with `torch_compile`; ours: --set trainer.compile=true")
    add("--lora", type=int, default=0, help="rank of a LoRA student, on both sides; 0: all weights are trained")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of our pipeline")
    add("--step-timeout", type=float, default=3600, help="seconds for a step, and for a start")
    add("--folder", type=Path, help="parent of the temporary directory; default: the system's")
    add("--json", type=Path, help="write all figures here, after every turn")
    parser.set_defaults(tiny=False)
    if parser.parse_args(given).quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(given)
    if min(args.warm_up, args.steps, args.rounds) < 1:
        parser.error("--warm-up, --steps and --rounds are at least 1")
    return args


def cases(args: argparse.Namespace, folder: str) -> tuple[list[Case], list[Case]]:
    """Those that both sides take, and those that ours takes with more experts."""
    base = Case(
        responses=max(args.responses),
        new_tokens=min(args.new_tokens),
        prompt_tokens=args.prompt_tokens,
        dtype=args.dtypes[-1],
        experts=1,
        warm_up=args.warm_up,
        steps=args.steps,
        micro_batch_tokens=args.micro_batch_tokens,
        folder=folder,
        trl_bf16=args.trl_bf16,
        trl_compile=args.trl_compile,
        options=tuple(args.set),
        lora=args.lora,
    )
    both = [
        replace(base, responses=responses, new_tokens=new_tokens, dtype=dtype)
        for dtype in args.dtypes
        for new_tokens in args.new_tokens
        for responses in args.responses
    ]
    return both, [replace(base, experts=number) for number in args.experts]


def turns_of_round(number: int, with_trl: bool, case: Case) -> list[str]:
    """Return the sides that take turns, in their order: the first one changes from round to round."""
    sides = [OURS, TRL] if with_trl else [OURS]
    # The last one trains every weight, of layers that are not compiled.
    alone = [limit for limit in LIMITS if limit != SHARDED or not (case.lora or case.compiled)]
    return [*(sides if number % 2 == 0 else sides[::-1]), *alone]


def measure(
    args: argparse.Namespace, folder: str, keep: Callable[[Sequence[Measured], Sequence[Measured]], None]
) -> None:
    """All rounds of a case, then the next; then those with more experts, in turn. `keep` gets what is there after each turn."""
    interpreters = Interpreters(ours=sys.executable, trl=args.trl_python, step_timeout_s=args.step_timeout)
    both, more = ([Measured(case, []) for case in group] for group in cases(args, folder))

    def take(one: Measured, side: str, number: int) -> None:
        one.turns.append(take_turn(one.case, side, number, interpreters))
        last = one.turns[-1]
        said = (
            ", ".join(f"{k} {v:.4g}" for k, v in last.figures.items())
            or f"{last.seconds:.2f} s, {last.rate:.1f} tokens/s"
        )
        print(
            f"round {number + 1}/{args.rounds} {one.case.name}, {side}: {said} (others had {last.others:.0%} of the cores)",
            file=sys.stderr,
        )
        keep(both, more)

    for one in both:
        for number in range(args.rounds):
            for side in turns_of_round(number, args.trl_python is not None, one.case):
                take(one, side, number)
    for number in range(args.rounds):
        for one in more:
            take(one, OURS, number)


def write_inputs(args: argparse.Namespace, folder: str) -> None:
    """In a process of its own, so that this one stays small."""
    order = Order(
        folder=folder,
        model_dir=str(args.model_dir.absolute()) if args.model_dir else None,
        tiny=args.tiny,
        dtypes=args.dtypes,
        experts=max([1, *args.experts]),
        prompts=max(args.responses) * (args.warm_up + args.steps),
        prompt_tokens=args.prompt_tokens,
    )
    command = [sys.executable, "-m", "benchmarks.merging.inputs", order.to_json()]
    subprocess.run(command, env=environment(), cwd=ROOT, check=True, timeout=1800)


def model_name(args: argparse.Namespace) -> str:
    if args.model_dir:
        return f"{args.model_dir.name}, its end tokens taken away"
    return "random weights, tiny" if args.tiny else "random weights of SmolLM2-135M's shape"


def show(both: Sequence[Measured], more: Sequence[Measured]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 210)
    for table in (
        compared(both),
        by_phase(both),
        by_process(both),
        of_limits(both),
        *([of_experts(more)] if more else []),
    ):
        console.print(table)


def main() -> None:
    args = parse_args()
    facts: dict[str, Any] = machine(os.cpu_count() or 1, "torch", "transformers", "deepspeed", "ray")
    facts["model"] = model_name(args)
    if args.trl_python:
        done = subprocess.run([args.trl_python, "-c", VERSIONS], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{args.trl_python}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
        facts["trl_side"] = json.loads(done.stdout)
    kept: tuple[Sequence[Measured], Sequence[Measured]] = ([], [])

    def keep(both: Sequence[Measured], more: Sequence[Measured]) -> None:
        nonlocal kept
        kept = both, more
        if args.json:
            options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
            groups = {
                name: [
                    {"case": asdict(m.case), "summary": summary(m), "turns": [asdict(t) for t in m.turns]}
                    for m in group
                ]
                for name, group in (("both", both), ("experts", more))
            }
            figures = {"machine": facts | {"load_after": os.getloadavg()}, "options": options, **groups}
            args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(dir=args.folder, prefix="opd-merge-") as folder:
        write_inputs(args, folder)
        measure(args, folder, keep)
    show(*kept)
    print(f"{args.rounds} rounds; {facts}; load after {os.getloadavg()}")


if __name__ == "__main__":
    main()
