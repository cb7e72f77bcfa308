"""Create and lock a run directory, and say what is intact when its disk is full."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from opd.errors import RunDirError, StorageError
from opd.files import place_dir, raise_storage_errors
from opd.live.status import is_held
from opd.machine import orphans
from opd.run import checkpoints
from opd.run.paths import RunPaths
from opd.text import quote_for_shell

LOOK_S = 0.2
"""Seconds to wait for the lock: `opd status` holds it for a moment to find out whether anybody does."""


def refuse_existing(root: Path) -> None:
    """Refuse a run directory that exists, or a name that something else has. Raises: RunDirError."""
    if not root.exists():
        return
    if not RunPaths(root).pipeline.exists():
        raise RunDirError.at(
            root,
            found="a directory or file that is no run",
            wanted="a path that does not exist yet",
            fix="--run-dir names another; what is there may be somebody's",
        )
    raise RunDirError.at(
        root,
        found="a run directory that exists",
        wanted="a new one",
        fix=f"`opd merge --resume {quote_for_shell(root)}` goes on with it; --run-dir names another",
    )


def refuse_no_run(paths: RunPaths) -> None:
    """Refuse a directory without the pipeline of a run. Raises: RunDirError."""
    if not paths.pipeline.exists():
        raise RunDirError.at(
            paths.root,
            found=f"no {paths.pipeline.name}",
            wanted="a run directory of `opd merge`",
            fix="check the path; `opd merge PIPELINE` begins a new run",
        )


@contextmanager
def new_directory(root: Path) -> Iterator[RunPaths]:
    """Give an empty directory beside `root` to fill; it gets the name `root` when the block ends well, and is deleted
    otherwise.

    Raises: RunDirError if that is impossible, or if another command has begun a run in `root` meanwhile.
    """
    _clear_abandoned(root)
    temporary = root.with_name(f".tmp-{root.name}-{orphans.driver_mark()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise RunDirError.at(
            root,
            found=f"{root.parent}: {error.strerror}",
            wanted="a directory that can be made",
            fix="give another place with --run-dir, or correct the rights",
        ) from None
    try:
        yield RunPaths(temporary)
        place_dir(temporary, root)
    except FileExistsError:
        refuse_existing(root)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _clear_abandoned(root: Path) -> None:
    """Delete the directories that `new_directory` made for `root` in processes that were killed meanwhile."""
    head = f".tmp-{root.name}-"
    for path in root.parent.glob(".tmp-*"):
        if path.name.startswith(head) and not orphans.is_driver_alive(path.name.removeprefix(head)):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def lock_run_directory(paths: RunPaths) -> Iterator[None]:
    """Within, no other process can run a merge in this directory. The system frees the lock when the process ends, however it ends.

    Raises: RunDirError if another one has the lock.
    """
    try:
        with FileLock(paths.lock, timeout=LOOK_S, poll_interval=LOOK_S / 4):
            yield
    except Timeout:
        raise _make_at_work_error(paths) from None


@contextmanager
def lock_to_read(paths: RunPaths) -> Iterator[None]:
    """Do as `lock_run_directory` does, but without a lock in a directory that may only be read.

    Raises: RunDirError if a merge is at work there.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_run_directory(paths))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            if is_held(paths.lock):
                raise _make_at_work_error(paths) from None
        yield


def _make_at_work_error(paths: RunPaths) -> RunDirError:
    return RunDirError.at(
        paths.root, found="another `opd merge` at work in it", wanted="one at a time", fix="wait for it or stop it"
    )


@contextmanager
def explain_what_is_intact(paths: RunPaths) -> Iterator[None]:
    """Within, the error of a full disk also names what is intact and how to go on. Raises: StorageError."""
    try:
        with raise_storage_errors(paths.root):
            yield
    except StorageError as error:
        steps = checkpoints.list_checkpoint_steps(paths.checkpoints)
        intact = f"checkpoint of step {steps[-1]}" if steps else "the run directory; no checkpoint was due yet"
        raise StorageError(
            f"{error}\n  intact: {intact}\n  fix:    make room or mend the disk, then `opd merge --resume {quote_for_shell(paths.merge_root)}`"
        ) from None


def link_files(source: Path, target: Path) -> None:
    """Give the files of the directory `source` a second name in `target`, which is replaced: hard links if the file system has
    them, else copies."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=_link_or_copy)
    for directory in (target, *(path for path in target.rglob("*") if path.is_dir())):
        directory.chmod(directory.stat().st_mode | stat.S_IRWXU)  # the source may be one that nobody may write to


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # most likely no hard links here; the copy raises any other error again
        shutil.copy2(source, target)
