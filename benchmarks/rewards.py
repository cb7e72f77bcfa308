"""The experts of `make rl` become one model in several ways, and what learns all domains from rewards at once without them.

    python -m benchmarks.rewards --seeds 0 1 2 --folder runs/rewards-ways --json rewards.json        after `make rl`
    python -m benchmarks.rewards --quick                             two steps of every arm: does everything run?
    python -m benchmarks.rewards --arms opd-beyond                   this one, and `opd`, by which the others are measured

All arms start from the same base. Four are merges of `rewards`: distillation alone, with the reward beside it, beyond the experts, and
both. One learns from rewards alone, `rewards-at-once`, until it has trained on as many tokens as the experts' trainings and the
merge together. The baselines take the experts and, where they train, the tokens of the merge with the same seed. Base and experts are
of one seed: the intervals are over what comes after them.

What `--folder` holds is not computed again, so the same command goes on after an interruption. Nothing here is chosen by its result,
so the questions are the exam's.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.budget import train_within
from benchmarks.machine import machine
from benchmarks.variants import (
    Outcome,
    Place,
    Variant,
    arguments,
    carry_out,
    given,
    measured,
    merge,
    opd,
    place,
    tell,
    written,
)
from experts.rl.spec import ReinforceSpec, load_training
from experts.spec import find_spec
from opd.files import atomic_write_text
from opd.records.scores import DomainScore, Evaluation
from opd.records.step import StepRecord
from opd.run import checkpoints
from opd.run.metrics import MetricsFile, count_steps_and_tokens
from opd.run.paths import RunPaths
from opd.settings.yaml_files import load_yaml
from pipelines import api
from pipelines.baselines.comparison import SeedMean
from pipelines.baselines.jobs import MAX_SEEDS, open_run, plan_jobs
from pipelines.baselines.run import compute_results
from pipelines.baselines.weights import WEIGHT_METHODS
from pipelines.catalog import find_pipeline
from pipelines.merging.results import read_progress
from pipelines.reinforce import build_pipeline

OPD = Variant("opd", ())
REWARD, BEYOND = "objective.reward.weight=0.5", "objective.extrapolate=1.25"
MERGES = (
    OPD,
    Variant("opd with reward", (REWARD,)),
    Variant("opd beyond", (BEYOND,)),
    Variant("opd beyond with reward", (BEYOND, REWARD)),
)
AT_ONCE = Variant("rewards at once", ())
BASELINES = ("off_policy", "linear", "task_arithmetic", "ties")
ARMS = (*(one.name.replace(" ", "-") for one in (*MERGES, AT_ONCE)), *BASELINES)
"""Arms that `--arms` chooses from."""
MARGIN = 1.1
"""`rewards at once` may take so many times the steps that it is expected to need: its responses may be shorter than the experts'."""
TINY = ("between", "number")
"""Domains of `--quick`: one of one turn, and a game."""
TINY_SPEC = "tiny-experts.yaml"
Records = Mapping[str, Sequence[StepRecord]]
"""Expert -> the steps of its training."""


def training_records(spec: ReinforceSpec) -> dict[str, list[StepRecord]]:
    """The steps of every expert's training. Raises: SystemExit if a training is not finished, or its directory is gone."""
    runs = {name: RunPaths(spec.runs / build_pipeline(spec, name).name) for name in spec.experts}
    found = {name: MetricsFile(paths.metrics).read() for name, paths in runs.items()}
    missing = [str(paths.root) for name, paths in runs.items() if not (paths.report.exists() and found[name])]
    if missing:
        raise SystemExit(f"no finished training in {', '.join(missing)}: `make rl` trains the experts")
    return found


def token_budget(experts: Records, merged: Sequence[StepRecord]) -> int:
    """Tokens that the experts' trainings and the merge have trained on."""
    return sum(count_steps_and_tokens(records)[1] for records in (*experts.values(), merged))


def tokens_per_step(experts: Records, samples: int) -> float:
    """Tokens of a step with as many samples of every domain, if responses are as long as in the experts' trainings."""
    responses = {name: sum(sum(r.prompts.values()) for r in records) for name, records in experts.items()}
    return samples * fmean(count_steps_and_tokens(records)[1] / responses[name] for name, records in experts.items())


def of_one_seed(args: argparse.Namespace, where: Place, seed: int, experts: Records) -> Iterator[Outcome]:
    """Every arm that is asked for with one seed, and `opd`, which has the exams of base and experts."""
    for variant in MERGES:
        if variant == OPD or variant.name.replace(" ", "-") in args.arms:
            yield merge(where, variant, seed, args.set)
    if AT_ONCE.name.replace(" ", "-") in args.arms:
        yield at_once(args, where, seed, experts)
    yield from baselines(where, seed, wanted(args.arms, first=seed == args.seeds[0]))


def wanted(arms: Sequence[str], first: bool) -> list[str]:
    """The baselines that are asked for; merges of weights, which no seed changes, with the first seed only."""
    asked = [name for name in BASELINES if name in arms]
    return [name for name in asked if first or name not in WEIGHT_METHODS or WEIGHT_METHODS[name].random]


def at_once(args: argparse.Namespace, where: Place, seed: int, experts: Records) -> Outcome:
    """Learn from rewards alone until the budget is spent.

    The rate decays over the planned steps, and a run under a decay must not end early. So it leaves a step before the budget, and a run
    that branches off takes that last step, at the end of its own decay.
    """
    file = written(_data(args, "rewards-at-once"), where.runs / "rewards-at-once.yaml", args)
    config = api.load_pipeline(file, [f"seed={seed}", *args.set])
    total = token_budget(experts, MetricsFile(where.run(OPD.name, seed).metrics).read())
    a_step = tokens_per_step(experts, config.trainer.samples_per_step)
    steps, enough = (3, 1) if args.quick else (ceil(MARGIN * total / a_step), round(total - a_step))
    begun = where.run(f"{AT_ONCE.name} until the last step", seed)
    trainer = config.trainer.model_copy(update={"steps": steps})
    train_within(enough, config.model_copy(update={"trainer": trainer}), begun)
    if begun.report.exists():
        print(f"{AT_ONCE.name}, seed {seed}: all {steps} steps were taken within the budget of {total:,} tokens")
        return against(where, AT_ONCE, seed, begun)
    last, ended = checkpoints.list_checkpoint_steps(begun.checkpoints)[-1], where.run(AT_ONCE.name, seed)
    settings = given(seed, args.set, [f"trainer.steps={last + 1}"])
    carry_out(where, ended, [str(file), "--from", f"{begun.root}@{last}", *settings])
    return against(where, AT_ONCE, seed, ended)


def against(where: Place, variant: Variant, seed: int, paths: RunPaths) -> Outcome:
    """The outcome of a run whose own teacher is no expert: measured by base and experts of the merge with this seed."""
    wall_s = json.loads(paths.report.read_text(encoding="utf-8"))["wall_s"]
    after = Evaluation.load(paths.evaluation_file("after")).scores
    return measured(variant, seed, references(where, seed) | {"after": after}, read_progress(paths.metrics)[1], wall_s)


def references(where: Place, seed: int) -> dict[str, dict[str, DomainScore]]:
    """The exams of base and experts."""
    run = where.run(OPD.name, seed)
    return {exam: Evaluation.load(run.evaluation_file(exam)).scores for exam in ("before", "expert")}


def baselines(where: Place, seed: int, methods: Sequence[str]) -> Iterator[Outcome]:
    """Other ways to use the same experts."""
    run = where.run(OPD.name, seed)
    for found in compute_results(plan_jobs(open_run(run.root), run.root, methods, None, None), print):
        exams = references(where, seed) | {"after": found.scores}
        yield measured(Variant(found.method, ()), seed, exams, found.tokens or 0, found.wall_s)


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each arm as Markdown: means over seeds with their 95 % intervals."""
    lines = [["arm", "mean success", "headroom", "domains above their expert", "trained tokens"]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for arm in dict.fromkeys(one.variant for one in outcomes):
        mine = [one for one in outcomes if one.variant == arm]
        known = [one.mean_headroom for one in mine if one.mean_headroom is not None]
        cells = [
            f"{SeedMean.from_values([success(one, 'after') for one in mine])}",
            f"{SeedMean.from_values(known)}" if known else "-",
            f"{SeedMean.from_values([len(one.above) for one in mine]):.1f}",
            f"{SeedMean.from_values([one.tokens for one in mine]):,.0f}",
        ]
        lines.append([arm, *cells])
    before, expert = (fmean(success(one, exam) for one in outcomes) for exam in ("before", "expert"))
    note = f"Mean success of the base: {before:.3f}; of the experts, each on its own domain: {expert:.3f}."
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{note}\n"


def success(one: Outcome, exam: str) -> float:
    """Mean over domains."""
    return fmean(one.accuracy[exam].values())


def save(args: argparse.Namespace, facts: dict[str, Any], experts: Records, outcomes: Sequence[Outcome]) -> None:
    """Write all figures so far."""
    data = {
        "machine": facts,
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "tokens_of_experts": {name: count_steps_and_tokens(records)[1] for name, records in experts.items()},
        "outcomes": [asdict(one) for one in outcomes],
    }
    atomic_write_text(args.json, json.dumps(data, indent=2) + "\n")


def tiny(folder: Path) -> dict[str, Any]:
    """Prompts, a base and two experts of two steps each; returns the pipeline that merges them."""
    asked = ("--output", "prompts/rewards", "--domains", ",".join(TINY), "--train", "40", "--eval", "8")
    opd(folder / "prompts.log", folder, "prompts", "make", "rewards", *asked)
    spec = tiny_spec(load_yaml(find_spec("rewards-experts")))
    (folder / TINY_SPEC).write_text(yaml.safe_dump(spec), encoding="utf-8")
    opd(folder / "experts.log", folder, "experts", "train", TINY_SPEC)
    return tiny_pipeline(load_yaml(find_pipeline("rewards")))


def tiny_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with two steps of two experts."""
    base, names = spec["base"], [file for file in spec["base"]["data"] if file.split("/")[2] in TINY]
    train = base["train"] | {"max_steps": 2, "per_device_train_batch_size": 8, "warmup_steps": 1}
    experts = {name: {key: v for key, v in spec["experts"][name].items() if key != "trainer"} for name in TINY}
    return _shorter(spec) | {"base": base | {"data": names, "train": train}, "experts": experts}


def tiny_pipeline(data: dict[str, Any]) -> dict[str, Any]:
    """The pipeline with two steps of two domains."""
    experts = {"use": list(TINY)} if "use" in data["experts"] else data["experts"]
    return _shorter(data) | {"experts": experts, "domains": {name: data["domains"][name] for name in TINY}}


def _shorter(data: dict[str, Any]) -> dict[str, Any]:
    few = {"ranks": 1, "steps": 2, "samples_per_step": 8, "warmup_steps": 1}
    return data | {"trainer": data["trainer"] | few, "evaluate": {"samples": 8}}


def _data(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """A shipped pipeline as it is, or tiny."""
    data = load_yaml(find_pipeline(name))
    return tiny_pipeline(data) if args.quick else data


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = arguments("Ways from experts by reinforcement to one model.")
    parser.set_defaults(pipeline="rewards", questions="exam", folder=Path("runs/rewards-ways"))
    parser.add_argument("--experts", default="rewards-experts", help="the spec that trained the experts")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    args = parser.parse_args(words)
    if len(set(args.seeds)) < len(args.seeds) or len(args.seeds) > MAX_SEEDS:
        parser.error(f"--seeds: each once, at most {MAX_SEEDS}")
    if args.quick:
        args.experts = TINY_SPEC
    if args.json:
        args.json = args.json.absolute()
    return args


def main() -> None:
    args = parsed()
    facts = machine(os.cpu_count() or 1, "torch", "transformers", "deepspeed", "ray")
    outcomes: list[Outcome] = []
    with place(args, tiny) as where, chdir(where.cwd):
        spec = load_training(find_spec(args.experts))
        if not isinstance(spec, ReinforceSpec):
            raise SystemExit(f"--experts {args.experts}: a spec of experts by reinforcement is wanted")
        experts = training_records(spec)
        for seed in args.seeds:
            for outcome in of_one_seed(args, where, seed, experts):
                outcomes.append(outcome)
                tell(outcome)
                if args.json:
                    save(args, facts, experts, outcomes)
    print(table(outcomes))


if __name__ == "__main__":
    main()
