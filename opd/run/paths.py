"""The names of all files in a run directory, and in a directory of several runs. No other module spells them out.

    RUN_DIR/
      pipeline.yaml   manifest.json             what the merge is, by name and by content
      metrics.jsonl   layouts.json              numbers of each step; how each teacher's and the trainer's rows are laid out
      targets/        checkpoints/              what a resume needs
      judged.jsonl                              answers of the guard's judge, so that it is not asked twice
      evaluation/     NAME.json each            before, expert, after, step-NNNNNN; matrix, lm-eval
      monitors/       step-NNNNNN.json each     readings of a monitor that acted after this step, with samples
      traces/         step-NNNNNN.json each     some episodes of a few steps, turn by turn
      model/          adapter/                  the merged model
      report.json     report.html               what the merge gained
      baselines/      NAME.json each            results of other ways to merge; their models/NAME/ and runs/NAME/ while needed
      tensorboard/    wandb/  mlflow-run-id     the same numbers for other tools
      rounds.json     round-1/ round-2/ ...     of a merge in several rounds: a run directory for each
      .lock           .live.json                which process is at work here, and what it does
      .pipeline.yaml.next                       for a moment, while a resume changes pipeline.yaml and manifest.json

The files inside `targets/step-NNNNNN/` and `checkpoints/step-NNNNNN/` belong to `opd.stream.log` and `opd.run.checkpoints`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MERGE_EVALUATIONS = ("before", "expert", "after")
"""Evaluations of a finished merge: the student as it started, each domain's expert, and the merged model."""

_STEP = re.compile(r"step-(\d{6,})")
_ROUND = re.compile(r"round-[1-9]\d*")


def step_name(step: int) -> str:
    """Return the name of a file or directory of one step."""
    return f"step-{step:06d}"


def parse_step_name(name: str) -> int | None:
    """Return the step whose `step_name` this is; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _list_by_step(directory: Path) -> dict[int, Path]:
    """Return step -> the JSON file of that step in a directory, in order."""
    paths = {parse_step_name(path.stem): path for path in directory.glob("step-*.json")}
    return {step: paths[step] for step in sorted(step for step in paths if step is not None)}


@dataclass(frozen=True, slots=True)
class RunPaths:
    """One run directory."""

    root: Path

    @property
    def is_run(self) -> bool:
        """True if `opd merge` made this directory. A pipeline file alone proves nothing: it may lie anywhere."""
        return self.manifest.is_file() and self.pipeline.is_file()

    @property
    def pipeline(self) -> Path:
        return self.root / "pipeline.yaml"

    @property
    def next_pipeline(self) -> Path:
        """The new pipeline of a resume; it is renamed to `pipeline` as soon as the manifest describes it."""
        return self.root / ".pipeline.yaml.next"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def layouts(self) -> Path:
        return self.root / "layouts.json"

    @property
    def probes(self) -> Path:
        """Probes of experts that the pipeline names by their paths."""
        return self.root / "probes.json"

    @property
    def targets(self) -> Path:
        return self.root / "targets"

    @property
    def judge_answers(self) -> Path:
        """The answers of the guard's judge in this run."""
        return self.root / "judged.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """The adapter that LoRA trained, in PEFT's files; only if the pipeline asks for it beside the model."""
        return self.root / "adapter"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def report_page(self) -> Path:
        return self.root / "report.html"

    @property
    def lock(self) -> Path:
        """The file that `opd merge` locks while it works here."""
        return self.root / ".lock"

    @property
    def live(self) -> Path:
        """The file that tells `opd status` what `opd merge` does here at this moment, or how it ended."""
        return self.root / ".live.json"

    def scratch_path(self, name: str) -> Path:
        """Return a temporary path for something that is renamed when it is complete.

        If the process is killed, `opd.files.sweep_temporary_files` deletes what it left there.
        """
        return self.root / f".tmp-{name}"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def wandb_id(self) -> Path:
        """The name under which Weights & Biases knows the run; the service keeps its own files beside it."""
        return self.root / "wandb" / "id"

    @property
    def mlflow_id(self) -> Path:
        """The name under which MLflow knows the run."""
        return self.root / "mlflow-run-id"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation"

    def evaluation_file(self, name: str) -> Path:
        """Return the file of an evaluation: one of `MERGE_EVALUATIONS`, or the `step_name` of one during the merge."""
        return self.evaluation / f"{name}.json"

    def evaluations_by_step(self) -> dict[int, Path]:
        """Return step -> file of the evaluations during the merge, in order."""
        return _list_by_step(self.evaluation)

    @property
    def monitors(self) -> Path:
        return self.root / "monitors"

    def alarms_file(self, step: int) -> Path:
        """Return the file with the readings of the monitors that acted after this step."""
        return self.monitors / f"{step_name(step)}.json"

    def alarms_by_step(self) -> dict[int, Path]:
        """Return step -> file, in order."""
        return _list_by_step(self.monitors)

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    def trace_file(self, step: int) -> Path:
        """Return the file with the episodes that were kept of this step."""
        return self.traces / f"{step_name(step)}.json"

    def traces_by_step(self) -> dict[int, Path]:
        """Return step -> file, in order."""
        return _list_by_step(self.traces)

    @property
    def matrix(self) -> Path:
        return self.evaluation_file("matrix")

    @property
    def lm_eval(self) -> Path:
        return self.evaluation_file("lm-eval")

    @property
    def baselines(self) -> Path:
        return self.root / "baselines"

    @property
    def baselines_lock(self) -> Path:
        """The file that `opd baseline` locks while it works here."""
        return self.baselines / ".lock"

    @property
    def baseline_models(self) -> Path:
        return self.baselines / "models"

    def baseline_file(self, name: str) -> Path:
        """Return the file of one result."""
        return self.baselines / f"{name}.json"

    def baseline_results(self) -> list[Path]:
        """Return the files of all results, by name."""
        return sorted(self.baselines.glob("*.json"))

    def baseline_model(self, name: str) -> Path:
        return self.baseline_models / name

    def baseline_run(self, name: str) -> RunPaths:
        """Return the run directory of the shorter merge behind a result."""
        return RunPaths(self.baselines / "runs" / name)

    @property
    def rounds(self) -> Path:
        """The file with the pipeline of each round; only a merge in several rounds has it."""
        return self.root / "rounds.json"

    def round_dir(self, number: int) -> RunPaths:
        """Return the run directory of a round, counted from 1."""
        return RunPaths(self.root / f"round-{number}")

    @property
    def merge_root(self) -> Path:
        """The run directory of the whole merge, which a user knows: the one around `root` if that is a round, else `root`."""
        all_rounds = RunPaths(self.root.absolute().parent)
        is_round = _ROUND.fullmatch(self.root.name) and all_rounds.rounds.is_file()
        return self.root.parent if is_round else self.root


@dataclass(frozen=True, slots=True)
class ComparisonPaths:
    """The directory of `opd compare`: a run directory for each seed, and the results over all seeds."""

    root: Path

    def seed_dir(self, number: int) -> RunPaths:
        return RunPaths(self.root / f"seed-{number}")

    def seed_dirs(self) -> list[RunPaths]:
        """Return the run directories that exist, by name."""
        return [RunPaths(path) for path in sorted(self.root.glob("seed-*"))]

    @property
    def numbers(self) -> Path:
        return self.root / "comparison.json"

    @property
    def table(self) -> Path:
        return self.root / "comparison.md"

    @property
    def picture(self) -> Path:
        return self.root / "comparison.svg"
