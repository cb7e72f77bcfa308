"""Torch's place for the libraries that it compiles, and loads again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opd.machine import compiler

ROOT = Path(__file__).parents[4]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return torch's own place for it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "a/b:c")
    for name in (compiler.CACHE, compiler.HEADERS):
        monkeypatch.setenv(name, "")  # so that the variable is put back
        monkeypatch.delenv(name)
    return Path(default_cache_dir())


def test_it_is_a_directory_of_ones_own_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        compiler.keep_compiled_code_private()
    finally:
        os.umask(before)
    assert cache.name == "torchinductor_a_b_c" and cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o755)  # as torch made it in earlier runs
    compiler.keep_compiled_code_private()
    assert compiler.CACHE not in os.environ, "torch's own place is good"


def test_one_that_is_named_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.CACHE, "/mine")
    compiler.keep_compiled_code_private()
    assert os.environ[compiler.CACHE] == "/mine" and not cache.exists()


@pytest.mark.parametrize("planted", ["open", "group", "link", "file", "another user's"])
def test_what_others_may_have_put_there_is_not_used(cache: Path, planted: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    if planted == "link":
        cache.symlink_to(target)
    elif planted == "file":
        cache.touch(mode=0o600)
    else:
        cache.mkdir(mode=0o700)
        cache.chmod({"open": 0o777, "group": 0o775}.get(planted, 0o700))
    if planted == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory away")
        os.chown(cache, 65534, 65534)
    compiler.keep_compiled_code_private()
    used = Path(os.environ.pop(compiler.CACHE))
    assert used == cache.with_name(f"opd-{cache.name}") and used.stat().st_mode & 0o777 == 0o700
    compiler.keep_compiled_code_private()
    assert os.environ.pop(compiler.CACHE) == str(used), "what was compiled is found again"
    used.chmod(0o777)
    compiler.keep_compiled_code_private()
    last = Path(os.environ[compiler.CACHE])
    assert last.name.startswith("opd-run-") and last.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("planted", [False, True])
def test_torch_compiles_where_nobody_else_writes(planted: bool, tmp_path: Path) -> None:
    if compiler.find_compiler() is None:
        pytest.skip("no C++ compiler")
    theirs = tmp_path / "torchinductor_me"
    if planted:
        theirs.mkdir()
        theirs.chmod(0o777)
    code = (
        "from opd.machine.compiler import can_compile\nassert can_compile('key', 'it runs')\nimport torch\n"
        "torch.compile(lambda x: x.sin() + x.cos())(torch.ones(64))"
    )
    env = {key: value for key, value in os.environ.items() if key not in (compiler.CACHE, compiler.HEADERS)}
    env |= {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), "LOGNAME": "me"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=300)
    assert list(tmp_path.rglob("*.so"))
    assert bool(list(theirs.rglob("*"))) is not planted
    assert theirs.stat().st_mode & 0o777 == (0o777 if planted else 0o700)
