"""The result of an evaluation, stored as `RUN_DIR/evaluation/NAME.json`. Report and baselines read these files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from opd.errors import RunDirError
from opd.files import atomic_write_text
from opd.records.json_fields import check_types

T = TypeVar("T")
FORMAT = 1
"""Version of the file of an `Evaluation`; a file of another version is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthScore:
    """One model on a domain's tasks of similar length, counted in moves of the task's own solution: those of `fewest` to `most`
    right moves, both included."""

    fewest: int
    """Lower limit of this range, in right moves."""
    most: int | None
    """Upper limit of this range; None: no limit."""
    questions: int
    accuracy: float
    """Mean score of these tasks, 0..1."""
    low: float
    """Lower end of the 95 % interval, 0..1."""
    high: float
    """Upper end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainScore:
    """One model on one domain."""

    accuracy: float
    """Mean score in 0..1: over the questions, of the mean over each question's answers (pass@1)."""
    stderr: float
    """Standard error of `accuracy`; questions are the independent draws, not answers."""
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
    """Length of an answer in tokens."""
    truncated: float = 0.0
    """Share of answers that ended at the token limit."""
    failed: int = 0
    """Answers whose verifier or environment failed."""
    turns: float | None = None
    """Mean turns of an episode; None in a domain without an environment."""
    invalid_calls: int = 0
    """Turns with a tool call that could not be made as it was written."""
    by_length: tuple[LengthScore, ...] = ()
    """Episodes by right moves of the task, the shortest first; empty where tasks do not say how many, or an older release
    wrote the file."""
    by_question: tuple[float, ...] = ()
    """Mean score of each question's answers, in the order of the exam, so that models can be compared question by question; empty
    if an older release wrote the file."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DomainScore:
        """Make the score from its part of a parsed file. Raises: TypeError if that has another form."""
        lengths = tuple(LengthScore(**part) for part in data.get("by_length", ()))
        return cls(**{**data, "by_length": lengths, "by_question": tuple(data.get("by_question", ()))})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One answer, to be read by a person."""

    domain: str
    prompt_id: str
    prompt: str
    """Decoded, special tokens left in."""
    answer: str
    """The right answer, with which the verifier compared the model's."""
    text: str
    """The model's answer."""
    score: float
    tokens: int = 0
    truncated: bool = False
    error: str = ""
    """Traceback of a verifier that raised, or the error that broke the episode; empty without one."""
    turns: int | None = None
    """Turns of the episode; None in a domain without an environment."""
    invalid_calls: int = 0
    """Turns among these with a tool call that could not be made as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One model on all its domains."""

    model: str
    """Who answered, in words a reader knows: a path, `student before`, `expert`."""
    scores: dict[str, DomainScore]
    """Domain -> score."""
    answers: tuple[ScoredAnswer, ...] = ()
    """The first few answers of each domain; of the others the first few wrong ones, and the first few whose verifier raised."""
    step: int | None = None
    """Steps of the merge that the model had taken; None if it comes from no merge, or if an older release wrote the file."""
    tokens: int | None = None
    """Response tokens of those steps. None where `step` is None, and during a merge, where metrics.jsonl has the number."""
    weights: dict[str, str] = field(default_factory=dict)
    """Domain -> digest of the model that answered (its config.json and weight files), where it lies on disk."""
    cached: dict[str, str] = field(default_factory=dict)
    """Domain -> run and day that the result is from, if it was taken over from another run."""

    @property
    def accuracy(self) -> dict[str, float]:
        """Domain -> accuracy, 0..1."""
        return {domain: score.accuracy for domain, score in self.scores.items()}

    def covers(self, domain: str, digest: str) -> bool:
        """Return True if this is an evaluation, on this domain, of the model with this digest."""
        # A file of an older release has no digests: it counts as one of any model.
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
        """Make the evaluation from the parsed JSON of its file, or of a cache's entry. Raises: KeyError, TypeError, AttributeError if it
        has another form."""
        # `load` and the report have refused another format of a file before, with a message for users.
        assert data["format"] == FORMAT, f"evaluation file of format {data['format']}"
        evaluation = cls(
            model=data["model"],
            scores={domain: DomainScore.from_json(score) for domain, score in data["scores"].items()},
            answers=tuple(ScoredAnswer(**answer) for answer in data["answers"]),
            step=data.get("step"),
            tokens=data.get("tokens"),
            weights=data.get("weights", {}),
            cached=data.get("cached", {}),
        )
        return check_types(evaluation)


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
    """Combine at least one evaluation into one, of `model`. Where several have a domain, the last in the sequence counts; `step` and
    `tokens` are kept only if all have the same."""
    last_by_domain = {domain: evaluation for evaluation in evaluations for domain in evaluation.scores}
    training = {(evaluation.step, evaluation.tokens) for evaluation in evaluations}
    step, tokens = training.pop() if len(training) == 1 else (None, None)
    return Evaluation(
        model=model,
        scores={domain: evaluation.scores[domain] for domain, evaluation in last_by_domain.items()},
        answers=tuple(
            a for domain, evaluation in last_by_domain.items() for a in evaluation.answers if a.domain == domain
        ),
        step=step,
        tokens=tokens,
        weights={
            domain: evaluation.weights[domain]
            for domain, evaluation in last_by_domain.items()
            if domain in evaluation.weights
        },
        cached={
            domain: evaluation.cached[domain]
            for domain, evaluation in last_by_domain.items()
            if domain in evaluation.cached
        },
    )
