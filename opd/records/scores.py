"""The result of an evaluation, stored as `RUN_DIR/evaluation/NAME.json`. Report and baselines read these files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from opd.errors import RunDirError
from opd.files import atomic_write_text
from opd.records.json_fields import make_record

T = TypeVar("T")
FORMAT = 1
"""Version of the file of an `Evaluation`; a file of another version is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthScore:
    """One model's score on the tasks of a domain that have similar lengths. A task's length is the number of moves that solve it."""

    fewest: int
    """Least length of these tasks."""
    most: int | None
    """Greatest length of these tasks; None: no limit."""
    questions: int
    accuracy: float
    """Mean score of these tasks, 0..1."""
    low: float
    """Lower end of the 95 % interval, 0..1."""
    high: float
    """Upper end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainScore:
    """One model's score on one domain."""

    accuracy: float
    """Mean score, 0..1 (pass@1): first over the answers to each question, then over the questions."""
    stderr: float
    """Standard error of `accuracy`. Questions count as independent draws; answers to the same question do not."""
    low: float
    """Lower end of the 95 % interval, 0..1."""
    high: float
    """Upper end."""
    questions: int
    samples: int = 1
    """Answers to each question."""
    pass_at: dict[str, float] = field(default_factory=dict)
    """k (as text, JSON's keys are text) -> unbiased pass@k."""
    mean_tokens: float = 0.0
    """Mean length of an answer, in tokens."""
    truncated: float = 0.0
    """Share of answers that ended at the token limit."""
    failed: int = 0
    """Answers whose verifier or environment failed."""
    turns: float | None = None
    """Mean turns of an episode; None in a domain without an environment."""
    invalid_calls: int = 0
    """Turns with a tool call that could not be made as it was written."""
    accepted_length: float | None = None
    """Mean number of tokens that a pass of the model wrote; None without a draft, and for episodes."""
    by_length: tuple[LengthScore, ...] = ()
    """Scores by length of the task, the shortest first. Empty if tasks do not tell their length, or an older release wrote the file."""
    by_question: tuple[float, ...] = ()
    """Mean score of the answers to each question, in the order of the exam, so that models can be compared question by question.
    Empty if an older release wrote the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One answer of the model to a prompt, for people to read."""

    domain: str
    prompt_id: str
    prompt: str
    """Decoded, with special tokens."""
    answer: str
    """The right answer, with which the verifier compares."""
    text: str
    """Text that the model answered."""
    score: float
    tokens: int = 0
    truncated: bool = False
    error: str = ""
    """Traceback of a verifier that raised, or the error that broke the episode; empty without one."""
    turns: int | None = None
    """Turns of the episode; None if the answer is a single response."""
    invalid_calls: int = 0
    """Turns with a tool call that could not be made as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One model's scores on all its domains."""

    model: str
    """Name of the model for readers: a path, `student before`, `expert`."""
    scores: dict[str, DomainScore]
    """Domain -> score."""
    answers: tuple[ScoredAnswer, ...] = ()
    """The first few answers of each domain, and of the others the first few wrong ones and the first few whose verifier raised."""
    step: int | None = None
    """Steps of the merge after which the model was evaluated; None if no merge made it, or an older release wrote the file."""
    tokens: int | None = None
    """Response tokens of those steps. None if `step` is None, and for evaluations during a merge: metrics.jsonl has that number."""
    weights: dict[str, str] = field(default_factory=dict)
    """Domain -> digest of the model that answered (of its config.json and weight files); only for models that are on disk."""
    cached: dict[str, str] = field(default_factory=dict)
    """Domain -> run and day of the result; only for results that were taken over from another run."""

    @property
    def accuracy(self) -> dict[str, float]:
        """Domain -> accuracy, 0..1."""
        return {domain: score.accuracy for domain, score in self.scores.items()}

    def covers(self, domain: str, digest: str) -> bool:
        """Return True if this evaluates the model with this digest on the domain. A file without the digest, as an older release wrote
        it, counts too."""
        return domain in self.scores and self.weights.get(domain, digest) == digest

    def as_text(self) -> str:
        """Return the text of its file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises: OSError."""
        atomic_write_text(path, self.as_text())

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        """Read what `save` wrote. Raises: OSError; RunDirError for a file that is damaged or of another format."""
        return load_result(path, FORMAT, cls.from_json)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """Make the evaluation from the parsed JSON of its file, or of a cache's entry. Raises: KeyError, TypeError if it has
        another form."""
        # `load` and the report have refused another format of a file before, with a message for users.
        assert data["format"] == FORMAT, f"evaluation file of format {data['format']}"
        return make_record(cls, data)


def load_result(path: Path, version: int, parse: Callable[[Mapping[str, Any]], T]) -> T:
    """Read a result's file of format `version`, and return the value that `parse` makes of its JSON.

    Raises: OSError; RunDirError for a file that is damaged or of another format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != version:
            raise ValueError(f"format {data['format']!r}")
        return parse(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirError.at(
            path,
            found=f"{type(error).__name__}: {error}",
            wanted="the file as this version of opd wrote it",
            fix="put it back, or move it away: what it held is then measured again",
        ) from None


def combine_evaluations(evaluations: Sequence[Evaluation], model: str) -> Evaluation:
    """Combine at least one evaluation into one. If several have a domain, the last of them counts.

    `step` and `tokens` are kept only if all evaluations agree on both. Answers are those of the evaluation that counts.
    """
    latest = {domain: evaluation for evaluation in evaluations for domain in evaluation.scores}
    training = {(evaluation.step, evaluation.tokens) for evaluation in evaluations}
    step, tokens = training.pop() if len(training) == 1 else (None, None)
    return Evaluation(
        model=model,
        scores={domain: evaluation.scores[domain] for domain, evaluation in latest.items()},
        answers=tuple(a for domain, evaluation in latest.items() for a in evaluation.answers if a.domain == domain),
        step=step,
        tokens=tokens,
        weights={
            domain: evaluation.weights[domain] for domain, evaluation in latest.items() if domain in evaluation.weights
        },
        cached={
            domain: evaluation.cached[domain] for domain, evaluation in latest.items() if domain in evaluation.cached
        },
    )
