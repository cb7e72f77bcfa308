"""Refusals of a session of Ray before it starts anything."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd.cluster.session import _make_own_directory, find_long_ray_variable, max_socket_directory_bytes
from opd.errors import ConfigError


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """pytest's own directories have too long a path for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_temporary_directory_without_room_for_rays_sockets_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(known, raising=False)
    assert find_long_ray_variable(os.environ) is None
    monkeypatch.setenv(name, "/" + "x" * (max_socket_directory_bytes() - 1))
    assert find_long_ray_variable(os.environ) is None
    monkeypatch.setenv(name, "/" + "x" * max_socket_directory_bytes())
    with pytest.raises(
        ConfigError,
        match=f"environment variable {name}(.|\n)*at most {max_socket_directory_bytes()} bytes(.|\n)*RAY_TMPDIR=/tmp",
    ):
        _make_own_directory()


def test_a_short_directory_for_ray_is_enough_and_need_not_be_there(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path
) -> None:
    monkeypatch.setenv("TMPDIR", "/" + "x" * 200)
    monkeypatch.setenv("RAY_TMPDIR", str(short_directory / "new"))
    assert _make_own_directory().parent == short_directory / "new"


def test_a_place_where_rays_files_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, short_directory: Path) -> None:
    (short_directory / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(short_directory / "file"))
    with pytest.raises(ConfigError, match=r"temporary directory(.|\n)*set RAY_TMPDIR"):
        _make_own_directory()
