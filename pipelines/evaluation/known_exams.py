"""A cache of exams of start student and experts: an exam that this or another run took under the same facts is not repeated.

The merged model's exam is never cached. Nor is an exam that runs the user's code (a verifier, an environment, an agent's
program, a rollout engine), because no hash covers what that code depends on.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

import opd
from experts.bound_files import TOKENIZER_FILES, file_hashes
from experts.model_dir import ModelInfo
from opd.cluster import LOCAL, list_nodes, worker_env
from opd.config import PipelineConfig
from opd.evaluation.cache import ExamCache, exam_cache_dir
from opd.evaluation.evaluator import DomainExam
from opd.files import blake3_file
from opd.records.scores import Evaluation
from opd.settings.user_objects import is_import_name
from pipelines.cores import roles_at_once
from pipelines.merging.manifest import library_versions
from pipelines.sizing.machine import list_gpus

Measure = Callable[[Sequence[str]], Evaluation]
"""Takes the exams of the named domains."""
GPU_KIND = "accelerator_type:"
"""Prefix of Ray's name of a resource that says which GPUs a node has."""
ANSWERS_ALIKE = {"n", "temperature", "max_new_tokens"}
"""Keys of `rollout` that are about training; exams have their own."""


class KnownExams:
    """The cache of one pipeline's exams that are asked and answered in the tokens of one model."""

    def __init__(
        self,
        config: PipelineConfig,
        reader: ModelInfo,
        exams: Mapping[str, DomainExam],
        run: Path,
        tell: Callable[[str], None],
    ) -> None:
        """`reader`: the model whose tokens `exams` are in."""
        root = exam_cache_dir() if config.evaluate.cache else None
        self._cache = None if root is None or is_import_name(config.rollout.engine) else ExamCache(root, tell)
        self._device = _device_kind(config) if self._cache else None
        self._config, self._reader, self._exams, self._run = config, reader, exams, run
        self._common: dict[str, Any] | None = None

    def measure_or_reuse(self, model: str, domains: Sequence[str], measure: Measure) -> Evaluation:
        """Return a model's exams on these domains, from the cache or taken now in one batch. `model` is the digest of the
        model."""
        if self._cache is None or self._device is None or not domains or not all(map(self._is_cacheable, domains)):
            return measure(domains)
        facts = {"model": model, "domains": [self._domain_facts(name) for name in domains], **self._shared_facts()}
        evaluation = self._cache.find(facts)
        if evaluation is None:
            evaluation = measure(domains)
            self._cache.keep(facts, evaluation, self._run)
        return evaluation

    def _is_cacheable(self, domain: str) -> bool:
        exam = self._config.domains[domain].eval
        assert exam is not None, "only domains with an exam are measured"
        verifier = exam.verifier if isinstance(exam.verifier, str) else exam.verifier.kind
        return not self._config.domains[domain].has_episodes and verifier not in ("python", "judge")

    def _domain_facts(self, name: str) -> dict[str, Any]:
        """Return the questions and verifier of a domain."""
        exam = self._config.domains[name].eval
        assert exam is not None, "only domains with an exam are measured"
        questions = json.dumps([asdict(prompt) for prompt in self._exams[name].prompts], sort_keys=True)
        return {
            "name": name,
            "questions": blake3(questions.encode()).hexdigest(),
            "verifier": exam.model_dump(mode="json")["verifier"],
        }

    def _shared_facts(self) -> dict[str, Any]:
        """Return the facts that all exams of the pipeline have in common."""
        if self._common is None:
            config, reader = self._config, self._reader
            exam = config.evaluate
            self._common = {
                "tokenizer": file_hashes(Path(reader.path), TOKENIZER_FILES),
                "end_tokens": sorted(reader.eos_token_ids),
                "engine": config.rollout.model_dump(mode="json", exclude=ANSWERS_ALIKE)
                | {"shares_prompts": config.rollout.shares_prefixes, "gpus": config.cluster.rollout_gpus}
                | worker_env(config.rollout.workers, roles_at_once(config)),
                "answers": exam.model_dump(mode="json", include={"n", "temperature", "pass_at"})
                | {"max_new_tokens": exam.max_new_tokens or config.rollout.max_new_tokens}
                | {"seed": config.seed if exam.temperature else None},
                "device": self._device,
                "versions": library_versions("reasoning-gym"),
                "source": source_digest(),
            }
        return self._common


def _device_kind(config: PipelineConfig) -> str | None:
    """Return the kind of device that computes the answers, because kinds round differently; None if it cannot be told."""
    if not config.cluster.rollout_gpus:
        return platform.machine()
    if config.cluster.address == LOCAL:
        kinds = {gpu.name for gpu in list_gpus()}
    else:
        kinds = {name for node in list_nodes() for name in node.has if name.startswith(GPU_KIND)}
    return kinds.pop() if len(kinds) == 1 else None


def source_digest() -> str:
    """Return the digest of this package's own code: verifiers, engines, and how answers become scores."""
    root = Path(opd.__file__).parent
    files = {file.relative_to(root).as_posix(): blake3_file(file) for file in sorted(root.rglob("*.py"))}
    return blake3(json.dumps(files).encode()).hexdigest()
