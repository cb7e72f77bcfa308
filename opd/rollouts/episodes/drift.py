"""Measures against compounding drift: small errors of the student's turns lead to states in which it errs more. All measures are
functions of the step alone, so a resumed run needs no state of theirs.

curriculum      step 1   P s o s |                  the episode ends early, with a reason of its own
teacher turns            P s o T o s o T o s        the domain's expert writes some of the turns (T), fewer in each step
replay                   P T o T o s                the prompt is a prefix that was recorded; the student writes one turn
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """A limit of turns that rises in a straight line to `max_turns`."""

    first: int
    """Limit in step 1."""
    over_steps: int
    """Number of steps after which the limit is `max_turns`."""

    def turns_at_step(self, step: int, max_turns: int) -> int:
        """Return min(max_turns, first + floor((max_turns - first) (step - 1) / over_steps)), for steps from 1."""
        return min(max_turns, self.first + (max_turns - self.first) * (step - 1) // self.over_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTurns:
    """Turns that the domain's expert writes, with a probability that falls in a straight line to 0."""

    model_dir: Path
    """Directory of the domain's expert, a full model."""
    share: float
    """Probability in step 1, 0..1."""
    over_steps: int
    """Number of steps after which the probability is 0."""
    train: bool
    """True if the student is trained on the expert's turns."""

    def probability_at_step(self, step: int) -> float:
        """Return share max(0, 1 - (step - 1) / over_steps), for steps from 1."""
        return self.share * max(0.0, 1 - (step - 1) / self.over_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """The expert that writes some turns of the episodes of one step."""

    model_dir: Path
    probability: float
    """Probability, for each turn, that the expert writes it."""
    train: bool
    """True if the student is trained on the expert's turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftOptions:
    """Measures against drift in one domain's training. They do not apply in exams."""

    curriculum: Curriculum | None = None
    teacher_turns: TeacherTurns | None = None
    replay: bool = False
    """The domain's prompts are prefixes of episodes, after which the student writes one turn."""

    def turn_limit(self, step: int, max_turns: int) -> int:
        """Return how many turns an episode of this step may have at most."""
        return max_turns if self.curriculum is None else self.curriculum.turns_at_step(step, max_turns)

    def guide_at_step(self, step: int) -> Guide | None:
        """Return the guide that writes some of the turns of this step; None if the student writes all."""
        turns = self.teacher_turns
        probability = 0.0 if turns is None else turns.probability_at_step(step)
        if turns is None or not probability:
            return None
        return Guide(model_dir=turns.model_dir, probability=probability, train=turns.train)
