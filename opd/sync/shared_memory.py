"""Weight push on one machine: safetensors in shared memory, reloaded in place."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from opd.machine import orphans
from opd.machine.orphans import SHARED_MEMORY
from opd.sync.proof import ProvenSync, SyncSpec


class SharedMemorySync(ProvenSync):
    """Weight push through files in shared memory: driver, rank 0 and all engines have to be on one machine."""

    def __init__(self, spec: SyncSpec) -> None:
        super().__init__(spec)
        self._kept_files = ExitStack()
        """Contexts of the last push's files; closing it deletes them."""
        self._kept_nbytes = 0
        """Bytes of these files in shared memory; 0 if they are on disk."""
        self._on_disk = False
        """True if the last push went through the disk, because shared memory was too small."""

    def send_weights(self, version: int) -> None:
        with ExitStack() as files:
            # The files are deleted when this block ends, unless `pop_all` moves them to `_kept_files`.
            directory = Path(files.enter_context(self._choose_directory(version)))
            base = self._spec.trainer.export_changed(directory)
            self.begin_trainer_logprobs()  # the trainer has nothing else to do while the engines load
            # An engine that restarts later loads the weights again: from these files if they are kept, else from a new export.
            keeps = self._spec.keeps_weights
            reload_files = (lambda: nullcontext(directory)) if keeps else partial(self._exported_weights, version)
            self._spec.engine.load(directory, restart_weights=reload_files, base=base)
            if keeps:
                self._kept_files.close()
                # The new files stay for engines that restart: they are not deleted at the end of this block.
                self._kept_files = files.pop_all()
                self._kept_nbytes = 0 if self._on_disk else self._spec.nbytes

    @contextmanager
    def _exported_weights(self, version: int) -> Iterator[Path]:
        """Export the trainer's weights to files again; the files exist within the context."""
        with self._choose_directory(version) as directory:
            self._spec.trainer.export_changed(Path(directory))
            yield Path(directory)

    def _choose_directory(self, version: int) -> tempfile.TemporaryDirectory[str]:
        """Make a directory in shared memory if that has room for twice the weights, else on disk: containers often have 64 MiB.

        Kept weights of the last push count as free, because they are deleted after this push.
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
            prefix=f"{orphans.directory_prefix()}weights-{version:06d}-", dir=None if small else SHARED_MEMORY
        )
