"""The names of all files in a run directory, and in a directory of several runs. No other module spells them out.

    RUN_DIR/
      pipeline.yaml   manifest.json             what the merge is, by name and by content
      metrics.jsonl   layouts.json              numbers of each step; how each teacher's and the trainer's rows are laid out
      targets/        checkpoints/              what a resume needs
      judged.jsonl    texts.jsonl               answers of the guard's judge, and of experts that only write text, so that
                                                neither is asked twice
      evaluation/     NAME.json each            before, expert, after, step-NNNNNN; matrix, lm-eval
      monitors/       step-NNNNNN.json each     readings of a monitor that acted after this step, with samples
      traces/         step-NNNNNN.json each     some episodes of a few steps, turn by turn
      student/                                  the student as the merge begins, if it is to share indexers
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


class Entry:
    """A file or directory of fixed name, as an attribute of a class with a `root`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths | ComparisonPaths, owner: type) -> Path:
        return paths.root / self._name


@dataclass(frozen=True, slots=True)
class RunPaths:
    """One run directory."""

    root: Path

    pipeline = Entry("pipeline.yaml")
    next_pipeline = Entry(".pipeline.yaml.next")
    """The new pipeline of a resume; it is renamed to `pipeline` as soon as the manifest describes it."""
    manifest = Entry("manifest.json")
    metrics = Entry("metrics.jsonl")
    layouts = Entry("layouts.json")
    probes = Entry("probes.json")
    """Probes of experts that the pipeline names by their paths."""
    targets = Entry("targets")
    judge_answers = Entry("judged.jsonl")
    """The answers of the guard's judge in this run."""
    texts = Entry("texts.jsonl")
    """The answers of experts that only write text in this run."""
    scores = Entry("scores.jsonl")
    """The answers of judges that score responses in this run."""
    checkpoints = Entry("checkpoints")
    student = Entry("student")
    """The student with the pattern of `student.indexers`; only if its own files have another one."""
    model = Entry("model")
    adapter = Entry("adapter")
    """The adapter that LoRA trained, in PEFT's files; only if the pipeline asks for it beside the model."""
    report = Entry("report.json")
    report_page = Entry("report.html")
    lock = Entry(".lock")
    """The file that `opd merge` locks while it works here."""
    live = Entry(".live.json")
    """The file that tells `opd status` what `opd merge` does here at this moment, or how it ended."""
    tensorboard = Entry("tensorboard")
    wandb_id = Entry("wandb/id")
    """The name under which Weights & Biases knows the run; the service keeps its own files beside it."""
    mlflow_id = Entry("mlflow-run-id")
    """The name under which MLflow knows the run."""
    evaluation = Entry("evaluation")
    monitors = Entry("monitors")
    traces = Entry("traces")
    matrix = Entry("evaluation/matrix.json")
    lm_eval = Entry("evaluation/lm-eval.json")
    baselines = Entry("baselines")
    baselines_lock = Entry("baselines/.lock")
    """The file that `opd baseline` locks while it works here."""
    baseline_models = Entry("baselines/models")
    rounds = Entry("rounds.json")
    """The file with the pipeline of each round; only a merge in several rounds has it."""

    @property
    def is_run(self) -> bool:
        """True if `opd merge` made this directory. A pipeline file alone proves nothing: it may lie anywhere."""
        return self.manifest.is_file() and self.pipeline.is_file()

    def scratch_path(self, name: str) -> Path:
        """Return a temporary path for something that is renamed when it is complete.

        If the process is killed, `opd.files.sweep_temporary_files` deletes what it left there.
        """
        return self.root / f".tmp-{name}"

    def evaluation_file(self, name: str) -> Path:
        """Return the file of an evaluation: one of `MERGE_EVALUATIONS`, or the `step_name` of one during the merge."""
        return self.evaluation / f"{name}.json"

    def evaluations_by_step(self) -> dict[int, Path]:
        """Return step -> file of the evaluations during the merge, in order."""
        return _list_by_step(self.evaluation)

    def alarms_file(self, step: int) -> Path:
        """Return the file with the readings of the monitors that acted after this step."""
        return self.monitors / f"{step_name(step)}.json"

    def alarms_by_step(self) -> dict[int, Path]:
        """Return step -> file, in order."""
        return _list_by_step(self.monitors)

    def trace_file(self, step: int) -> Path:
        """Return the file with the episodes that were kept of this step."""
        return self.traces / f"{step_name(step)}.json"

    def traces_by_step(self) -> dict[int, Path]:
        """Return step -> file, in order."""
        return _list_by_step(self.traces)

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

    numbers = Entry("comparison.json")
    table = Entry("comparison.md")
    picture = Entry("comparison.svg")

    def seed_dir(self, number: int) -> RunPaths:
        return RunPaths(self.root / f"seed-{number}")

    def seed_dirs(self) -> list[RunPaths]:
        """Return the run directories that exist, by name."""
        return [RunPaths(path) for path in sorted(self.root.glob("seed-*"))]
