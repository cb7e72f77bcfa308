"""Advantages from values: generalised advantage estimation (GAE) along the tokens that the policy sampled, whatever lies between.

    segment 0   P P P P  a a a  o o o  a a  o  S S        a, S sampled: actions and a summary; P prompt, o observation
    segment 1            P P P P  (copied)  o o  a a a    reward
    the line             a a a         a a     S S          a a a ◀─┘

An episode is one line of sampled tokens. Observations and copied text are no actions, so they have no value, take no step of
lambda, and no reward lies on them: the last token of a turn is followed by the first of the next, and the last token of a
segment by the first of the segment that goes on from its summary. So cutting an episode changes no advantage, and what is
learned at the end reaches a token with (gamma lambda)^k, k the sampled tokens between, those of later segments among them.

A sub-agent is a line of its own that ends with the episode's outcome. The agent that started it reads its answer as an observation. A
dialogue that an agent's program has beside another one is also a line of its own, and so is one that begins with nothing that the
policy wrote. A fork whose parent does not go on afterwards continues the line of its parent.

An episode that was cut from outside has not failed. If its reward is 0, its outcome is the value of the state at the cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from opd.credit.episodes import Episode
from opd.records.types import Rollout, SegmentOrigin, StopReason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from opd.credit.interfaces import Floats

    Doubles = NDArray[np.float64]

ADAPTIVE_FACTOR = 1.5
"""Lambda of a line of l tokens is 1 - 1 / (1.5 l): its horizon grows with the line."""
CUT_REASONS: frozenset[StopReason] = frozenset({"length", "tokens", "context", "curriculum"})
"""Stop reasons of episodes that were cut from outside. A limit of turns is a rule of the task: reaching it is an outcome. An
episode that broke has no reward, and no part in the step."""

OWN_LINE_ORIGINS: frozenset[SegmentOrigin] = frozenset({"sub_agent", "aside"})
"""Origins of segments that begin a line of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeSpec:
    """Settings of advantages and returns."""

    gamma: float = 1.0
    """Discount of a token."""
    policy_lambda: float | None = None
    """Lambda of the advantages; None: 1 - 1 / (1.5 l) for a line of l trained tokens."""
    critic_lambda: float = 1.0
    """Lambda of the returns that the critic learns; 1: the outcome itself, independent of the critic's errors."""
    bootstrap: frozenset[StopReason] = CUT_REASONS
    """Stop reasons of episodes without a reward above or below 0 whose outcome is the value at their end."""


@dataclass(frozen=True, slots=True)
class EpisodeCredit:
    """Advantages for the policy and returns for the critic, of one episode; sample id -> [N], one for each trained token."""

    advantages: dict[str, Floats]
    returns: dict[str, Floats]


def compute_credit(episode: Episode, values: Mapping[str, Floats], spec: GaeSpec) -> EpisodeCredit:
    """Compute advantages and returns of every segment. `values`: sample id -> [N + 1] the value of the state before each trained
    token, and of the state behind the last token of the segment."""
    credit = EpisodeCredit({}, {})
    lines = split_into_lines(episode)
    outcome = episode.reward
    if not episode.reward and episode.stop_reason in spec.bootstrap:
        outcome = spec.gamma * float(values[lines[0][-1].sample_id][-1])
    for line in lines:
        _credit_line(line, values, outcome, spec, credit)
    return credit


def split_into_lines(episode: Episode) -> list[tuple[Rollout, ...]]:
    """Split the segments into lines, each in the order in which it was written; the first is that of the episode itself."""
    line_of_segment: dict[str, str] = {}
    lines: dict[str, list[Rollout]] = defaultdict(list)
    for segment in episode.segments:
        first_id = episode.segments[0].sample_id
        parent_line = first_id if segment.parent is None else line_of_segment.get(segment.parent, first_id)
        line_of_segment[segment.sample_id] = segment.sample_id if segment.origin in OWN_LINE_ORIGINS else parent_line
        lines[line_of_segment[segment.sample_id]].append(segment)
    return [tuple(line) for line in lines.values()]


def _credit_line(
    line: Sequence[Rollout], values: Mapping[str, Floats], outcome: float, spec: GaeSpec, credit: EpisodeCredit
) -> None:
    """Put the line's advantages and returns into `credit`."""
    parts = [values[segment.sample_id] for segment in line]
    assert [len(part) for part in parts] == [segment.num_trained + 1 for segment in line]
    value_N = np.concatenate([part[:-1] for part in parts]).astype(np.float64)
    lam = adaptive_lambda(len(value_N)) if spec.policy_lambda is None else spec.policy_lambda
    advantage_N = compute_gae(value_N, outcome, spec.gamma, lam)
    return_N = value_N + compute_gae(value_N, outcome, spec.gamma, spec.critic_lambda)
    ends = np.cumsum([segment.num_trained for segment in line])[:-1]
    for segment, advantage_n, return_n in zip(line, np.split(advantage_N, ends), np.split(return_N, ends), strict=True):
        credit.advantages[segment.sample_id] = advantage_n.astype(np.float32)
        credit.returns[segment.sample_id] = return_n.astype(np.float32)


def adaptive_lambda(tokens: int) -> float:
    """Return lambda for a line of `tokens` trained tokens; those of padding, prompts and observations do not count."""
    return 1 - 1 / (ADAPTIVE_FACTOR * max(1, tokens))


def compute_gae(value_N: Doubles, outcome: float, gamma: float, lam: float) -> Doubles:
    """Return [N] advantages of a line of actions whose states have these values; the last action earns the outcome.

    A_t = sum_k (gamma lambda)^k (gamma v_{t+k+1} - v_{t+k}), where for the last action the outcome stands in place of gamma v_{t+k+1}.
    """
    advantage_N = np.empty(len(value_N))
    running, following = 0.0, outcome
    # From the end, because each advantage contains that of the next token.
    for index in range(len(value_N) - 1, -1, -1):
        value = float(value_N[index])
        running = following - value + gamma * lam * running
        advantage_N[index] = running
        following = gamma * value
    return advantage_N
