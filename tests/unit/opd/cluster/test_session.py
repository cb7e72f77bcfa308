"""What a session of Ray refuses before it starts anything."""

from __future__ import annotations

import pytest

from opd.cluster.session import _refuse_long_directory, room_for_sockets
from opd.errors import ConfigError


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_temporary_directory_without_room_for_rays_sockets_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(known, raising=False)
    _refuse_long_directory()
    monkeypatch.setenv(name, "/" + "x" * (room_for_sockets() - 1))
    _refuse_long_directory()
    monkeypatch.setenv(name, "/" + "x" * room_for_sockets())
    with pytest.raises(
        ConfigError, match=f"environment variable {name}(.|\n)*at most {room_for_sockets()} bytes(.|\n)*RAY_TMPDIR=/tmp"
    ):
        _refuse_long_directory()


def test_a_short_directory_for_ray_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/" + "x" * 200)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    _refuse_long_directory()
