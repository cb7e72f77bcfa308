"""Cures of compounding drift in the episodes of a step. All are functions of the step alone, so a resume needs no cursor.

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
    over_steps: int

    def turns_at_step(self, step: int, max_turns: int) -> int:
        """Return min(max_turns, first + floor((max_turns - first) (step - 1) / over_steps)), for steps from 1."""
        return min(max_turns, self.first + (max_turns - self.first) * (step - 1) // self.over_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTurns:
    """A probability that falls in a straight line to 0."""

    model_dir: Path
    """The domain's expert, a whole model."""
    share: float
    over_steps: int
    train: bool
    """Whether the student is trained on the expert's turns."""

    def probability_at_step(self, step: int) -> float:
        """Return share max(0, 1 - (step - 1) / over_steps), for steps from 1."""
        return self.share * max(0.0, 1 - (step - 1) / self.over_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """The expert that writes some turns of an episode of one step."""

    model_dir: Path
    probability: float
    train: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftOptions:
    """Measures against drift in one domain's training; exams know nothing of them."""

    curriculum: Curriculum | None = None
    teacher_turns: TeacherTurns | None = None
    replay: bool = False
    """The domain's prompts are prefixes of episodes, after which the student writes one turn."""

    def turn_limit(self, step: int, max_turns: int) -> int:
        """Return how many turns an episode of this step may have."""
        return max_turns if self.curriculum is None else self.curriculum.turns_at_step(step, max_turns)

    def guide_at_step(self, step: int) -> Guide | None:
        """Return the guide that writes some of the turns beside the student; None from the step on where none does."""
        turns = self.teacher_turns
        probability = 0.0 if turns is None else turns.probability_at_step(step)
        if turns is None or not probability:
            return None
        return Guide(model_dir=turns.model_dir, probability=probability, train=turns.train)
