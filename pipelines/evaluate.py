"""`opd evaluate`: one engine, one model, every exam of a pipeline."""

from __future__ import annotations

from pathlib import Path

from experts.model_dir import inspect_model
from opd.cluster import ray_session
from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.evaluation.evaluator import EngineEvaluator
from opd.rollouts.vllm import VLLMRolloutEngine
from pipelines.preflight import load_exams, load_tokenizer


def evaluate_model(config: PipelineConfig, model_dir: Path, domains: list[str] | None) -> dict[str, float]:
    """Accuracy in 0..1 per domain. Raises: OpdError before the engine starts; RunError if it fails."""
    measured = [name for name, domain in config.domains.items() if domain.eval]
    for name in domains or []:
        if name not in measured:
            raise ConfigError.at(
                "--domains", found=name, wanted=f"domains with an eval: {', '.join(measured)}", fix="correct the name"
            )
    info = inspect_model(model_dir)
    tokenizer = load_tokenizer(model_dir)
    exams = load_exams(config, tokenizer, domains)
    with ray_session(config.cluster, config.rollout.workers):
        engine = VLLMRolloutEngine(config, model_dir, info.eos_token_ids, tokenizer)
        engine.wait_ready()
        return EngineEvaluator(engine, exams).evaluate()
