"""Settings of `domains.NAME.environment` against compounding drift.

A weak student's errors add up over the turns of an episode, until it is in a state about which its expert has nothing to
teach. Each setting is called a cure here. docs/drift.md has the formulas and their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from opd.settings.strict import Strict

if TYPE_CHECKING:
    from opd.config.domains import DomainConfig, EnvironmentConfig
    from opd.config.objectives import ObjectiveConfig
    from opd.config.reward import RewardConfig


class CurriculumConfig(Strict):
    first: int = Field(..., ge=1)
    """Turns of an episode in the first step."""
    over_steps: int = Field(..., ge=1)
    """Steps in which the limit rises, in a straight line, to `max_turns`."""


class TeacherTurnsConfig(Strict):
    share: float = Field(..., gt=0, le=1)
    """Probability in the first step that the domain's heaviest expert writes a turn; falls in a straight line to 0."""
    over_steps: int = Field(..., ge=1)
    """Steps after which the student writes every turn."""
    train: bool = False
    """Train the student on the expert's turns too."""

    @model_validator(mode="after")
    def _check_trains_something(self) -> TeacherTurnsConfig:
        if self.share == 1 and not self.train:
            raise PydanticCustomError(
                "teacher_turns",
                "below 1, or teacher_turns.train: if the expert writes every turn, the first step trains nothing",
                {"found": "share 1 without train"},
            )
        return self


class TurnWeightsConfig(Strict):
    decay: float = Field(1.0, gt=0, le=1)
    """Weight of each turn over that of the turn before."""
    divergence: float = Field(0.0, ge=0, allow_inf_nan=False)
    """A turn weighs `exp(-divergence D)` times as much, D the mean loss a token in the turns before it. Above 0 the
    student's forward pass is computed twice."""
    floor: float = Field(0.05, gt=0, lt=1)
    """Least weight of a turn; the first has 1."""

    @model_validator(mode="after")
    def _check_weights(self) -> TurnWeightsConfig:
        if self.decay == 1 and self.divergence == 0:
            raise PydanticCustomError(
                "turn_weights",
                "a `decay` below 1 or a `divergence` above 0; without them all turns weigh the same",
                {"found": "decay 1 and divergence 0"},
            )
        return self


def count_worker_engines(domains: Mapping[str, DomainConfig]) -> int:
    """Return the number of engines in a rollout worker: 2 if experts write turns, because they need an engine of their own."""
    return 2 if any(domain.environment and domain.environment.teacher_turns for domain in domains.values()) else 1


def refuse_contradictions(domains: Mapping[str, DomainConfig], objective: ObjectiveConfig) -> None:
    """Refuse settings of this module that contradict each other, the environment or the objective.

    Raises: PydanticCustomError.
    """
    for name, domain in domains.items():
        environment = domain.environment
        if environment is None:
            continue
        section = f"domains.{name}.environment"
        if environment.curriculum is not None and environment.curriculum.first >= environment.max_turns:
            raise _drift_error(
                f"{section}.curriculum.first",
                str(environment.curriculum.first),
                f"below max_turns, {environment.max_turns}, which is where the curriculum ends",
            )
        if environment.replay:
            _refuse_beside_replay(f"domains.{name}", domain, environment)
        if environment.turn_weights is not None:
            _refuse_objective(f"{section}.turn_weights", domain.objective or objective, objective.reward)
        if environment.teacher_turns is not None and environment.teacher_turns.train:
            _refuse_objective(f"{section}.teacher_turns.train", domain.objective or objective, objective.reward)


def _refuse_beside_replay(section: str, domain: DomainConfig, environment: EnvironmentConfig) -> None:
    """Refuse settings that do not go with `replay`. Raises: PydanticCustomError."""
    cures = [key for key in ("curriculum", "teacher_turns", "turn_weights") if getattr(environment, key) is not None]
    if cures:
        raise _drift_error(
            f"{section}.environment.replay",
            f"true with {cures[0]}",
            f"no {cures[0]}: with replay the student writes one turn after each prefix, and no episode is played",
        )
    if domain.eval is not None and domain.eval.holdout is not None:
        raise _drift_error(
            f"{section}.eval.holdout",
            f"{domain.eval.holdout:g} with environment.replay",
            "eval.prompts, a file of tasks: prefixes are no tasks that an exam could play",
        )


def _refuse_objective(key: str, objective: ObjectiveConfig, reward: RewardConfig | None) -> None:
    """Refuse an objective, or a reward beside it, that cannot give each token a weight of its own. Raises: PydanticCustomError."""
    if objective.IS_ESTIMATE or not objective.HAS_DIVERGENCE:
        raise _drift_error(
            key,
            f"set with objective.kind {objective.kind}",
            "an objective that is a divergence: one that estimates it from sampled tokens needs tokens of the student's own, "
            "with weights that do not depend on them",
        )
    if reward is not None:
        raise _drift_error(
            key,
            "set with objective.reward",
            "no objective.reward: the policy gradient is about tokens that the student sampled, each with the same weight",
        )


def _drift_error(key: str, actual: str, expected: str) -> PydanticCustomError:
    return PydanticCustomError("drift", "{wanted}", {"wanted": expected, "where": key, "found": actual})
