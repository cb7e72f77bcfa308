"""A push is believed when fixed tokens have the same log-probs on both sides, however the weights went there.

Checksums of parameters would not do: vLLM on the CPU multiplies with packed copies, which can be stale while the parameters
are new.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from opd.errors import RunError
from opd.interfaces import RolloutEngine, Trainer
from opd.models.buckets import BUCKET_BYTES
from opd.records.types import Prompt, PushReport

PROBE_SEQUENCES = 4
"""Least number of sequences in the probe, if there are so many prompts."""
COMPARED_PROMPTS = 64
"""Prompts that are looked at for what all of them begin with, such as a system prompt."""
ROUNDING_FACTOR = 3.0
"""A push may differ by so many times what differed at the start, where both sides held the student's own weights."""


@dataclass(frozen=True, kw_only=True)
class SyncSpec:
    """Trainer and engine of a weight push, and the settings of its proof. Each way uses the fields that it needs."""

    trainer: Trainer
    engine: RolloutEngine
    probe: Sequence[Sequence[int]]
    """Token ids of the sequences that both score."""
    tolerance: float
    """Largest mean difference of their log-probs, nats."""
    adapts_tolerance: bool = False
    """Raise the tolerance if rounding alone makes the two sides differ by more: see `ProvenSync.begin`."""
    keeps_weights: bool = False
    """Keep the weights of a push until the next one, for an engine that dies and restarts while the trainer computes."""
    nbytes: int
    """Bytes of all weights of a push, to decide if shared memory has room for them."""
    bucket: int = BUCKET_BYTES
    """Most bytes of a bucket."""
    tell: Callable[[str], None]
    """Callback for notices, one line each."""


class ProvenSync(ABC):
    """Implements `opd.interfaces.WeightSync`, except for `bring`."""

    def __init__(self, spec: SyncSpec) -> None:
        self._spec = spec
        self._tolerance = spec.tolerance
        self._probe = [list(ids) for ids in spec.probe]
        self._pending_logprobs: Callable[[], list[list[float]]] | None = None
        """Waits for the trainer's log-probs of the probe; None if none are being computed."""

    @abstractmethod
    def send_weights(self, version: int) -> None:
        """Send the trainer's weights to every engine."""

    def hold(self, model_dir: Path, *, shape_of: Path) -> None:
        """Have every engine read the weights of `model_dir`, which it has to reach."""
        self._spec.engine.load(model_dir)

    def begin(self) -> None:
        """Compare both sides before anything is trained: they hold the student's weights as its files have them.

        How far they are apart is then rounding, which kernels and types decide, and later weights may be rounded as much.
        Raises: RunError if they are further apart than the tolerance.
        """
        gap = self.measure_gap()
        self._refuse_gap(gap, "before the first step", "they compute different distributions from the same files")
        if self._spec.adapts_tolerance:
            self._tolerance = max(self._tolerance, ROUNDING_FACTOR * gap)

    def push(self, version: int) -> PushReport:
        """Push the weights, and push them once more if the probe does not see them in every engine.

        Raises: RunError if any engine's log-probs still differ from the trainer's by more than the tolerance.
        """
        gap = self._push(version)
        if not self._is_within_tolerance(gap):
            self._spec.tell(f"weight push {version}: engine and trainer differ by {gap:.4f} nats a token; pushed again")
            gap = self._push(version)
        self._refuse_gap(gap, f"weight push {version}", "the engine does not hold the trainer's weights")
        return PushReport(version=version, gap=gap)

    def _is_within_tolerance(self, gap: float) -> bool:
        """Return True if the gap is at most the tolerance; NaN is not."""
        return gap <= self._tolerance

    def _refuse_gap(self, gap: float, when: str, therefore: str) -> None:
        """Raises: RunError if the two sides do not agree."""
        if self._is_within_tolerance(gap):
            return
        allowed = f"sync.tolerance is {self._spec.tolerance:.4g}"
        if self._tolerance > self._spec.tolerance:
            allowed = (
                f"allowed are {self._tolerance:.4g}, {ROUNDING_FACTOR:g} times what they differed by before the first step"
            )
        raise RunError(
            f"{when}: engine and trainer differ by {gap:.4f} nats a token over {len(self._probe)} probe sequences, {allowed}: "
            f"{therefore}"
        )

    def _push(self, version: int) -> float:
        """Push once, and return the gap that `measure_gap` finds afterwards."""
        # Log-probs of the weights before would not fit those that are pushed now.
        self._pending_logprobs = None
        self.send_weights(version)
        return self.measure_gap()

    def begin_trainer_logprobs(self) -> None:
        """Begin to score the probe in the trainer, while engines do other work; `measure_gap` waits for it."""
        self._pending_logprobs = self._spec.trainer.begin_logprobs(self._probe)

    def measure_gap(self) -> float:
        """Return the largest of the engines' mean |trainer - engine| log-prob gaps over the probe tokens, nats."""
        if self._pending_logprobs is None:
            self.begin_trainer_logprobs()
        assert self._pending_logprobs is not None
        answer, self._pending_logprobs = self._pending_logprobs, None
        trainer_logprobs = [x for sequence in answer() for x in sequence]  # before the engines are asked: both may use all cores
        gaps = []
        for worker in self._spec.engine.logprobs(self._probe):
            engine_logprobs = [x for sequence in worker for x in sequence]
            gaps.append(sum(abs(a - b) for a, b in zip(trainer_logprobs, engine_logprobs, strict=True)) / len(trainer_logprobs))
        # Python's `max` ignores a NaN that does not come first.
        return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)


def choose_probe_sequences(prompts: Iterable[Prompt], tokens: int, room: int) -> list[tuple[int, ...]]:
    """Choose parts of the first prompts, until they hold `tokens` scored tokens; the first token of a sequence is not scored.

    There are always several, and they differ: one sequence alone, or several times the same, cannot show that sequences of a
    batch see each other. So each part begins at the last token of the beginning that all prompts share, such as a system prompt.
    """
    # One more than the tokens that count, because the first is not scored; `room` also holds one that the engine
    # samples.
    length = max(2, min(room - 1, tokens // PROBE_SEQUENCES + 1))
    compared = list(islice(prompts, COMPARED_PROMPTS))
    num_shared = _length_of_common_beginning([p.token_ids for p in compared if len(p.token_ids) > 1])
    chosen: list[tuple[int, ...]] = []
    short: list[int] = []
    for prompt in compared:
        ids = prompt.token_ids
        start = min(max(0, num_shared - 1), max(0, len(ids) - 2))
        part = ids[start : start + length]
        if len(chosen) >= PROBE_SEQUENCES and sum(len(ids) - 1 for ids in chosen) >= tokens:
            break
        if len(part) > 1 and part not in chosen:
            chosen.append(part)
        elif len(ids) == 1 and len(short) < length:
            short.extend(ids)
    if not chosen:  # no prompt has two tokens: join them, because the first token is not scored
        chosen = [(*short, *short)[:length]]
    # With one prompt only, the same tokens in reverse order are the second sequence.
    return chosen if len(chosen) > 1 else [*chosen, chosen[0][::-1]]


def _length_of_common_beginning(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of first tokens that all sequences share; 0 if there is one sequence, or if all are the same."""
    if len(set(sequences)) < 2:
        return 0
    columns = zip(*sequences, strict=False)  # as many as the shortest has tokens
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
