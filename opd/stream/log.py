"""The target log: each step's parts on disk as Arrow files, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from opd.files import replace_dir
from opd.stream.schema import PartRecord
from opd.stream.targets import TargetStream


class ArrowTargetLog:
    """Implements `opd.interfaces.TargetLog`: `targets/step-000012/worker-0-part-0000.arrow` and so on."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def record(self, step: int, targets: TargetStream) -> None:
        """Write every part as it passes; the step is in the log when all have passed, before the optimiser steps."""
        final = self._root / f"step-{step:06d}"
        temporary = final.with_name(f".tmp-{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

        def sink(record: PartRecord | None, raw: np.ndarray | None) -> None:
            if record is None or raw is None:
                replace_dir(temporary, final)
            else:
                (temporary / f"worker-{record.worker}-part-{record.number:04d}.arrow").write_bytes(raw.data)

        targets.tee(sink)

    def prune(self, step: int) -> None:
        """Drop the steps up to `step`, which a checkpoint holds now."""
        for path in self._root.glob("step-*"):
            if int(path.name.removeprefix("step-")) <= step:
                shutil.rmtree(path)
