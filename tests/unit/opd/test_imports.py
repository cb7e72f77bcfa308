"""Large imports leave out what nobody needs, and leave everything as it was."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opd.imports import import_lightly

WANTS = "try:\n    import sklearn\n    HAS = True\nexcept ImportError:\n    HAS = False\nimport gc\nCOLLECTED = gc.isenabled()\n"


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that would like scikit-learn, one that breaks, and a scikit-learn."""
    (tmp_path / "would_like_it.py").write_text(WANTS)
    (tmp_path / "would_like_it_too.py").write_text(WANTS)
    (tmp_path / "broken_package.py").write_text("raise ImportError('libfoo.so.1')")
    (tmp_path / "sklearn.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(sys.modules)
    sys.modules.pop("sklearn", None)
    yield
    for name in ("sklearn", "would_like_it", "would_like_it_too"):
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_scikit_learn_is_left_out_and_there_afterwards() -> None:
    import_lightly("would_like_it")
    found = sys.modules["would_like_it"]
    assert not found.HAS and not found.COLLECTED
    assert gc.isenabled()
    assert importlib.import_module("sklearn").__file__


def test_whoever_has_scikit_learn_keeps_it() -> None:
    mine = importlib.import_module("sklearn")
    import_lightly("would_like_it", "would_like_it_too")
    assert sys.modules["would_like_it"].HAS and sys.modules["would_like_it_too"].HAS
    assert sys.modules["sklearn"] is mine


def test_an_import_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(ImportError, match=r"libfoo"):
        import_lightly("broken_package")
    assert gc.isenabled() and "sklearn" not in sys.modules


def test_what_is_there_is_not_imported_again() -> None:
    import_lightly("would_like_it")
    frozen = gc.get_freeze_count()
    import_lightly("would_like_it")
    assert gc.get_freeze_count() <= frozen, "frozen objects may have died; none came"
