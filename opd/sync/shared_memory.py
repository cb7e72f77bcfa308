"""Weight push on one machine: safetensors in shared memory, reloaded in place."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from opd.machine import leftovers
from opd.machine.leftovers import SHARED_MEMORY
from opd.sync.proof import ProvenSync, SyncSpec


class SharedMemorySync(ProvenSync):
    """Weight push through files in shared memory: driver, rank 0 and all engines have to be on one machine."""

    def __init__(self, spec: SyncSpec) -> None:
        super().__init__(spec)
        self._kept_files = ExitStack()
        """Deletes the files of the last push when it is closed."""
        self._kept_nbytes = 0
        """Their bytes in shared memory."""
        self._on_disk = False

    def send_weights(self, version: int) -> None:
        with ExitStack() as files:
            # The files go when this block ends, unless `pop_all` takes them over for later.
            directory = Path(files.enter_context(self._choose_directory(version)))
            base = self._spec.trainer.export_changed(directory)
            self.begin_trainer_logprobs()  # its cores have nothing else to do while the engines load
            # An engine that restarts later reads the weights once more: from a new export, or from these files if they are kept.
            reload_files: Callable[[], AbstractContextManager[Path]] = partial(self._exported_weights, version)
            if self._spec.keeps_weights:
                reload_files = partial(_keep_files, directory)
            self._spec.engine.load(directory, restart_weights=reload_files, base=base)
            if self._spec.keeps_weights:
                self._kept_files.close()
                # They stay for engines that restart, and are not deleted at the end of this block.
                self._kept_files = files.pop_all()
                self._kept_nbytes = 0 if self._on_disk else self._spec.nbytes

    @contextmanager
    def _exported_weights(self, version: int) -> Iterator[Path]:
        """Export the pushed weights to files a second time; they exist within the context."""
        with self._choose_directory(version) as directory:
            self._spec.trainer.export_changed(Path(directory))
            yield Path(directory)

    def _choose_directory(self, version: int) -> tempfile.TemporaryDirectory[str]:
        """Make a directory in shared memory if that has room for twice the weights, else on disk: containers often get 64 MiB.

        Weights of the last push that are kept there count as room.
        """
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
        needed = 2 * self._spec.nbytes - self._kept_nbytes
        small = free <= needed
        if small != self._on_disk:
            self._on_disk = small
            self._spec.tell(
                f"{SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, new weights need {needed / 2**20:,.0f}: they go "
                f"through {tempfile.gettempdir()}, which is slower"
                if small
                else f"{SHARED_MEMORY} has room again: new weights go through it"
            )
        return tempfile.TemporaryDirectory(
            prefix=f"{leftovers.directory_prefix()}weights-{version:06d}-", dir=None if small else SHARED_MEMORY
        )


def _keep_files(directory: Path) -> AbstractContextManager[Path]:
    """Return a context that leaves the files where they are."""
    return nullcontext(directory)
