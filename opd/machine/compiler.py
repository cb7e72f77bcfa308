"""Requirements of torch.compile: a C++ compiler, and a directory for compiled code that only this user can write to."""

from __future__ import annotations

import functools
import getpass
import importlib.util
import os
import re
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

from opd.machine import orphans

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable from which torch reads the directory for compiled code."""
HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
"""Environment variable; with `0` torch keeps no precompiled headers."""


def find_compiler() -> str | None:
    """Return the path of a C++ compiler; None if there is none."""
    return shutil.which("c++") or shutil.which("g++")


@functools.cache
def can_compile(key: str, action: str, *, on_gpu: bool = False) -> bool:
    """Return True if there is a C++ compiler, and for a GPU Triton. If not, the setting `key` has no effect, and the user is warned once.

    `action`: the warning's subject and verb before "eagerly", such as "layers run".
    """
    keep_compiled_code_private()
    lacks = None
    if find_compiler() is None:
        lacks = "C++ compiler (g++)"
    elif on_gpu and importlib.util.find_spec("triton") is None:
        lacks = "package triton"
    if lacks is not None:
        warnings.warn(f"{key}: no {lacks}, {action} eagerly", stacklevel=2)
    return lacks is None


def keep_compiled_code_private() -> None:
    """Have torch keep compiled code where only this user can write, unless `TORCHINDUCTOR_CACHE_DIR` names a directory.

    Torch's default directory has a predictable name in the temporary directory. Torch uses it no matter who made it, and
    loads the libraries and headers in it, so another user could plant code there. So we make it first. If another user made
    it already, or may write to it (torch makes it with the umask, which often lets the group write), torch gets a directory
    of ours beside it. If that one is not private either, it gets a temporary directory of this process.
    """
    if CACHE in os.environ:
        return
    directory = _default_cache_dir()
    if not _make_private(directory):
        own_directory = directory.with_name(f"opd-{directory.name}")
        os.environ[CACHE] = (
            str(own_directory)
            if _make_private(own_directory)
            else tempfile.mkdtemp(prefix=f"{orphans.directory_prefix()}torch-")
        )
        os.environ[HEADERS] = "0"  # torch would keep headers in its default directory in spite of the other variable


def _make_private(directory: Path) -> bool:
    """Make a directory unless it exists. Returns True if it belongs to this user and nobody else may write to it."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        status = directory.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return True


def _default_cache_dir() -> Path:
    """Return the default directory of `torch._inductor`. It is computed here, because importing torch takes seconds."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
