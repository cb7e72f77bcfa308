"""The parts of a merge as the loop sees them. `pipelines.build` chooses the classes behind these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opd.evaluation.scores import Evaluation
from opd.types import Completion, Prompt, PushReport, Rollout, RolloutBatch, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSet:
    """One step's scored rows, as handles: the driver never touches the hidden states."""

    streams: tuple[Any, ...]
    """One handle per scoring worker to an Arrow IPC stream (see `opd.stream.schema`)."""
    heads: Mapping[str, Any]
    """Content hash of an output head -> handle to the head matrix [V, D], for every head the rows name. A rank fetches
    what it needs and does not hold."""
    head_rules: Mapping[str, Any]
    """Content hash of an output head -> its `LogitRule`."""
    quarantined: Mapping[str, str]
    """Sample id -> why its teacher's scores cannot be used; such a sample is not trained."""
    restarted: tuple[str, ...] = ()
    """Scoring workers that died and were started again; their rows were scored a second time."""
    rows: int
    """Rows of the samples that are not quarantined, over all streams: one for each teacher of a sample."""


class PromptSource(Protocol):
    def take(self, step: int) -> Sequence[Prompt]:
        """The step's prompts, every domain among them: a pure function of (seed, step), so a resume needs no cursor."""
        ...


class RolloutEngine(Protocol):
    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        """Sample one response per prompt. Prompts that do not fit the context come back as quarantined."""
        ...

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        """`n` answers to each prompt side by side, in the order of `prompts`; at temperature 0 they are greedy, else
        each has a seed of its prompt's id and its number. A prompt that does not fit gets empty answers."""
        ...

    def load(self, model_dir: Path) -> None:
        """Hold the weights of this Hugging Face directory in every worker, caches reset."""
        ...

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """[worker][sequence][token - 1] log-prob of each token after the first, given those before it."""
        ...


class TeacherPool(Protocol):
    def score(self, rollouts: Sequence[Rollout]) -> TargetSet:
        """Every rollout scored by the teacher of its domain."""
        ...


class TargetLog(Protocol):
    def write(self, step: int, targets: TargetSet) -> Path:
        """Store a step's streams on disk, whole or not at all."""
        ...

    def prune(self, step: int) -> None:
        """Drop the steps up to `step`: a checkpoint holds what they taught."""
        ...


class Trainer(Protocol):
    def train_step(self, step: int, rollouts: Sequence[Rollout], targets: TargetSet) -> StepReport:
        """One optimiser step over all rows."""
        ...

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """[sequence][token - 1] as in RolloutEngine, from the weights being trained."""
        ...

    def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory (config and safetensors)."""
        ...

    def save(self, path: Path) -> None:
        """Write weights and optimiser state, without pickle, into an existing directory."""
        ...

    def load(self, path: Path) -> None:
        """Restore what `save` wrote."""
        ...


class WeightSync(Protocol):
    def push(self, version: int) -> PushReport:
        """Bring the trainer's weights to every engine and prove it on the probe tokens. Raises: RunError."""
        ...


class Evaluator(Protocol):
    def evaluate(self, domains: Sequence[str] | None = None, *, model: str) -> Evaluation:
        """The weights that the rollout engine holds now, on the named domains or all; `model` names them for people."""
        ...


class Checkpoints(Protocol):
    def save(self, step: int, policy_version: int) -> None:
        """Write a checkpoint of this step, then drop the oldest beyond the limit."""
        ...


class Reporter(Protocol):
    """Where a run's numbers go: metrics file, evaluation files, progress on the terminal."""

    def step(self, record: Mapping[str, Any]) -> None: ...

    def evaluation(self, name: str, found: Evaluation) -> None: ...
