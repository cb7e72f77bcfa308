"""The proof of a weight push: fixed tokens, the probe, must have the same log-probs in the trainer and in every engine.

This holds for every way in which the weights may travel. Checksums of parameters would prove nothing: vLLM on the CPU multiplies with
packed copies of them, which may be stale while the parameters are new.
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
from opd.records.step import DRAFT
from opd.records.types import Prompt, PushReport

PROBE_SEQUENCES = 4
"""The probe has at least so many sequences, if there are enough prompts."""
COMPARED_PROMPTS = 64
"""The probe is chosen from so many first prompts; tokens with which all of these begin, such as a system prompt, are left out."""
ROUNDING_FACTOR = 3.0
"""With `adapts_tolerance`, a push may have a gap of so many times the gap at the start, where both sides held the student's own
weights."""


@dataclass(frozen=True, kw_only=True)
class SyncSpec:
    """Trainer and engine of a weight push, and the settings of its proof. Each kind of push uses the fields that it needs."""

    trainer: Trainer
    engine: RolloutEngine
    probe: Sequence[Sequence[int]]
    """Token ids of the sequences that trainer and engines score."""
    tolerance: float
    """Largest mean |trainer - engine| log-prob over the probe, nats."""
    adapts_tolerance: bool = False
    """Raise the tolerance if rounding alone makes the two sides differ by more: see `ProvenSync.begin`."""
    keeps_weights: bool = False
    """Keep the weights of a push until the next one, for an engine that dies and restarts while the trainer computes."""
    sends_draft: bool = False
    """Send the draft that learns beside the student, too."""
    nbytes: int
    """Bytes of all weights of a push; they decide whether shared memory has room."""
    bucket: int = BUCKET_BYTES
    """Most bytes of a bucket."""
    tell: Callable[[str], None]
    """Function that is called with notices for the user, one line each."""


class ProvenSync(ABC):
    """Implements `opd.interfaces.WeightSync`, except for how weights travel: `send_weights`."""

    def __init__(self, spec: SyncSpec) -> None:
        self._spec = spec
        self._tolerance = spec.tolerance
        self._probe = [list(ids) for ids in spec.probe]
        self._pending_logprobs: Callable[[], list[list[float]]] | None = None
        """Function that waits for the trainer's log-probs of the probe; None if they are not being computed."""

    @abstractmethod
    def send_weights(self, version: int) -> None:
        """Send the trainer's weights to every engine."""

    def hold(self, model_dir: Path, *, shape_of: Path) -> None:
        """Have every engine load the weights of `model_dir`, which it must be able to read; `shape_of` is not needed then."""
        self._spec.engine.load(model_dir)

    def begin(self) -> None:
        """Compare both sides before anything is trained, while both hold the student's weights from its files.

        Their gap is then due to rounding, which depends on kernels and types. With `adapts_tolerance` a larger gap of later pushes is
        allowed accordingly. Raises: RunError if the gap is above the tolerance.
        """
        self._send_draft()
        gap = self.measure_gap()
        self._refuse_gap(gap, "before the first step", "they compute different distributions from the same files")
        if self._spec.adapts_tolerance:
            self._tolerance = max(self._tolerance, ROUNDING_FACTOR * gap)

    def push(self, version: int) -> PushReport:
        """Push the weights and measure the gap. If it is above the tolerance, do both a second time.

        Raises: RunError if an engine's gap is still above the tolerance.
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
        """Refuse a gap above the tolerance; `when` and `therefore` are parts of the message. Raises: RunError."""
        if self._is_within_tolerance(gap):
            return
        allowed = f"sync.tolerance is {self._spec.tolerance:.4g}"
        if self._tolerance > self._spec.tolerance:
            allowed = f"allowed are {self._tolerance:.4g}, {ROUNDING_FACTOR:g} times what they differed by before the first step"
        raise RunError(
            f"{when}: engine and trainer differ by {gap:.4f} nats a token over {len(self._probe)} probe sequences, {allowed}: "
            f"{therefore}"
        )

    def _push(self, version: int) -> float:
        """Push once, and return the gap that `measure_gap` finds afterwards."""
        # Drop log-probs of older weights, which would not fit those that are pushed now.
        self._pending_logprobs = None
        self.send_weights(version)
        self._send_draft()
        return self.measure_gap()

    def _send_draft(self) -> None:
        """Send the draft's weights, if the engines guess with it. They need no proof: a wrong draft is only slow."""
        if self._spec.sends_draft:
            self._spec.engine.load_draft(self._spec.trainer.companion_weights(DRAFT))

    def begin_trainer_logprobs(self) -> None:
        """Have the trainer begin to score the probe, while the engines do other work. `measure_gap` waits for the result."""
        self._pending_logprobs = self._spec.trainer.begin_logprobs(self._probe)

    def measure_gap(self) -> float:
        """Return the largest of the engines' mean |trainer - engine| log-prob gaps over the probe tokens, nats."""
        if self._pending_logprobs is None:
            self.begin_trainer_logprobs()
        assert self._pending_logprobs is not None
        answer, self._pending_logprobs = self._pending_logprobs, None
        # The trainer finishes before the engines are asked, because each side may use all cores.
        trainer_logprobs = [x for sequence in answer() for x in sequence]
        gaps = []
        for worker in self._spec.engine.logprobs(self._probe):
            engine_logprobs = [x for sequence in worker for x in sequence]
            gaps.append(
                sum(abs(a - b) for a, b in zip(trainer_logprobs, engine_logprobs, strict=True)) / len(trainer_logprobs)
            )
        # Python's `max` ignores a NaN that does not come first.
        return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)


def choose_probe_sequences(prompts: Iterable[Prompt], tokens: int, room: int) -> list[tuple[int, ...]]:
    """Choose parts of the first prompts, until they have `tokens` scored tokens in all; the first token of a sequence is not scored.

    There are always several sequences, and they differ: a single one, or equal ones, could not show that sequences of a batch see
    each other. So each begins at the last token of the beginning that all prompts share, such as a system prompt. `room`: tokens
    that fit into the engine's context.
    """
    # Each has one token more than are scored. The engine also samples one token, for which `room` has to leave a place.
    length = max(2, min(room - 1, tokens // PROBE_SEQUENCES + 1))
    compared = list(islice(prompts, COMPARED_PROMPTS))
    num_shared = _length_of_common_beginning([p.token_ids for p in compared if len(p.token_ids) > 1])
    sequences: list[tuple[int, ...]] = []
    short: list[int] = []
    for prompt in compared:
        ids = prompt.token_ids
        start = min(max(0, num_shared - 1), max(0, len(ids) - 2))
        part = ids[start : start + length]
        if len(sequences) >= PROBE_SEQUENCES and sum(len(ids) - 1 for ids in sequences) >= tokens:
            break
        if len(part) > 1 and part not in sequences:
            sequences.append(part)
        elif len(ids) == 1 and len(short) < length:
            short.extend(ids)
    if not sequences:  # every prompt has a single token, of which none would be scored: join them to one sequence
        sequences = [(*short, *short)[:length]]
    # If there is only one sequence, the same tokens in reverse order are the second one.
    return sequences if len(sequences) > 1 else [*sequences, sequences[0][::-1]]


def _length_of_common_beginning(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of first tokens that all sequences share; 0 if there is one sequence, or if all are equal."""
    if len(set(sequences)) < 2:
        return 0
    columns = zip(*sequences, strict=False)  # as many as the shortest has tokens
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
