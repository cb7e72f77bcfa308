"""Checkpoints: a directory per step, complete or absent, hashed file by file, without pickle.

checkpoints/step-000050/  trainer.safetensors  trainer.json  state.json
                          state.json: step, policy version, BLAKE3 of every other file
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from opd.errors import RunDirError
from opd.files import blake3_file, replace_dir
from opd.interfaces import Trainer

STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was written to the end."""

    path: Path
    step: int
    policy_version: int


class CheckpointStore:
    """Implements `opd.interfaces.Checkpoints` under one root directory."""

    def __init__(self, root: Path, trainer: Trainer, keep: int) -> None:
        self._root = root
        self._trainer = trainer
        self._keep = keep

    def save(self, step: int, policy_version: int) -> None:
        """Write everything into a temporary directory, flush it, and rename it: a reader never sees half of it."""
        final = self._root / f"step-{step:06d}"
        temporary = final.with_name(f".tmp-{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        self._trainer.save(temporary.absolute())
        files = {p.name: blake3_file(p) for p in sorted(temporary.iterdir())}
        (temporary / STATE).write_text(
            json.dumps({"format": 1, "step": step, "policy_version": policy_version, "files": files}, indent=2)
        )
        replace_dir(temporary, final)
        for old in sorted(self._root.glob("step-*"))[: -self._keep]:
            shutil.rmtree(old)


def latest(root: Path) -> Checkpoint | None:
    """The newest checkpoint, verified. Raises: RunDirError naming a file that is missing or was changed."""
    found = sorted(root.glob("step-*"))
    if not found:
        return None
    path = found[-1]
    try:
        state = json.loads((path / STATE).read_text())
        checkpoint, files = Checkpoint(path, state["step"], state["policy_version"]), state["files"].items()
        if path.name != f"step-{checkpoint.step:06d}":
            raise ValueError(f"step {checkpoint.step}")
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirError.at(
            path / STATE,
            found=str(error),
            wanted="the record of a complete checkpoint",
            fix=f"delete {path}; the one before it is used then",
        ) from None
    for name, digest in files:
        actual = blake3_file(path / name) if (path / name).exists() else "no such file"
        if actual != digest:
            raise RunDirError.at(
                path / name,
                found=f"BLAKE3 {actual[:16]}",
                wanted=f"BLAKE3 {digest[:16]}",
                fix=f"delete {path} to resume from the checkpoint before it",
            )
    return checkpoint
