"""What torch.compile needs: a C++ compiler, and a place of its own for what it compiled."""

from __future__ import annotations

import functools
import getpass
import os
import re
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

from opd.machine import leftovers

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that torch reads, with the directory of what it compiled."""
HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def find_compiler() -> str | None:
    """Return the path of a C++ compiler; None if there is none."""
    return shutil.which("c++") or shutil.which("g++")


@functools.cache
def can_compile(key: str, action: str) -> bool:
    """Return True if there is a C++ compiler. Without it a setting `key` has no effect: one warning says `action`, such as "layers run", and "eagerly"."""
    keep_compiled_code_private()
    has_compiler = find_compiler() is not None
    if not has_compiler:
        warnings.warn(f"{key}: no C++ compiler (g++), {action} eagerly", stacklevel=2)
    return has_compiler


def keep_compiled_code_private() -> None:
    """Let torch keep what it compiles where this user alone can write, unless `TORCHINDUCTOR_CACHE_DIR` names a place.

    Torch's own place has a known name in the temporary directory. Torch takes it whoever made it, and loads the libraries and
    headers that lie there. So we make it first. If another user was faster, or may write to it (torch makes it by the umask, which
    often lets the group write), torch has a place of ours beside it; if that is not private either, a directory of this process.
    """
    if CACHE in os.environ:
        return
    directory = _default_cache_dir()
    if not _make_private(directory):
        own_directory = directory.with_name(f"opd-{directory.name}")
        os.environ[CACHE] = (
            str(own_directory) if _make_private(own_directory) else tempfile.mkdtemp(prefix=f"{leftovers.directory_prefix()}torch-")
        )
        os.environ[HEADERS] = "0"  # they are in torch's own place whatever the other variable says


def _make_private(directory: Path) -> bool:
    """Make a directory unless it is there. Returns True if it is this user's, and no other may write to it."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        status = directory.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return True


def _default_cache_dir() -> Path:
    """Return the directory that `torch._inductor` takes, without the seconds that an import of torch takes."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
