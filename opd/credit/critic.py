"""Advantages from a critic, which estimates each state's value: a token's advantage is its change of that value.

    each step:  values ─▶ GAE ─▶ advantages for the policy
                           └───▶ returns ─▶ `updates` updates of the critic, each over the whole step

Advantages are computed from the critic's values before it learns from the step. While it explains nothing, its advantages are
noise: the policy waits until the critic is warm, which it stays from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from opd.config.reward import WarmUpConfig
from opd.credit.episodes import Episode, group_into_episodes
from opd.credit.gae import GaeSpec, compute_credit
from opd.credit.interfaces import StepCredit
from opd.credit.state import read_state, write_state
from opd.errors import RunError
from opd.records.types import Rollout, WrittenFile
from opd.train.critic import CriticEngineSpec, DeepSpeedCritic
from opd.train.turns import count_earlier_turns

if TYPE_CHECKING:
    from opd.credit.interfaces import Floats

SHOWN_TURNS = 8
"""Number of turns of which the readings show the bias, from the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSpec:
    """Settings of a critic, its updates and its advantages."""

    engine: CriticEngineSpec
    gae: GaeSpec = field(default_factory=GaeSpec)
    updates: int = 2
    """Updates of the critic in each step, every one over all of its tokens."""
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    """Condition under which the policy begins to train: what the critic must explain, in states that it did not learn."""


class CriticCredit:
    """Implements `opd.credit.interfaces.Credit`."""

    def __init__(self, spec: CriticSpec) -> None:
        self._spec = spec
        self._engine = DeepSpeedCritic(spec.engine)
        self._explaining_steps = 0
        """Steps in a row in which the critic explained enough."""
        self._cold_steps = 0
        """Number of steps after which the critic was not yet warm."""
        self._state_files: tuple[WrittenFile, ...] = ()

    def assign(self, step: int, rollouts: Sequence[Rollout]) -> StepCredit:
        episodes = group_into_episodes(rollouts)
        segments = [segment for episode in episodes for segment in episode.segments]
        if not any(segment.num_trained for segment in segments):
            return StepCredit(advantages={s.sample_id: np.zeros(0, np.float32) for s in segments}, warm=self._warm)
        values = self._engine.values(segments)
        _refuse_broken(step, values)
        advantages: dict[str, Floats] = {}
        returns: dict[str, Floats] = {}
        for episode in episodes:
            credit = compute_credit(episode, values, self._spec.gae)
            advantages |= credit.advantages
            returns |= credit.returns
        token_values = {sample_id: value_N[:-1] for sample_id, value_N in values.items()}
        updates = [self._engine.update(step, returns, token_values) for _ in range(self._spec.updates)]
        readings = _summarise_critic(episodes, token_values, returns)
        # Measured on values from before the updates: states that the critic has not learnt from.
        self._count_warm_up_step(step, readings.get("explained_variance"))
        readings |= {"value_loss": updates[0][0], "critic_grad_norm": updates[-1][1]} if updates else {}
        return StepCredit(advantages=advantages, readings=readings, warm=self._warm)

    @property
    def _warm(self) -> bool:
        return self._explaining_steps >= self._spec.warm_up.steps

    def _count_warm_up_step(self, step: int, explained: float | None) -> None:
        """Count the step toward the warm-up. Raises: RunError if that takes too long."""
        warm_up = self._spec.warm_up
        if self._warm:
            return
        explains = explained is not None and explained > warm_up.explained
        self._explaining_steps = self._explaining_steps + 1 if explains else 0
        if self._warm:
            return
        self._cold_steps += 1
        if warm_up.at_most is not None and self._cold_steps >= warm_up.at_most:
            reason = "all returns are equal, so no reward tells states apart"
            if explained is not None:
                reason = f"it explains {explained:.3g} of the variance of the returns, wanted more than {warm_up.explained:g}"
            raise RunError(
                f"step {step}: the critic is not warm after {self._cold_steps} steps: {reason}; the policy has not trained"
            )

    def wait_ready(self) -> None:
        self._engine.wait_ready()

    def begin_save(self, path: Path) -> None:
        state = {"above": self._explaining_steps, "cold_steps": self._cold_steps}
        self._state_files = (write_state(path, json.dumps(state)),)
        self._engine.begin_save(path)

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        files = self._engine.saved(wait_s)
        return None if files is None else (*files, *self._state_files)

    def load(self, path: Path) -> None:
        state = read_state(path)
        self._explaining_steps, self._cold_steps = state["above"], state["cold_steps"]
        self._engine.load(path)


def _refuse_broken(step: int, values: Mapping[str, Floats]) -> None:
    """Refuse values that are not finite. Raises: RunError naming the first such sample."""
    for sample_id, value_N in values.items():
        if not np.isfinite(value_N).all():
            raise RunError(f"step {step}: the critic's values of {sample_id} are not finite: its weights broke")


def explained_variance(value_N: Floats, return_N: Floats) -> float | None:
    """Return the share of the returns' variance that the values explain, 1 - Var(return - value) / Var(return). 1 is all of it, 0 is no
    more than a constant explains. None if all returns are equal."""
    total = float(return_N.astype(np.float64).var())
    if total < 1e-12:
        return None
    return 1 - float((return_N.astype(np.float64) - value_N).var()) / total


def _summarise_critic(
    episodes: Sequence[Episode], values: Mapping[str, Floats], returns: Mapping[str, Floats]
) -> dict[str, float]:
    """Summarise the values that the critic gave the step before it learned from it."""
    segments = [segment for episode in episodes for segment in episode.segments]
    value_N = np.concatenate([values[s.sample_id] for s in segments])
    return_N = np.concatenate([returns[s.sample_id] for s in segments])
    readings = {
        "mean_return": fmean(episode.reward for episode in episodes),
        "mean_value": float(value_N.mean(dtype=np.float64)),
    }
    explained = explained_variance(value_N, return_N)
    if explained is not None:
        readings["explained_variance"] = explained
    turns_before = count_earlier_turns(segments)
    turn_N = np.array([turns_before.get(s.sample_id, 0) + turn for s in segments for turn in s.turns])
    error_N = value_N.astype(np.float64) - return_N
    turns = [turn for turn in np.unique(turn_N) if turn < SHOWN_TURNS]
    return readings | {
        f"value_bias_turn_{turn}": float(error_N[turn_N == turn].mean()) for turn in turns if len(turns) > 1
    }
