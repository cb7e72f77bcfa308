"""Files that survive a crash: written beside their place, synced, renamed, and the directory synced too."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from opd.errors import RunDirError, StorageError

STORAGE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO})
"""Error numbers with which a disk refuses a write; any other number is a mistake of ours."""


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable. Raises: OSError."""
    _fsync_path(path, os.O_RDONLY | os.O_DIRECTORY)


def atomic_write_text(path: Path, text: str) -> None:
    """Write UTF-8 so that `path` holds either its old content or all of the new one. Raises: OSError."""
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file beside `path` to write to, which takes its place when the block ends well and is deleted otherwise. Raises: OSError."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with tmp.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)
    fsync_dir(path.parent)


def refuse_existing_output(output: Path) -> None:
    """Refuse an output directory that exists. Raises: RunDirError."""
    if output.exists():
        raise RunDirError.at(
            output, found="something that exists", wanted="a new directory", fix="remove it, or give another --output"
        )


@contextmanager
def fill_output(output: Path) -> Iterator[Path]:
    """Give an empty directory beside `output` to fill; it gets the name `output` when the block ends well, and is deleted otherwise.

    Raises: StorageError.
    """
    temporary = output.with_name(f".tmp-{output.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a call that was killed
    try:
        with raise_storage_errors(output):
            temporary.mkdir(parents=True)
            yield temporary
            replace_dir(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_dir(tmp: Path, final: Path) -> None:
    """Sync every file under `tmp` and rename it to `final`, which lies on the same file system.

    A directory already at `final` is moved aside first and deleted last: a crash in between loses neither of the two,
    and `final` is never a mixture. Raises: OSError.
    """
    _fsync_tree(tmp)
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        final.rename(old)
    tmp.rename(final)
    fsync_dir(final.parent)
    fsync_dir(final.parent.parent)  # the parent may be as new as `final`
    if old.exists():
        shutil.rmtree(old)


def place_dir(tmp: Path, final: Path) -> None:
    """Sync every file under `tmp` and rename it to `final`, which lies on the same file system and must not exist.

    Of two processes that do it at the same time one succeeds. Raises: FileExistsError if something is at `final`, other than an
    empty directory; OSError.
    """
    _fsync_tree(tmp)
    try:
        tmp.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from None
    fsync_dir(final.parent)
    fsync_dir(final.parent.parent)  # the parent may be as new as `final`


def sweep_temporary_files(directory: Path) -> list[str]:
    """Clear what a killed process left in a directory: temporary files and directories, and what `replace_dir` moved
    aside, which is put back if its successor never came. Return the names that were found. Raises: OSError.
    """
    leftovers = [p for p in directory.iterdir() if _LEFTOVER.match(p.name)] if directory.is_dir() else []
    for path in leftovers:
        old_name = _ASIDE.match(path.name)
        if old_name and not (directory / old_name[1]).exists():
            path.rename(directory / old_name[1])
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return sorted(path.name for path in leftovers)


_ASIDE = re.compile(r"^\.(.+)\.\d+\.old$")
_LEFTOVER = re.compile(r"^\.(tmp-.+|.+\.\d+\.(old|tmp))$")


@contextmanager
def raise_storage_errors(path: Path) -> Iterator[None]:
    """Within, raise StorageError where the disk refuses a write, with the file's name, or else `path`; every other error passes."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        if error.errno not in STORAGE_ERRNOS:
            raise
        # An error in a copy names two files: the second one is the file that was being written.
        target = error.filename2 or error.filename or path
        raise StorageError(f"{target}: could not be written: {error.strerror}") from None
    except SafetensorError as error:  # hides the error number in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None or int(number[1]) not in STORAGE_ERRNOS:
            raise
        raise StorageError(f"{path}: could not be written: {os.strerror(int(number[1]))}") from None


def cache_dir() -> Path:
    """Return our directory among the platform's caches. It need not exist."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "opd-merge"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opd-merge"


def blake3_json(data: Any) -> str:
    """Return the hash of what can be JSON, as 64 hexadecimal digits; the order of keys does not matter."""
    return blake3(json.dumps(data, sort_keys=True).encode()).hexdigest()


def blake3_file(path: Path, threads: int = blake3.AUTO) -> str:
    """Return the hash of a file's bytes as 64 hexadecimal digits, read through a memory map. Raises: OSError."""
    return blake3(max_threads=threads).update_mmap(path).hexdigest()


def _fsync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            _fsync_path(Path(directory, name), os.O_RDONLY)
        fsync_dir(Path(directory))


def _fsync_path(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
