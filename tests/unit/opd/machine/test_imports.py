"""Large imports leave out what nobody needs, and leave everything as it was."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd.machine.imports import import_lightly

WANTS = """import gc
from importlib.util import find_spec
HAS = {name for name in ("sklearn", "scipy") if find_spec(name)}
COLLECTED = gc.isenabled()
"""
LEFT_OUT = ("sklearn", "scipy")


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages that would like scikit-learn and scipy, one that breaks, a scikit-learn and a scipy."""
    (tmp_path / "would_like_it.py").write_text(WANTS)
    (tmp_path / "would_like_it_too.py").write_text(WANTS)
    (tmp_path / "broken_package.py").write_text("raise ImportError('libfoo.so.1')")
    for name in LEFT_OUT:
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(sys.modules)
    for name in LEFT_OUT:
        sys.modules.pop(name, None)
    yield
    for name in (*LEFT_OUT, "would_like_it", "would_like_it_too"):
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_scikit_learn_and_scipy_are_left_out_and_there_afterwards() -> None:
    import_lightly("would_like_it")
    found = sys.modules["would_like_it"]
    assert not found.HAS and not found.COLLECTED
    assert gc.isenabled()
    for name in LEFT_OUT:
        assert importlib.import_module(name).__file__


@pytest.mark.parametrize("name", LEFT_OUT)
def test_whoever_has_one_of_them_keeps_it(name: str) -> None:
    mine = importlib.import_module(name)
    import_lightly("would_like_it", "would_like_it_too")
    assert sys.modules["would_like_it"].HAS == sys.modules["would_like_it_too"].HAS == {name}
    assert sys.modules[name] is mine


def test_an_import_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(ImportError, match=r"libfoo"):
        import_lightly("broken_package")
    assert gc.isenabled() and not sys.modules.keys() & LEFT_OUT


def test_what_is_there_is_not_imported_again() -> None:
    import_lightly("would_like_it")
    frozen = gc.get_freeze_count()
    import_lightly("would_like_it")
    assert gc.get_freeze_count() <= frozen, "frozen objects may have died; none came"
