"""A run as far as it comes without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.config.sections import CheckpointConfig
from opd.errors import RunError
from opd.files import blake3_file
from opd.records.types import WrittenFile
from opd.run.checkpoints import CheckpointStore
from pipelines.merging import run as merging


class OneFile:
    """A trainer whose whole state is one file."""

    def begin_save(self, path: Path) -> None:
        self._file = path / "rank-0.safetensors"
        self._file.write_bytes(b"weights")

    def saved(self, wait_s: float) -> list[WrittenFile]:
        return [WrittenFile(name=self._file.name, blake3=blake3_file(self._file), size=7, seconds=0.0)]


@pytest.fixture
def interrupted(world: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with checkpoints of steps 1 and 2, as far as a run comes without Ray."""

    def no_ray(*_: Any) -> None:
        raise RunError("it would start now")

    monkeypatch.setattr(merging, "ray_session", no_ray)
    root: Path = world.root / "run"
    with pytest.raises(RunError, match="it would start now"):
        merging.start(load_pipeline(world.write()), root)
    identity = json.loads((root / "manifest.json").read_text())["identity"]
    trainer: Any = OneFile()
    store = CheckpointStore(
        root / "checkpoints", trainer, CheckpointConfig(), world_size=2, identity=identity, timeout_s=9
    )
    for step in (1, 2):
        store.save(step, step)
        store.committed(wait=True)
    (root / "metrics.jsonl").write_text('{"step": 1, "phase_s": {}}\n{"step": 2, "phase_s": {}}\n')
    (root / "checkpoints" / ".tmp-step-000003").mkdir()
    return root
