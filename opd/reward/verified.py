"""Rewards for responses of a single turn: the verifiers of the evaluations judge the student's responses in training.

They run in the driver, in a thread with a deadline for each response. A verifier that raises or is late gives 0, and is counted:
a reward that is missing here and there would only make the domain's mean less certain, a run that ends would cost more.

A judge on a server is asked about all responses of its domain together. A response to which it gives no score is left out of the step:
it has said nothing about that response, neither good nor bad.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from opd.errors import RunError
from opd.interfaces import Decoder, Verifier
from opd.records.types import Prompt, QuarantinedPrompt, Rollout, RolloutBatch
from opd.reward.form import Controls, measure_features, remove_explained
from opd.rollouts.decoding import end_ids, written_text
from opd.text import to_one_line
from opd.verifiers.judge import RubricJudge

MAX_ERROR = 300
"""Characters that are kept of what a verifier raised."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A response that its verifier did not judge."""

    domain: str
    error: str


def control_scores(
    scores: Sequence[float], texts: Sequence[str], tokens: Sequence[int], controls: Controls
) -> list[float]:
    """Return what is left of the scores of a domain's responses without what their length, or form, explains; the mean stays."""
    if controls == "none" or not scores:
        return list(scores)
    left = remove_explained(measure_features(texts, tokens, controls), np.array(scores, np.float64))
    return [fmean(scores) + float(rest) for rest in left]


class VerifiedRewards:
    """Judges the responses of the domains that have a verifier; other rollouts stay as they are. So do a sub-agent's, which may be
    scored in such a domain: it has the reward of the episode that started it."""

    def __init__(
        self, verifiers: Mapping[str, Verifier], tokenizer: Decoder, stop_token_ids: Sequence[int], timeout_s: float
    ) -> None:
        """Keep the settings: `verifiers` by domain; `stop_token_ids` end a response."""
        self._verifiers = verifiers
        self._tokenizer = tokenizer
        self._end_ids = end_ids(tokenizer, stop_token_ids)
        self._timeout_s = timeout_s
        self._thread = _VerifierThread()

    def add_rewards(self, batch: RolloutBatch, prompts: Sequence[Prompt]) -> tuple[RolloutBatch, list[Failure]]:
        """Return the batch with rewards, and the responses that could not be judged; `prompts` are those of the step."""
        # All rollouts of a batch are of one step, so the first one has its number.
        by_group = {f"{r.step:06d}/{p.id}": p for r in batch.rollouts[:1] for p in prompts}
        failures: list[Failure] = []
        judged: dict[str, float] = {}
        unjudged: dict[str, QuarantinedPrompt] = {}
        for domain, verifier in self._verifiers.items():
            if isinstance(verifier, RubricJudge):
                own = [r for r in batch.rollouts if r.domain == domain and r.sample_id == r.episode]
                judged |= self._ask_judge(verifier, own, by_group, unjudged)
        rollouts = []
        for rollout in batch.rollouts:
            if rollout.sample_id in judged:
                rollouts.append(replace(rollout, reward=judged[rollout.sample_id]))
            elif rollout.domain not in self._verifiers or rollout.sample_id != rollout.episode:
                rollouts.append(rollout)
            elif rollout.sample_id not in unjudged:
                rollouts.append(self._score_rollout(rollout, by_group[rollout.group], failures))
        return replace(batch, rollouts=tuple(rollouts), quarantined=(*batch.quarantined, *unjudged.values())), failures

    def list_judges(self) -> dict[str, RubricJudge]:
        """Return domain -> its judge, for the domains that one rewards."""
        return {domain: verifier for domain, verifier in self._verifiers.items() if isinstance(verifier, RubricJudge)}

    def _ask_judge(
        self,
        judge: RubricJudge,
        rollouts: Sequence[Rollout],
        by_group: Mapping[str, Prompt],
        unjudged: dict[str, QuarantinedPrompt],
    ) -> dict[str, float]:
        """Return sample id -> reward of a domain's responses, and add those without one to `unjudged`.

        Raises: RunError if too many have none, as `RubricJudge.judge_answers` does.
        """
        texts = [written_text(self._tokenizer, r.response_ids, self._end_ids) for r in rollouts]
        prompts = [by_group[rollout.group] for rollout in rollouts]
        judgements = judge.judge_answers(list(zip(prompts, texts, strict=True)))
        failed = {
            rollout.sample_id: QuarantinedPrompt(prompt_id=prompt.id, domain=rollout.domain, reason=judgement.problem)
            for rollout, prompt, judgement in zip(rollouts, prompts, judgements, strict=True)
            if judgement.score is None
        }
        limit = judge.config.max_quarantined
        if len(failed) > max(1, limit * len(rollouts)):
            raise RunError(
                f"step {rollouts[0].step}: {len(failed)} of {len(rollouts)} responses of {judge.domain} have no score of the judge, more "
                f"than domains.{judge.domain}.eval.verifier.max_quarantined {limit:g}; the first: {next(iter(failed.values())).reason}"
            )
        unjudged |= failed
        scored = [
            (rollout, text, judgement.score)
            for rollout, text, judgement in zip(rollouts, texts, judgements, strict=True)
            if judgement.score is not None
        ]
        rewards = control_scores(
            [score for *_, score in scored],
            [text for _, text, _ in scored],
            [len(rollout.response_ids) for rollout, *_ in scored],
            judge.config.controls,
        )
        return {rollout.sample_id: reward for (rollout, *_), reward in zip(scored, rewards, strict=True)}

    def _score_rollout(self, rollout: Rollout, prompt: Prompt, failures: list[Failure]) -> Rollout:
        verifier = self._verifiers[rollout.domain]
        text = written_text(self._tokenizer, rollout.response_ids, self._end_ids)

        def judge() -> float:
            # A row that a verifier must not judge may run code: what was read at the start is only a part of them.
            problem = verifier.problem(prompt.answer, prompt.metadata)
            if problem:
                raise ValueError(f"{prompt.id}: {problem}")
            return float(verifier(text, prompt.answer, prompt.metadata))

        try:
            return replace(rollout, reward=self._thread.call(judge, self._timeout_s))
        except VerifierTimeout:
            error = f"not back after {self._timeout_s:g} s (objective.reward.timeout_s)"
        except (Exception, SystemExit) as raised:  # noqa: BLE001 a verifier may be anybody's code
            error = to_one_line(traceback.format_exception_only(raised)[-1], MAX_ERROR)
        failures.append(Failure(rollout.domain, error))
        return replace(rollout, reward=0.0)


class VerifierTimeout(Exception):
    """The call was not back in time."""


class _VerifierThread:
    """Runs calls one after the other. A call that hangs keeps its thread, which ends with the process; the next call gets a
    new one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[float], Callable[[], float]]] | None = None

    def call(self, function: Callable[[], float], timeout_s: float) -> float:
        """Call the function, and return its result. Raises: what it raises; Late past the deadline."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_run_with_deadline, args=(self._calls,), name="verifier", daemon=True).start()
        future: Future[float] = Future()
        self._calls.put((future, function))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # its own
                raise
            self._calls = None
            raise VerifierTimeout from None


def _run_with_deadline(calls: queue.SimpleQueue[tuple[Future[float], Callable[[], float]]]) -> None:
    while True:
        future, function = calls.get()
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 it is raised where the result is wanted
            future.set_exception(error)
