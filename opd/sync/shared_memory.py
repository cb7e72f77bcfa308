"""Weight push on one machine: safetensors in shared memory, reloaded in place, then proven by a behavioural probe.

The probe scores fixed tokens on both sides. Checksums of parameters would not do: vLLM on the CPU multiplies with packed
copies, which can be stale while the parameters are new.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from opd import leftovers
from opd.errors import RunError
from opd.interfaces import RolloutEngine, Trainer
from opd.leftovers import SHARED_MEMORY
from opd.types import Prompt, PushReport

PROBE_SEQUENCES = 4
"""Least number of sequences in the probe, if there are so many prompts."""


class SharedMemorySync:
    """Implements `opd.interfaces.WeightSync`."""

    def __init__(
        self,
        trainer: Trainer,
        engine: RolloutEngine,
        probe: Sequence[Sequence[int]],
        *,
        tolerance: float,
        nbytes: int,
        tell: Callable[[str], None],
    ) -> None:
        """`nbytes` is the size of what a push has, which decides whether shared memory has room for them; `tell` gets
        notices, one line each."""
        self._trainer = trainer
        self._engine = engine
        self._probe = [list(ids) for ids in probe]
        self._tolerance = tolerance
        self._nbytes = nbytes
        self._tell = tell
        self.keeps_files = False
        """Keep the files of a push until the next one, for an engine that dies while the trainer computes."""
        self._kept = ExitStack()
        """Deletes the files of the last push."""
        self._on_disk = False

    def push(self, version: int) -> PushReport:
        """Push the weights, and push them once more if the probe does not see them in every engine.

        Raises: RunError if any engine's log-probs still differ from the trainer's by more than the tolerance.
        """
        gap = self._push(version)
        if not gap <= self._tolerance:  # written so that NaN fails too
            self._tell(f"weight push {version}: engine and trainer differ by {gap:.4f} nats a token; pushed again")
            gap = self._push(version)
        if not gap <= self._tolerance:
            raise RunError(
                f"weight push {version}: engine and trainer differ by {gap:.4f} nats a token over {len(self._probe)} probe sequences, "
                f"sync.tolerance is {self._tolerance}: the engine does not hold the trainer's weights"
            )
        return PushReport(version=version, gap=gap)

    def _push(self, version: int) -> float:
        """Push once; returns what `measure` finds afterwards."""
        with ExitStack() as files:
            directory = Path(files.enter_context(self._place(version)))
            base = self._trainer.export_changed(directory)
            again: Callable[[], AbstractContextManager[Path]] = partial(self._exported, version)
            if self.keeps_files:
                again = partial(_kept, directory)
            self._engine.load(directory, again=again, base=base)
            if self.keeps_files:
                self._kept.close()
                self._kept = files.pop_all()
        return self.measure()

    @contextmanager
    def _exported(self, version: int) -> Iterator[Path]:
        """The pushed weights as files once more, which exist within the context."""
        with self._place(version) as directory:
            self._trainer.export_changed(Path(directory))
            yield Path(directory)

    def measure(self) -> float:
        """Largest mean |trainer - engine| log-prob gap over the probe tokens among the engines, nats."""
        ours = [x for sequence in self._trainer.logprobs(self._probe) for x in sequence]
        gaps = []
        for worker in self._engine.logprobs(self._probe):
            theirs = [x for sequence in worker for x in sequence]
            gaps.append(sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours))
        # Python's `max` ignores a NaN that does not come first.
        return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)

    def _place(self, version: int) -> tempfile.TemporaryDirectory[str]:
        """A directory in shared memory if it has room for twice the weights, else on disk: containers often get 64 MiB."""
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
        small = free <= 2 * self._nbytes
        if small != self._on_disk:
            self._on_disk = small
            self._tell(
                f"{SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, new weights need {2 * self._nbytes / 2**20:,.0f}: they go "
                f"through {tempfile.gettempdir()}, which is slower"
                if small
                else f"{SHARED_MEMORY} has room again: new weights go through it"
            )
        return tempfile.TemporaryDirectory(
            prefix=f"{leftovers.prefix()}weights-{version:06d}-", dir=None if small else SHARED_MEMORY
        )


def _kept(directory: Path) -> AbstractContextManager[Path]:
    """Files that stay where they are."""
    return nullcontext(directory)


def probe_sequences(prompts: Iterable[Prompt], tokens: int, room: int) -> list[tuple[int, ...]]:
    """Beginnings of the first prompts, until they hold `tokens` scored tokens; the first token of a sequence is not scored.

    There are always several: one sequence alone cannot show that sequences of a batch see each other.
    """
    each = max(2, min(room - 1, tokens // PROBE_SEQUENCES + 1))
    chosen: list[tuple[int, ...]] = []
    short: list[int] = []
    for prompt in prompts:
        if len(chosen) >= PROBE_SEQUENCES and sum(len(ids) - 1 for ids in chosen) >= tokens:
            break
        if len(prompt.token_ids) > 1:
            chosen.append(prompt.token_ids[:each])
        elif len(short) < each:
            short.extend(prompt.token_ids)
    if not chosen:  # no prompt has two tokens: join them, because the first token is not scored
        chosen = [(*short, *short)[:each]]
    # With one prompt only, the same tokens in reverse order are the second sequence.
    return chosen if len(chosen) > 1 else [*chosen, chosen[0][::-1]]
