"""Keep a few episodes of a few steps in `RUN_DIR/traces`, so that people can read how the student acted before and acts now."""

from __future__ import annotations

from opd.files import raise_storage_errors
from opd.interfaces import Decoder
from opd.records.types import RolloutBatch, StepReport
from opd.run.paths import RunPaths
from opd.traces.record import StepTraces
from opd.traces.rendering import list_guard_events, make_trace
from opd.traces.selection import choose_episodes, group_episodes


class TraceFiles:
    """Implements `opd.interfaces.Traces`.

    The steps 1, 2, 4, 8 and so on stay. Of the others only the newest that has a checkpoint stays, and the last step. What is kept
    depends on the numbers of the steps alone, so a run that was killed and resumed keeps the same.
    """

    def __init__(self, paths: RunPaths, tokenizer: Decoder, every: int, last: int) -> None:
        """`every`: steps between two checkpoints; `last`: the last step of the run."""
        self._paths = paths
        self._tokenizer = tokenizer
        self._every = every
        self._last = last

    def keep(self, step: int, batch: RolloutBatch, report: StepReport) -> None:
        """Write the chosen episodes of a step, if the step is one to keep, and delete older steps. Raises: StorageError."""
        if not (_is_power_of_two(step) or step % self._every == 0 or step == self._last):
            return
        episodes, events = group_episodes(batch.rollouts), list_guard_events(batch.episodes.values())
        traces = [
            make_trace(episodes[name], reasons, report.token_losses, self._tokenizer, events)
            for name, reasons in choose_episodes(episodes).items()
        ]
        if not traces:
            return
        with raise_storage_errors(self._paths.traces):
            self._paths.traces.mkdir(exist_ok=True)
            StepTraces(step=step, episodes=tuple(traces)).save(self._paths.trace_file(step))
            for older, file in self._paths.traces_by_step().items():
                if older < step and not _is_power_of_two(older):
                    file.unlink()


def _is_power_of_two(step: int) -> bool:
    """Return True for 1, 2, 4, 8 and so on. Steps begin at 1."""
    return step & (step - 1) == 0
