"""Rewards of a discriminator: how it prefers the student's response to the answer of a text-only expert to the same prompt.

The discriminator is a second language model. Its score s of an answer is the mean log-prob of the answer's tokens. In each step it
learns from pairs of one prompt, the student's response i and the expert's answer j:

    L = -mean log sigmoid(r_j - r_i),     reward of the response = sigmoid(r_i - r_j)

(Bradley-Terry; GAD, arXiv 2511.10643, where the discriminator learns on the current student, too). A discriminator learns length and form
first, because they tell two writers apart most easily, so r is not s itself: r = M s, with M = I - X (X'X)^+ X'. X has what is
controlled for, of all answers of the domain in this step. So r is what length and form do not explain, and the gradient by s, M dL/dr,
has nothing that they explain either: the discriminator does not learn them.

A student could use that: where all its responses are much longer than the answers, length explains everything. So a response that is
far off in length, or cut, earns 0 by rule, and the discriminator does not see it.

Shapes: n pairs, 2n their answers, the student's first; F features.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from opd.credit.state import read_state, write_state
from opd.errors import RunError
from opd.interfaces import Decoder, TextExperts
from opd.records.types import Rollout, Span, WrittenFile
from opd.reward.form import Controls, measure_features, remove_explained
from opd.train.discriminator import DeepSpeedDiscriminator, DiscriminatorSpec

if TYPE_CHECKING:
    from opd.reward.form import Doubles


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSpec:
    """Settings of the discriminator."""

    engine: DiscriminatorSpec
    controls: Controls
    length_ratio: float
    """Most times that a response may be as long, or as short, as the expert's answer."""
    updates: int
    warm_up: int
    """Steps in which it learns and does not reward."""


def compute_preferences(scores: Doubles, features: Doubles) -> Doubles:
    """Return [n] the probability with which each of the student's responses is preferred to the expert's answer.

    `scores`: [2n] the student's responses first, then the expert's answers; `features`: [2n, F].
    """
    n = len(scores) // 2
    left = remove_explained(features, scores)
    preferred: Doubles = 1 / (1 + np.exp(np.clip(left[n:] - left[:n], -60.0, 60.0)))
    return preferred


def compute_slopes(scores: Doubles, features: Doubles) -> Doubles:
    """Return [2n] the slope of the sum over the pairs of -log sigmoid(r_j - r_i) by each score; arguments as above."""
    preferred = compute_preferences(scores, features)
    return remove_explained(features, np.concatenate([preferred, -preferred]))


class PreferenceRewards:
    """Rewards the responses in some domains, and has the discriminator learn from them."""

    def __init__(
        self, spec: PreferenceSpec, domains: Collection[str], experts: TextExperts, tokenizer: Decoder
    ) -> None:
        self._spec = spec
        self.domains = frozenset(domains)
        self._experts = experts
        self._tokenizer = tokenizer
        self._engine = DeepSpeedDiscriminator(spec.engine)
        self._steps_learned = 0
        self._state_files: tuple[WrittenFile, ...] = ()

    def judge(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return sample id -> reward of the responses that the student wrote; empty while the discriminator learns alone."""
        written = [r for r in rollouts if r.domain in self.domains and not self._experts.is_taught(r)]
        if self._steps_learned < self._spec.warm_up:
            return {}
        rewards = dict.fromkeys((rollout.sample_id for rollout in written), 0.0)
        pairs = self._pair_answers(written)
        scores = self._score(rollouts[0].step, pairs) if pairs else {}
        for own in self._divide_by_domain(pairs):
            preferred = compute_preferences(*self._look_at(own, scores))
            rewards |= {pair.student.sample_id: float(p) for pair, p in zip(own, preferred, strict=True)}
        return rewards

    def learn(self, step: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Have the discriminator learn from the step. Returns readings: `preference_loss`, and `preference_accuracy`, the share of the
        pairs in which it preferred the expert, both before the step's first update."""
        pairs = self._pair_answers(rollouts)
        if not pairs:
            return {}
        readings: dict[str, float] = {}
        for _ in range(self._spec.updates):
            scores = self._score(step, pairs)
            slopes: dict[str, float] = defaultdict(float)
            preferred: list[float] = []
            for own in self._divide_by_domain(pairs):
                looked_at = self._look_at(own, scores)
                slope = compute_slopes(*looked_at) / len(pairs)
                for row, value in zip((*(p.student for p in own), *(p.expert for p in own)), slope, strict=True):
                    slopes[row.sample_id] += float(value)
                preferred += compute_preferences(*looked_at).tolist()
            readings = readings or _summarise_pairs(preferred)
            self._engine.update(step, slopes)
        self._steps_learned += 1
        return readings

    def wait_ready(self) -> None:
        """Block until the discriminator may be asked. Raises: RunError past the deadline."""
        self._engine.wait_ready()

    def begin_save(self, path: Path) -> None:
        """Copy the state and begin to write it into this directory, which exists. Raises: StorageError."""
        self._state_files = (write_state(path, json.dumps({"steps_learned": self._steps_learned})),)
        self._engine.begin_save(path)

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        """Return the files of the last `begin_save`; None if not all are written after `wait_s`. Raises: StorageError."""
        files = self._engine.saved(wait_s)
        return None if files is None else (*files, *self._state_files)

    def load(self, path: Path) -> None:
        """Restore what `begin_save` wrote into this directory."""
        self._steps_learned = read_state(path)["steps_learned"]
        self._engine.load(path)

    def _pair_answers(self, rollouts: Sequence[Rollout]) -> list[AnswerPair]:
        """Return a pair for each response in the domains that the student wrote, in a form that can be compared."""
        pairs = []
        for rollout in rollouts:
            if rollout.domain not in self.domains or self._experts.is_taught(rollout):
                continue
            answer, is_whole = self._experts.find_response(rollout)
            if (rollout.truncated and is_whole) or self._is_far_off(len(rollout.response_ids), len(answer)):
                continue
            pairs.append(
                AnswerPair(
                    domain=rollout.domain,
                    student=_make_row(rollout.sample_id, rollout.prompt_ids, rollout.response_ids),
                    # All responses to a prompt are compared with the same answer, which is one row.
                    expert=_make_row(f"{rollout.group} of the expert", rollout.prompt_ids, answer),
                )
            )
        return pairs

    def _score(self, step: int, pairs: Sequence[AnswerPair]) -> dict[str, float]:
        """Return sample id -> score of each answer. Raises: RunError for one that is not finite."""
        rows = [row for pair in pairs for row in (pair.student, pair.expert)]
        scores = self._engine.scores(list({row.sample_id: row for row in rows}.values()))
        broken = next((sample_id for sample_id, score in scores.items() if not np.isfinite(score)), None)
        if broken is not None:
            raise RunError(f"step {step}: the discriminator's score of {broken} is not finite: its weights broke")
        return scores

    def _is_far_off(self, tokens: int, other: int) -> bool:
        return max(tokens, other) > self._spec.length_ratio * min(tokens, other)

    def _divide_by_domain(self, pairs: Sequence[AnswerPair]) -> list[list[AnswerPair]]:
        domains = sorted({pair.domain for pair in pairs})
        return [[pair for pair in pairs if pair.domain == domain] for domain in domains]

    def _look_at(self, pairs: Sequence[AnswerPair], scores: Mapping[str, float]) -> tuple[Doubles, Doubles]:
        """Return [2n] the scores and [2n, F] the features of these pairs' answers."""
        rows = [*(pair.student for pair in pairs), *(pair.expert for pair in pairs)]
        texts = [self._tokenizer.decode(row.response_ids, skip_special_tokens=True) for row in rows]
        features = measure_features(texts, [row.num_trained for row in rows], self._spec.controls)
        return np.array([scores[row.sample_id] for row in rows], np.float64), features


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPair:
    """A response of the student's and the expert's answer to the same prompt, as rows of the discriminator."""

    domain: str
    student: Rollout
    expert: Rollout


def _make_row(sample_id: str, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...]) -> Rollout:
    """Return a row of which every token behind the prompt counts as written, and none as sampled."""
    row = Rollout.from_tokens(sample_id, prompt_ids, response_ids)
    return replace(row, spans=(Span(length=len(response_ids), origin="taught", policy_version=0),))


def _summarise_pairs(preferred: Sequence[float]) -> dict[str, float]:
    p = np.array(preferred)
    return {
        "preference_loss": float(-np.log1p(-np.minimum(p, 1 - 1e-12)).mean()),
        "preference_accuracy": float(((p < 0.5) + 0.5 * (p == 0.5)).mean()),
    }
