"""The target log: each step's streams on disk as Arrow files, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from opd import cluster
from opd.files import replace_dir
from opd.interfaces import TargetSet


class ArrowTargetLog:
    """Implements `opd.interfaces.TargetLog`: `targets/step-000012/part-0.arrow` and so on."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, step: int, targets: TargetSet) -> Path:
        """Store the streams exactly as the trainer reads them."""
        final = self._root / f"step-{step:06d}"
        temporary = final.with_name(f".tmp-{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for index, stream in enumerate(cluster.fetch(list(targets.streams))):
            (temporary / f"part-{index}.arrow").write_bytes(stream.data)
        replace_dir(temporary, final)
        return final

    def prune(self, step: int) -> None:
        """Drop the steps up to `step`, which a checkpoint holds now."""
        for path in self._root.glob("step-*"):
            if int(path.name.removeprefix("step-")) <= step:
                shutil.rmtree(path)
