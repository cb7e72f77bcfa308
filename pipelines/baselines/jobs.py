"""Turn the options of `opd baseline`, methods, shares and seed, into a list of results to compute.

RUN_DIR/baselines/NAME.json      a result; an existing one is not computed again
RUN_DIR/baselines/models/NAME    its model, removed after the evaluation unless it is kept
RUN_DIR/baselines/runs/NAME      method `opd` with fewer steps: a run directory, removed likewise
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig, load_run_pipeline
from opd.config.evaluate import LMEvalConfig
from opd.errors import ConfigError, RunDirError
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths
from opd.settings.suggestions import did_you_mean
from opd.text import quote_for_shell
from pipelines.baselines.weights import WEIGHT_METHODS
from pipelines.merging.changes import accept_changes

TRAINED_METHODS = {"off_policy": "Off-policy", "mixed_sft": "Mixed SFT", "opd": "On-policy"}
"""Method -> label, for methods that train: they can have a share of the merge's training."""
METHODS = (*WEIGHT_METHODS, *TRAINED_METHODS)
MAX_SEEDS = 10
"""Most seeds of a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineJob:
    """One result to compute."""

    method: str
    share: float | None
    """Share of the merge's steps; None for merges of weights."""
    config: PipelineConfig
    """The pipeline with the share's number of steps, and the seed."""
    root: Path
    """The run directory that gets the result."""
    name: str
    budget: Mapping[str, float] | None
    """Response tokens to train on, by domain; None without a merge to compare with."""
    own_run: bool
    """True if the run directory's own merge gives this result."""

    @property
    def result(self) -> Path:
        return RunPaths(self.root).baseline_file(self.name)

    @property
    def model(self) -> Path:
        return RunPaths(self.root).baseline_model(self.name)

    @property
    def shorter_run(self) -> RunPaths:
        """Run directory of method `opd` with fewer steps than the run directory's own merge."""
        return RunPaths(self.root).baseline_run(self.name)

    @property
    def merge(self) -> RunPaths:
        """Run directory of method `opd`."""
        return RunPaths(self.root) if self.own_run else self.shorter_run


def parse_methods(text: str) -> list[str]:
    """Parse comma-separated methods. Raises: ConfigError."""
    methods = [name.strip() for name in text.split(",")]
    for name in methods:
        if name not in METHODS:
            raise ConfigError.at(
                "--method",
                found=repr(name),
                wanted=f"one of: {', '.join(METHODS)}",
                fix=did_you_mean(name, METHODS, "choose one of them"),
            )
    return list(dict.fromkeys(methods))


def parse_shares(text: str) -> list[float]:
    """Parse comma-separated shares of the merge's training. Raises: ConfigError unless 0 < share <= 1."""
    shares = []
    for part in text.split(","):
        try:
            share = float(part)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ConfigError.at(
                "--share", found=repr(part), wanted="numbers above 0, at most 1", fix="for example --share 0.1,0.3,1"
            )
        shares.append(share)
    return list(dict.fromkeys(shares))


def parse_seeds(text: str) -> list[int]:
    """Parse comma-separated seeds. Raises: ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    seeds = [int(part) for part in parts if part.isdecimal()]
    if len(set(seeds)) < len(parts) or len(parts) > MAX_SEEDS:  # by number: `1,01` is one seed twice
        raise ConfigError.at(
            "--seeds",
            found=repr(text),
            wanted=f"whole numbers, each once, at most {MAX_SEEDS}",
            fix="for example --seeds 0,1,2",
        )
    return seeds


def scale_steps(config: PipelineConfig, share: float) -> PipelineConfig:
    """Return the same merge in a share of its steps: warm-up and decay shrink with them."""
    trainer = config.trainer
    fewer: dict[str, Any] = {"steps": max(1, round(share * trainer.steps))}
    fewer |= {"warmup_steps": round(share * trainer.warmup_steps), "extended": trainer.extended if share == 1 else ()}
    # What is looked at on the way belongs to the whole merge.
    evaluate = {"every": 0, "lm_eval": LMEvalConfig()}
    return config.model_copy(
        update={"trainer": trainer.model_copy(update=fewer), "evaluate": config.evaluate.model_copy(update=evaluate)}
    )


def plan_jobs(
    config: PipelineConfig, root: Path, methods: Sequence[str], shares: Sequence[float] | None, seed: int | None
) -> list[BaselineJob]:
    """Return the results to compute, in order. `shares` default to the whole training, `seed` to the pipeline's.

    Raises: ConfigError for several rounds, or shares of methods that train nothing; RunDirError for a run directory that has no
    metrics.
    """
    refuse_rounds(config)
    trained_methods = [method for method in methods if method in TRAINED_METHODS]
    if shares is not None and not trained_methods:
        raise ConfigError.at(
            "--share",
            found=f"with --method {','.join(methods)}",
            wanted=f"a method that trains: {', '.join(TRAINED_METHODS)}",
            fix="leave out --share: a merge of weights has no tokens",
        )
    per_step = tokens_per_step(root) if trained_methods else None
    own_seed = seed is None or seed == config.seed
    own_merge = RunPaths(root).pipeline.exists()
    jobs = []
    for method in methods:
        for share in (shares or [1.0]) if method in trained_methods else [None]:
            job_config, budget = config, None
            if share is not None:
                job_config = scale_steps(config, share)
                budget = per_step and {name: tokens * job_config.trainer.steps for name, tokens in per_step.items()}
            parts = [method, "" if share is None else f"-{share:g}", "" if own_seed else f"-seed-{seed}"]
            jobs.append(
                BaselineJob(
                    method=method,
                    share=share,
                    config=job_config if seed is None else job_config.model_copy(update={"seed": seed}),
                    root=root,
                    name="".join(parts),
                    budget=budget,
                    own_run=method == "opd" and share == 1 and own_seed and own_merge,
                )
            )
    return jobs


def refuse_rounds(config: PipelineConfig) -> None:
    """Refuse a pipeline of several rounds: a baseline is compared with one merge, from one student. Raises: ConfigError."""
    if config.rounds != 1:
        raise ConfigError.at(
            "rounds",
            found="several",
            wanted="a pipeline of one round, which other methods can be compared with",
            fix="--set rounds=1, or give the run directory of a round",
        )


def tokens_per_step(root: Path) -> dict[str, float] | None:
    """Return the trained response tokens of each domain in a mean step of the directory's merge; None if it has none yet.

    Raises: RunDirError for a merge that has not taken a step.
    """
    paths = RunPaths(root)
    records = MetricsFile(paths.metrics).read()
    if not records and paths.pipeline.exists():
        raise RunDirError.at(
            paths.metrics,
            found="no steps",
            wanted="the metrics of a merge: baselines get as many tokens as it trained on",
            fix=f"`opd merge --resume {quote_for_shell(root)}`",
        )
    if not records:
        return None
    sums: Counter[str] = Counter()
    for record in records:
        sums.update({name: domain.tokens for name, domain in record.domains.items()})
    return {name: tokens / len(records) for name, tokens in sums.items()}


def open_run(root: Path, overrides: list[str] | None = None) -> PipelineConfig:
    """Return the pipeline of a run directory of one round. `overrides` may change what a resume may change, except the steps.

    Raises: RunDirError, ConfigError.
    """
    paths = RunPaths(root)
    if paths.rounds.exists():
        raise RunDirError.at(
            root,
            found="a merge in several rounds",
            wanted="one round, which other methods can be compared with",
            fix=f"give the run directory of a round, such as {paths.round_dir(1).root}",
        )
    if not paths.pipeline.exists() or not paths.metrics.exists():
        missing = paths.metrics if paths.pipeline.exists() else paths.pipeline
        raise RunDirError.at(
            root,
            found=f"no {missing.name}",
            wanted="the run directory of a merge, or a pipeline",
            fix="check the path, or give the pipeline; its steps and samples then say how much is trained",
        )
    merged, config = load_run_pipeline(paths.pipeline), load_run_pipeline(paths.pipeline, overrides)
    if config.trainer.steps != merged.trainer.steps:
        raise ConfigError.at(
            "--set trainer.steps",
            found=str(config.trainer.steps),
            wanted=f"{merged.trainer.steps}, the steps of the merge that is compared with",
            fix="leave it out; --share takes a part of them",
        )
    accept_changes(merged.model_dump(mode="json"), config.model_dump(mode="json"), paths.pipeline)
    return config
