"""Cures of compounding drift on one environment, at equal numbers of trained tokens.

    python -m benchmarks.drift --work runs/drift --json drift.json          a seed of all arms takes about an hour on two cores
    python -m benchmarks.drift --work /path/to/scratch --quick               two steps of every arm: does everything run?

A base and an expert are trained on a solver's episodes. Then the expert is distilled into the base: off-policy on episodes that
it plays, on-policy, and on-policy with each cure of docs/drift.md. Every arm stops after the step in which it has trained on
`--tokens` tokens; exams on the way give success at smaller budgets. What `--work` holds is not computed again, so the same
command goes on after an interruption.

With `--starts N` all arms begin their training episodes at only N tasks, so that the expert's text shows little but its own ways. With
`--far M` these tasks, and those of the exam, are at least M right moves from the end. Base and expert are the same as without.
`--lr-scheduler-type linear` lets the rate fall to zero within `--max-steps`, for all arms. A merge then ends there and not at
`--tokens`, because a rate that falls depends on the number of steps. `--objective` gives the merges another divergence than
`reverse_kl`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.budget import train_within
from benchmarks.machine import PACKAGES, machine
from benchmarks.visited import States, states_seen
from experts.episodes.rows import read_episodes
from experts.spec import ExpertsSpec
from experts.suites import agents, write_suite
from experts.train import train_experts
from opd.files import atomic_write_text
from opd.records.scores import Evaluation
from opd.run.metrics import MetricsFile, count_trained_tokens
from opd.run.paths import RunPaths
from pipelines import api
from pipelines.baselines.comparison import SeedMean
from pipelines.baselines.jobs import plan_jobs
from pipelines.baselines.run import compute_results
from pipelines.environments import write_prefixes

NO_END = 10**9
"""More tokens than any arm trains on."""
OFF_POLICY, ON_POLICY = "off_policy", "on_policy"
REVERSE_KL = "reverse_kl"


@dataclass(frozen=True)
class Result:
    """One arm with one seed."""

    arm: str
    seed: int
    tokens: int
    steps: int | None
    by_share: dict[str, float]
    """Share of the budget -> success of the last exam within it."""
    curve: list[tuple[int, float]]
    """Trained tokens and success of every exam."""
    states: States | None = None
    """States that its training episodes passed, if these are counted."""


def cures(over: int) -> dict[str, dict[str, Any]]:
    """Arm -> its settings of the environment; `over` is the number of steps in which a cure goes away."""
    return {
        ON_POLICY: {},
        "curriculum": {"curriculum": {"first": 4, "over_steps": over}},
        "teacher_turns": {"teacher_turns": {"share": 0.8, "over_steps": over}},
        "teacher_turns_trained": {"teacher_turns": {"share": 0.8, "over_steps": over, "train": True}},
        "replay": {"replay": True},
        "turn_weights": {"turn_weights": {"decay": 0.9}},
        "drift_weights": {"turn_weights": {"divergence": 2.0}},
    }


def prepare(args: argparse.Namespace) -> None:
    """Episodes, a base that plays badly, an expert, and the prefixes of the episodes."""
    files = write_suite("agents", args.work / "prompts", domains=[args.environment], train=args.rows, eval=100, seed=0)
    train = files[args.environment]["train"]
    size = {"hidden_size": 128, "layers": 4, "heads": 4, "intermediate_size": 344, "max_position_embeddings": 512}
    spec = {
        "output_dir": args.work / "models",
        "base": {
            "from_scratch": {"tokenizer": "letters", **size},
            "data": [train],
            "train": {"max_steps": args.base_steps, "learning_rate": 2.0e-3, "per_device_train_batch_size": 16},
        },
        "train": {"max_steps": args.expert_steps, "learning_rate": 1.5e-3, "warmup_steps": min(10, args.expert_steps)},
        "experts": {"expert": {"domain": args.environment, "data": train}},
    }
    train_experts(ExpertsSpec.model_validate(spec), print)
    if not prefixes(args).exists():
        write_prefixes(train, args.work / "models" / "base", prefixes(args))


def prefixes(args: argparse.Namespace) -> Path:
    return Path(args.work) / "prompts" / args.environment / "prefixes.jsonl"


def pipeline(args: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """The merge of one arm."""
    directory = args.work / "prompts" / args.environment
    acts = cures(args.over_steps)[arm]
    turns = fmean(len(row.turns) for row in read_episodes(directory / "train.jsonl"))
    tasks = prefixes(args) if arm == "replay" else tasks_of(args, "train")
    game = {"name": args.environment}
    if args.count_states:
        options = {"game": args.environment, "file": str(visited(args, arm, seed))}
        game = {"name": "benchmarks.visited:Visited", "options": options}
    return {
        "name": f"{arm}-{seed}",
        "seed": seed,
        "student": {"model": str(args.work / "models" / "base")},
        "objective": {"kind": args.objective},
        "experts": {"expert": {"model": str(args.work / "models" / "expert"), "domain": args.environment}},
        "domains": {
            args.environment: {
                "prompts": str(tasks),
                "environment": game | {"max_turns": agents.DOMAINS[args.environment].max_turns} | acts,
                "eval": {"prompts": str(tasks_of(args, "eval"))},
            }
        },
        "rollout": {"max_new_tokens": 5, "max_model_len": 512},
        "trainer": {
            "ranks": 1,
            "steps": args.max_steps,
            # A prefix gives one turn; so many of them are about as many tokens as the episodes of the other arms.
            "samples_per_step": round(args.samples * turns) if arm == "replay" else args.samples,
            "lr": args.lr,
            "lr_scheduler_type": args.lr_scheduler_type,
            "warmup_steps": min(5, args.max_steps),
        },
        "checkpoint": {"every": 50, "keep": 1},
        "evaluate": {"every": args.exam_every, "samples": args.exam},
        "logging": {"tensorboard": False},
    }


def tasks_of(args: argparse.Namespace, kind: str) -> Path:
    """The tasks that training begins at (`train`), or those of the exam (`eval`)."""
    source = args.work / "prompts" / args.environment / f"{kind}.jsonl"
    return far_tasks(source, args.far, args.starts if kind == "train" else 0)


def far_tasks(source: Path, moves: int, count: int) -> Path:
    """A file with the first `count` different tasks of `source` (0: all) that take at least `moves` right moves."""
    if not moves and not count:
        return source
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    tasks = {row["prompt"]: row for row in rows if row["metadata"]["moves"] >= moves}
    file = source.with_name(f"{source.stem}-{moves}-{count}.jsonl")
    kept = list(tasks.values())[: count or None]
    atomic_write_text(file, "".join(json.dumps(row) + "\n" for row in kept))
    return file


def merge(args: argparse.Namespace, arm: str, seed: int) -> RunPaths:
    """The arm's run directory, with a merge that ended at the budget. Raises: SystemExit if it was begun with other settings."""
    paths = runs(args, arm, seed)
    train_within(args.tokens, api.load_pipeline(pipeline(args, arm, seed)), paths)
    if not paths.report.exists():
        done = MetricsFile(paths.metrics).read()[-1].step
        api.resume(paths.root, overrides=[f"trainer.steps={done}"], tell=print)
    return paths


def first_on_policy(args: argparse.Namespace) -> str:
    """The plain arm, if it is asked for; else the first one with a cure."""
    return next((arm for arm in args.arms if arm != OFF_POLICY), ON_POLICY)


def runs(args: argparse.Namespace, arm: str, seed: int) -> RunPaths:
    """The arm's run directory; other tasks and another objective are other runs."""
    tasks = f"-{args.far}-{args.starts}" if args.far or args.starts else ""
    objective = "" if args.objective == REVERSE_KL else f"-{args.objective}"
    return RunPaths(args.work / "runs" / f"{arm}-{seed}{tasks}{objective}")


def visited(args: argparse.Namespace, arm: str, seed: int) -> Path:
    """Return the file in which the episodes of a merge, or of the comparison with it, write their states."""
    return runs(args, arm, seed).root.with_suffix(".visited")


def states_of(args: argparse.Namespace, arm: str, seed: int) -> States | None:
    """Return the states that an arm which has just ended saw. Its file gets its name, and the next arm a new one."""
    if not args.count_states:
        return None
    shared = visited(args, first_on_policy(args) if arm == OFF_POLICY else arm, seed)
    kept = shared.with_suffix(f".{arm}.visited")
    if shared.exists() and not kept.exists():
        shared.rename(kept)
    return states_seen(args.environment, kept, tasks_of(args, "train"), tasks_of(args, "eval"))


def on_policy(args: argparse.Namespace, arm: str, seed: int) -> Result:
    """Success by trained tokens of a merge."""
    paths = merge(args, arm, seed)
    sums = {0: 0}
    for record in MetricsFile(paths.metrics).read():
        sums[record.step] = sums[record.step - 1] + count_trained_tokens(record)
    exams = {step: Evaluation.load(file) for step, file in paths.evaluations_by_step().items()}
    exams |= {
        0: Evaluation.load(paths.evaluation_file("before")),
        max(sums): Evaluation.load(paths.evaluation_file("after")),
    }
    curve = [(sums[step], fmean(found.accuracy.values())) for step, found in sorted(exams.items())]
    by_share = {f"{share:g}": within(curve, share * sums[max(sums)]) for share in args.shares}
    states = states_of(args, arm, seed)
    last = max(sums)
    return Result(arm=arm, seed=seed, tokens=sums[last], steps=last, by_share=by_share, curve=curve, states=states)


def within(curve: Sequence[tuple[int, float]], tokens: float) -> float:
    """Success of the last exam with at most so many tokens."""
    return [success for at, success in curve if at <= tokens][-1]


def off_policy(args: argparse.Namespace, seed: int) -> Result:
    """The expert plays, the student learns its turns: as many tokens as the first on-policy arm had, at each share."""
    run = merge(args, first_on_policy(args), seed)
    states_of(args, first_on_policy(args), seed)
    config = api.load_pipeline(run.pipeline)
    jobs = plan_jobs(config, run.root, [OFF_POLICY], args.shares, None)
    found = compute_results(jobs, print)
    curve = [(result.tokens or 0, result.accuracy) for result in found]
    by_share = {f"{result.token_share:g}": result.accuracy for result in found if result.token_share is not None}
    tokens = max(tokens for tokens, _ in curve)
    states = states_of(args, OFF_POLICY, seed)
    return Result(
        arm=OFF_POLICY, seed=seed, tokens=tokens, steps=None, by_share=by_share, curve=sorted(curve), states=states
    )


def references(args: argparse.Namespace) -> dict[str, float]:
    """Success of the base and of the expert, on the exam of the first run."""
    paths = runs(args, first_on_policy(args), args.seeds[0])
    return {
        name: fmean(Evaluation.load(paths.evaluation_file(name)).accuracy.values()) for name in ("before", "expert")
    }


def table(results: Sequence[Result], known: Mapping[str, float]) -> str:
    """Success of every arm as Markdown; means over seeds with their 95 % intervals."""
    shares = list(results[0].by_share)
    lines = [["arm", "trained tokens", "steps", *(f"success at {share}" for share in shares)]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for arm in dict.fromkeys(result.arm for result in results):
        mine = [result for result in results if result.arm == arm]
        steps = [result.steps for result in mine if result.steps is not None]
        cells = [str(SeedMean.from_values([result.by_share[share] for result in mine])) for share in shares]
        tokens = f"{fmean(result.tokens for result in mine):,.0f}"
        lines.append([arm, tokens, f"{fmean(steps):.0f}" if steps else "-", *cells])
    note = f"The base alone: {known['before']:.3f}; its expert: {known['expert']:.3f}."
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{note}\n"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Cures of compounding drift at equal numbers of trained tokens.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--environment", choices=sorted(agents.DOMAINS), default="maze")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/drift"), help="everything goes here, and is found again"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=[OFF_POLICY, *cures(1)], default=[OFF_POLICY, *cures(1)])
    parser.add_argument("--tokens", type=int, default=150_000, help="trained tokens of each arm")
    parser.add_argument("--samples", type=int, default=48, help="episodes of a step")
    parser.add_argument("--over-steps", type=int, default=40, help="steps in which a cure goes away")
    parser.add_argument("--max-steps", type=int, default=1000, help="an arm ends here at the latest")
    parser.add_argument("--lr", type=float, default=1.0e-3)
    parser.add_argument("--lr-scheduler-type", choices=["constant", "linear", "cosine"], default="constant")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 1.0],
        help="parts of the tokens at which success is shown",
    )
    parser.add_argument("--objective", choices=[REVERSE_KL, "forward_kl", "adaptive_kl"], default=REVERSE_KL)
    parser.add_argument("--exam", type=int, default=100, help="tasks of an exam")
    parser.add_argument("--exam-every", type=int, default=10, help="steps")
    parser.add_argument(
        "--starts", type=int, default=0, help="different tasks that training begins at; 0: all there are"
    )
    parser.add_argument("--far", type=int, default=0, help="fewest right moves of a task in training and exam")
    parser.add_argument(
        "--count-states", action="store_true", help="tell which states the training episodes of each arm pass"
    )
    parser.add_argument("--rows", type=int, default=1500, help="episodes that the expert learns")
    parser.add_argument("--base-steps", type=int, default=120, help="training of the base: few, so that it plays badly")
    parser.add_argument("--expert-steps", type=int, default=900)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--quick", action="store_true", help="two steps of every arm with one seed")
    args = parser.parse_args()
    if "replay" in args.arms and (args.starts or args.far):
        parser.error("--arms: replay begins at prefixes of all tasks; leave it out with --starts and --far")
    if args.quick:
        small = {"seeds": [0], "max_steps": 2, "samples": 4, "exam": 4, "exam_every": 1, "rows": 40, "over_steps": 2}
        vars(args).update(small | {"base_steps": 3, "expert_steps": 3, "tokens": NO_END})
    if args.lr_scheduler_type != "constant":
        args.tokens = NO_END
    args.work = args.work.absolute()
    return args


def main() -> None:
    args = parsed()
    facts = machine(os.cpu_count() or 1, *PACKAGES)
    prepare(args)
    results: list[Result] = []
    for seed in args.seeds:
        for arm in args.arms:
            results.append(off_policy(args, seed) if arm == OFF_POLICY else on_policy(args, arm, seed))
            print(f"{arm}, seed {seed}: {results[-1].by_share}", flush=True)
            if args.json:
                asked = {name: str(value) for name, value in vars(args).items()}
                data = {"machine": facts, "arguments": asked, "results": [asdict(result) for result in results]}
                atomic_write_text(args.json, json.dumps(data, indent=2) + "\n")
    print(table(results, references(args)))


if __name__ == "__main__":
    main()
