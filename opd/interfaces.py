"""The parts of a merge as the loop sees them. `pipelines.build` chooses the classes behind these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from opd.evaluation.scores import Evaluation
from opd.step_record import StepRecord
from opd.types import (
    Completion,
    LayoutProof,
    Prompt,
    PushReport,
    Rollout,
    RolloutBatch,
    SavedCheckpoint,
    StepReport,
    WrittenFile,
)

if TYPE_CHECKING:  # they need pyarrow and torch, which those who only name them do not
    from opd.stream.heads import HeadSource
    from opd.stream.targets import TargetStream


class PromptSource(Protocol):
    def take(self, step: int) -> Sequence[Prompt]:
        """The step's prompts, every domain among them: a function of (seed, step) and the records of the steps before, and of
        nothing else, so a resume needs no cursor."""
        ...


class RolloutEngine(Protocol):
    def generate(self, prompts: Sequence[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
        """Sample one response per prompt. Prompts that do not fit the context come back as quarantined."""
        ...

    def answer(self, prompts: Sequence[Prompt], *, n: int = 1, temperature: float = 0.0) -> list[Completion]:
        """`n` answers to each prompt side by side, in the order of `prompts`; at temperature 0 they are greedy, else
        each has a seed of its prompt's id and its number. A prompt that does not fit gets empty answers."""
        ...

    def load(self, model_dir: Path, again: Callable[[], AbstractContextManager[Path]] | None = None) -> None:
        """Hold the weights of this Hugging Face directory in every worker, caches reset. Where the directory goes away,
        `again` makes another one with the same weights, for a worker that died."""
        ...

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """[worker][sequence][token - 1] log-prob of each token after the first, given those before it."""
        ...


class TeacherPool(Protocol):
    layouts: dict[str, LayoutProof]
    """By teacher's name, how its rows share a forward pass; of those that this pool computes itself, once it is ready."""

    def score(self, rollouts: Sequence[Rollout]) -> TargetStream:
        """Have every rollout scored by the teachers of its domain; rows come while they are at it."""
        ...

    def heads(self) -> Mapping[str, HeadSource]:
        """Every output head that rows of this pool can name, by content hash."""
        ...


class TargetLog(Protocol):
    def replay(
        self, step: int, policy_version: int, prompts: Sequence[Prompt]
    ) -> tuple[RolloutBatch, TargetStream] | None:
        """What `record` stored of this step, if all of it is there and answers this question; else None, and the log
        forgets the step and all later ones."""
        ...

    def record(
        self, step: int, policy_version: int, prompts: Sequence[Prompt], batch: RolloutBatch, targets: TargetStream
    ) -> None:
        """Store a step's parts on disk as they pass, all or none: before the last row is trained, all are there.

        Taking parts raises: StorageError.
        """
        ...

    def prune(self, step: int) -> None:
        """Drop the steps up to `step`: a checkpoint holds what they taught."""
        ...


class Trainer(Protocol):
    layout: LayoutProof
    """How the student's rows share a forward pass, once the trainer is ready."""

    def train_step(self, step: int, rollouts: Sequence[Rollout], targets: TargetStream) -> StepReport:
        """One optimiser step over the rows of all rollouts that are not quarantined; takes every part of `targets`."""
        ...

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """[sequence][token - 1] as in RolloutEngine, from the weights being trained."""
        ...

    def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face directory (config and safetensors)."""
        ...

    def begin_save(self, path: Path) -> None:
        """Copy weights and optimiser state; they are written, without pickle, into an existing directory meanwhile."""
        ...

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        """The files of the last `begin_save`, synced; None if they are not all written after `wait_s`.

        Raises: StorageError.
        """
        ...

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote, by whatever number of ranks."""
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
        """Begin a checkpoint of this step, after the end of one that is under way. Raises: as `committed`."""
        ...

    def committed(self, wait: bool) -> SavedCheckpoint | None:
        """The newest checkpoint that was committed since the last call, of one under way only if it `wait`s.

        Raises: StorageError; RunError past the deadline.
        """
        ...


class Decoder(Protocol):
    """The one method of a tokenizer that makes token ids readable."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Display(Protocol):
    """What a person sees while a run goes on."""

    def say(self, line: str) -> None: ...

    def step(self, step: int, summary: str) -> None: ...


class Sink(Protocol):
    """A place for the numbers of each step."""

    def step(self, record: StepRecord) -> None: ...


class Reporter(Sink, Protocol):
    """Where a run's numbers go: metrics file, evaluation files, progress on the terminal."""

    def evaluation(self, name: str, found: Evaluation) -> None: ...
