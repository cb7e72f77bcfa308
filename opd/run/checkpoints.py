"""Checkpoints: a directory for each saved step, which is either complete or absent. Every file is hashed; none is a pickle.

    checkpoints/step-000050/  rank-0.safetensors  rank-1.safetensors  trainer.json  checkpoint.json

Beside these files lie further ones from the schedule, with state that does not follow from the weights. With rewards,
`credit/` has the credit's state.

The trainer's ranks copy their state in memory and write it while the run goes on. Once it is written, some steps later, the
driver writes `checkpoint.json` (what the checkpoint belongs to; BLAKE3 hash and size of every file) and renames the
directory. Only then it counts as a checkpoint, and only then older ones are deleted.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from blake3 import blake3

from opd.errors import RunDirError, RunError
from opd.files import blake3_file, raise_storage_errors, replace_dir
from opd.records.types import SavedCheckpoint, WrittenFile
from opd.run.paths import parse_step_name, step_name

if TYPE_CHECKING:  # it needs pydantic, which those who only list checkpoints do not
    from opd.config.sections import CheckpointConfig

MANIFEST = "checkpoint.json"
FORMAT = 2
"""Version of the format; a newer one is refused."""
FALL_BACK_FIX = "`--resume-from latest-valid` goes on from the newest checkpoint that is whole"
LATEST, LATEST_VALID = "latest", "latest-valid"
SUPERSEDED_PREFIX = "superseded-"
"""Stands before the name of a checkpoint that became obsolete because a resume started from an earlier step."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose every byte was verified."""

    path: Path
    step: int
    policy_version: int
    world_size: int
    """Trainer ranks that wrote it."""
    identity: Mapping[str, Any]
    """Hashes of what it was trained from, as given to `CheckpointStore`."""


@dataclass(frozen=True, slots=True)
class _OpenCheckpoint:
    """A checkpoint whose files are being written."""

    step: int
    policy_version: int
    path: Path
    deadline: float
    carried: Mapping[str, Mapping[str, Any]]
    """Name -> BLAKE3 hash and size of each file that the schedule gave, rather than a rank."""


class CheckpointSource(Protocol):
    """The part of a trainer that a checkpoint needs; see `opd.interfaces.Trainer`."""

    def begin_save(self, path: Path) -> None: ...

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None: ...


class CompanionSaver:
    """Saves a trainer together with something else, whose files go into a directory of their own beside the trainer's."""

    def __init__(self, trainer: CheckpointSource, companion: CheckpointSource, directory: str) -> None:
        self._trainer = trainer
        self._companion = companion
        self._directory = directory

    def begin_save(self, path: Path) -> None:
        """Have both copy their states and begin to write them. Raises: StorageError."""
        directory = path / self._directory
        with raise_storage_errors(directory):
            directory.mkdir()
        self._trainer.begin_save(path)
        self._companion.begin_save(directory)

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        """Return the files of both; None if not all of them are written after `wait_s` seconds. Raises: StorageError."""
        deadline = time.monotonic() + wait_s
        files = self._trainer.saved(wait_s)
        companion_files = None if files is None else self._companion.saved(max(0.0, deadline - time.monotonic()))
        if files is None or companion_files is None:
            return None
        return [*files, *(replace(file, name=f"{self._directory}/{file.name}") for file in companion_files)]


class CheckpointStore:
    """Implements `opd.interfaces.Checkpoints` under one root directory."""

    def __init__(
        self,
        root: Path,
        trainer: CheckpointSource,
        keep: CheckpointConfig,
        *,
        world_size: int,
        identity: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        self._root = root
        self._trainer = trainer
        self._keep = keep
        self._facts = {"world_size": world_size, "identity": dict(identity)}
        self._timeout_s = timeout_s
        self._open_checkpoint: _OpenCheckpoint | None = None
        self._saved_checkpoint: SavedCheckpoint | None = None

    def save(self, step: int, policy_version: int, carried: Mapping[str, bytes] | None = None) -> None:
        """Have the trainer copy its state and begin to write it. `carried`: name -> content of further files.

        At most one checkpoint is under way: if an earlier one is, wait for it first. Raises: as `committed`.
        """
        carried = carried or {}
        self._commit_files(wait=True)
        # If this process is killed, `opd.files.sweep_temporary_files` finds the directory by this name.
        temporary = self._root / f".tmp-{step_name(step)}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with raise_storage_errors(temporary):
                temporary.mkdir(parents=True)
                for name, content in carried.items():
                    (temporary / name).write_bytes(content)
            self._trainer.begin_save(temporary.absolute())
        except RunError:
            shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full
            raise
        facts = {name: {"blake3": blake3(raw).hexdigest(), "bytes": len(raw)} for name, raw in carried.items()}
        self._open_checkpoint = _OpenCheckpoint(
            step, policy_version, temporary, time.monotonic() + self._timeout_s, facts
        )

    def committed(self, wait: bool) -> SavedCheckpoint | None:
        """Implements `opd.interfaces.Checkpoints.committed`."""
        self._commit_files(wait)
        saved, self._saved_checkpoint = self._saved_checkpoint, None
        return saved

    def _commit_files(self, wait: bool) -> None:
        """Make the open checkpoint a whole one if all its files are written; with `wait`, wait for them until its deadline.

        Raises: StorageError; RunError past the deadline. The open checkpoint is then deleted.
        """
        checkpoint = self._open_checkpoint
        if checkpoint is None:
            return
        left_s = max(0.0, checkpoint.deadline - time.monotonic())
        try:
            files = self._trainer.saved(left_s if wait else 0.0)
            if files is None:
                if wait or not left_s:
                    raise RunError(
                        f"{step_name(checkpoint.step)}: the trainer took longer than {self._timeout_s:.0f} s to write it "
                        "(cluster.phase_timeout_s)"
                    )
                return
            self._open_checkpoint = None
            written = {file.name: {"blake3": file.blake3, "bytes": file.size} for file in files}
            size = sum(file.size for file in files)
            manifest = {
                "format": FORMAT,
                "step": checkpoint.step,
                "policy_version": checkpoint.policy_version,
                **self._facts,
                "files": {**written, **checkpoint.carried},
            }
            with raise_storage_errors(checkpoint.path):
                (checkpoint.path / MANIFEST).write_text(json.dumps(manifest, indent=2))
                replace_dir(checkpoint.path, self._root / step_name(checkpoint.step))
        except RunError:
            self._open_checkpoint = None
            shutil.rmtree(checkpoint.path, ignore_errors=True)
            raise
        self._saved_checkpoint = SavedCheckpoint(
            step=checkpoint.step, background_s=max(f.seconds for f in files), size=size
        )
        self._delete_old(checkpoint.step)

    def _delete_old(self, newest: int) -> None:
        """Delete old checkpoints but for the `keep` newest and those that `keep_every` keeps, and superseded ones up to here."""
        steps = [step for step in list_checkpoint_steps(self._root) if step <= newest]
        every = self._keep.keep_every
        for step in steps[: -self._keep.keep]:
            if not every or step % every:
                shutil.rmtree(self._root / step_name(step))
        for path in self._root.glob(f"{SUPERSEDED_PREFIX}step-*"):
            superseded_step = parse_step_name(path.name.removeprefix(SUPERSEDED_PREFIX))
            if superseded_step is not None and superseded_step <= newest:
                shutil.rmtree(path)


def list_checkpoint_steps(root: Path) -> list[int]:
    """Return the steps that have a checkpoint, the oldest first. Files may have been damaged since it was committed."""
    steps = [parse_step_name(path.name) for path in root.glob("step-*")]
    return sorted(step for step in steps if step is not None)


def choose_checkpoint(root: Path, selection: str, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint to go on from; None if the run has none. `selection`: `latest`, `latest-valid` or a step.

    `say` gets a sentence about each damaged checkpoint that `latest-valid` skips. Raises: RunDirError naming what is wrong.
    """
    steps = list_checkpoint_steps(root)
    if selection not in (LATEST, LATEST_VALID):
        if not selection.isdigit() or int(selection) not in steps:
            raise RunDirError.at(
                f"--resume-from {selection}",
                found="checkpoints of steps " + ", ".join(map(str, steps)) if steps else f"no checkpoint in {root}",
                wanted=f"{LATEST}, {LATEST_VALID} or the step of a checkpoint",
                fix="name one of these steps, or leave the option out",
            )
        return verify_checkpoint(root / step_name(int(selection)))
    if not steps:
        return None
    if selection == LATEST:
        return verify_checkpoint(root / step_name(steps[-1]))
    for step in reversed(steps):
        try:
            return verify_checkpoint(root / step_name(step))
        except DamagedCheckpoint as error:
            file, problem, *_ = str(error).split("\n")
            say(f"{step_name(step)} is passed over: {file}: {problem.removeprefix('  found:').strip()}")
    raise RunDirError.at(
        root,
        found=f"{len(steps)} checkpoints, every one of them damaged",
        wanted="a checkpoint that is whole",
        fix="put the files back, or start a new run",
    )


class DamagedCheckpoint(RunDirError):
    """A file of a checkpoint is missing, cut or changed."""


def verify_checkpoint(path: Path) -> Checkpoint:
    """Check every byte of a checkpoint before any of it is used.

    Raises: DamagedCheckpoint naming the file; RunDirError if a newer release wrote it.
    """
    manifest = path / MANIFEST
    try:
        data = json.loads(manifest.read_text(encoding="utf-8"))
        number = data["format"]
        if isinstance(number, int) and number > FORMAT:
            raise RunDirError.at(
                manifest,
                found=f"checkpoint format {number}",
                wanted=f"format {FORMAT} or older",
                fix="resume with the release of opd-merge that wrote it, or a newer one",
            )
        checkpoint = Checkpoint(path, data["step"], data["policy_version"], data["world_size"], data["identity"])
        files = {name: (facts["blake3"], facts["bytes"]) for name, facts in data["files"].items()}
        if number != FORMAT or path.name != step_name(checkpoint.step) or not files:
            raise ValueError(f"format {number}, step {checkpoint.step}, {len(files)} files")
    except RunDirError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise DamagedCheckpoint.at(
            manifest, found=problem, wanted="a checkpoint's manifest", fix=FALL_BACK_FIX
        ) from None
    for name, (digest, size) in files.items():
        _verify_file(path / name, digest, size)
    return checkpoint


def _verify_file(path: Path, digest: str, size: int) -> None:
    if not path.is_file():
        raise DamagedCheckpoint.at(path, found="no such file", wanted=f"a file of {size} bytes", fix=FALL_BACK_FIX)
    actual_size = path.stat().st_size
    if actual_size != size:
        raise DamagedCheckpoint.at(path, found=f"{actual_size} bytes", wanted=f"{size} bytes", fix=FALL_BACK_FIX)
    try:
        actual_digest = blake3_file(path)
    except OSError as error:  # a bad sector, or a file that the account may not read
        unread = error.strerror or str(error)
        raise DamagedCheckpoint.at(path, found=unread, wanted="a file that can be read", fix=FALL_BACK_FIX) from None
    if actual_digest != digest:
        raise DamagedCheckpoint.at(
            path, found=f"BLAKE3 {actual_digest[:16]}", wanted=f"BLAKE3 {digest[:16]}", fix=FALL_BACK_FIX
        )


def set_newer_aside(root: Path, step: int) -> list[str]:
    """Rename the checkpoints after `step`, so that nothing resumes from them while the run takes those steps again.

    Each is deleted when the run has saved a checkpoint of its step or a later one. Returns their names. Raises: OSError.
    """
    newer = [step_name(s) for s in list_checkpoint_steps(root) if s > step]
    for name in newer:
        superseded = root / f"{SUPERSEDED_PREFIX}{name}"
        shutil.rmtree(superseded, ignore_errors=True)
        (root / name).rename(superseded)
    return newer
