"""Config to objects: the only place that knows every concrete class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.checkpoints import CheckpointStore
from opd.config import PipelineConfig, sync_tolerance
from opd.evaluation.evaluator import EngineEvaluator
from opd.interfaces import Sink
from opd.loop import Parts
from opd.metrics import MetricsFile
from opd.progress import Display, RunReporter
from opd.prompts import MixedPrompts, split_samples
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.stream.log import ArrowTargetLog
from opd.sync import SYNCS
from opd.sync.shared_memory import probe_sequences
from opd.train.deepspeed import DeepSpeedTrainer
from pipelines.preflight import Inputs
from teachers.flight.client import FlightPool
from teachers.pool import Pool

POOLS: dict[str, type[Pool] | type[FlightPool]] = {
    "transformers": Pool,
    "vllm": Pool,
    "openai": Pool,
    "flight": FlightPool,
}
"""By `teachers.engine`."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The run directory."""

    root: Path

    @property
    def pipeline(self) -> Path:
        return self.root / "pipeline.yaml"

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
    def evaluation(self) -> Path:
        return self.root / "evaluation"

    @property
    def lm_eval(self) -> Path:
        return self.evaluation / "lm-eval.json"

    @property
    def targets(self) -> Path:
        return self.root / "targets"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def report(self) -> Path:
        return self.root / "report.json"


def num_workers(config: PipelineConfig) -> int:
    """Processes that a merge runs beside the driver."""
    scoring = 0 if config.teachers.engine == "flight" else config.teachers.workers
    return config.rollout.workers + scoring + config.trainer.ranks


def build(
    config: PipelineConfig,
    inputs: Inputs,
    paths: RunPaths,
    shown: Display,
    identity: Mapping[str, Any],
    sinks: Sequence[Sink] = (),
) -> Parts:
    """Start every worker and put the merge together; `identity` goes into every checkpoint.

    Raises: RunError if a worker does not come up.
    """
    engine, trainer, pool = _start_workers(config, inputs)
    every_prompt = (p for prompts in zip(*inputs.prompts.values(), strict=False) for p in prompts)
    probe = probe_sequences(every_prompt, config.sync.probe_tokens, config.rollout.max_model_len)
    bytes_per_value = {"float32": 4, "bfloat16": 2}[config.trainer.dtype]
    return Parts(
        prompts=_prompt_source(config, inputs),
        engine=engine,
        teachers=pool,
        log=ArrowTargetLog(paths.targets, pool, inputs.student.vocab_size, shown.say),
        trainer=trainer,
        sync=SYNCS[config.sync.kind](
            trainer,
            engine,
            probe,
            tolerance=sync_tolerance(config),
            nbytes=inputs.student.parameters * bytes_per_value,
            tell=shown.say,
        ),
        evaluator=EngineEvaluator(engine, inputs.exams, config.evaluate, inputs.tokenizer, shown.say),
        checkpoints=CheckpointStore(
            paths.checkpoints,
            trainer,
            config.checkpoint,
            world_size=config.trainer.ranks,
            identity=identity,
            timeout_s=config.cluster.phase_timeout_s,
        ),
        reporter=RunReporter(MetricsFile(paths.metrics), paths.evaluation, shown, sinks),
    )


def _start_workers(
    config: PipelineConfig, inputs: Inputs
) -> tuple[VLLMRolloutEngine, DeepSpeedTrainer, Pool | FlightPool]:
    """Side by side, waited for one after the other, but for what has to come first. Raises: RunError."""

    def start_pool() -> Pool | FlightPool:
        return POOLS[config.teachers.engine](config, inputs.routes, inputs.student.vocab_size)

    elsewhere = start_pool() if config.teachers.engine == "flight" else None
    if elsewhere is not None:
        elsewhere.wait_ready()  # takes no core of ours: a wrong token is told before anything else is started
    engine = VLLMRolloutEngine(
        config,
        config.student.model,
        inputs.student.vocab_size,
        inputs.student.eos_token_ids,
        inputs.tokenizer,
        inputs.untrained,
    )
    if 0 < config.cluster.rollout_gpus < 1:
        engine.wait_ready()  # while vLLM measures its GPU, it takes for its own what others begin to hold there
    pool = elsewhere or start_pool()
    trainer = DeepSpeedTrainer(config, inputs.student.vocab_size)
    engine.wait_ready()
    trainer.wait_ready()
    pool.wait_ready()
    return engine, trainer, pool


def _prompt_source(config: PipelineConfig, inputs: Inputs) -> MixedPrompts:
    weights = {name: 1.0 if d.weight == "auto" else d.weight for name, d in config.domains.items()}
    return MixedPrompts(inputs.prompts, split_samples(config.trainer.samples_per_step, weights), config.seed)
