"""Rewards for responses of a single turn: the verifiers of the evaluations judge the student's responses in training.

They run in the driver, in a thread with a deadline for each response. A verifier that raises or is late gives 0, and is counted:
a reward that is missing here and there would only make the domain's mean less certain, a run that ends would cost more.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from opd.interfaces import Decoder, Verifier
from opd.records.types import Prompt, Rollout, RolloutBatch
from opd.rollouts.decoding import end_ids, written_text
from opd.text import to_one_line

MAX_ERROR = 300
"""Characters that are kept of what a verifier raised."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A response that its verifier did not judge."""

    domain: str
    error: str


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
        rollouts = [
            self._score_rollout(rollout, by_group[rollout.group], failures)
            if rollout.domain in self._verifiers and rollout.sample_id == rollout.episode
            else rollout
            for rollout in batch.rollouts
        ]
        return replace(batch, rollouts=tuple(rollouts)), failures

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
