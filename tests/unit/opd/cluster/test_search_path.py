"""Places in which workers look for modules."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from opd.cluster import search_path


@pytest.mark.parametrize("last", [False, True], ids=["we are on the path", "an editable install"])
def test_folders_beside_a_program_do_not_stand_in_for_our_packages(
    last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python searches a program's own directory first, and so would workers."""
    mine, folders = tmp_path / "mine", tmp_path / "folders"
    for name in ("teachers", "experts"):
        (mine / name).mkdir(parents=True)
        (mine / name / "__init__.py").touch()
        (folders / name).mkdir(parents=True)
    (mine / "pipelines.py").touch()
    (mine / "my_verifier.py").touch()
    others = [entry for entry in sys.path if entry and (not last or entry != search_path.ROOT)]
    monkeypatch.setattr(sys, "path", ["", str(mine), str(folders), *others])
    path = search_path.order_worker_path()
    for name in ("opd", "teachers", "experts", "pipelines"):
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin == str(Path(search_path.ROOT, name, "__init__.py"))
    assert str(mine) in path and path[0] == str(folders)


def test_it_is_the_drivers_and_the_current_directory_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an editable install we are on no path, and a `teachers.py` in the current directory would come before us."""
    (tmp_path / "teachers.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a", "/b"])
    assert search_path.order_worker_path() == ["/a", "/b", search_path.ROOT, str(tmp_path)]
