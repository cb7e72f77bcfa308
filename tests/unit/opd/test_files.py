"""Files are replaced at once and whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from opd.files import atomic_write_text, blake3_file, replace_dir


def test_a_failed_write_leaves_the_old_text_and_no_litter(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    atomic_write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("taken", [False, True])
def test_replace_dir_leaves_only_the_new_directory(taken: bool, tmp_path: Path) -> None:
    tmp, final = tmp_path / "tmp", tmp_path / "final"
    (tmp / "deep").mkdir(parents=True)
    (tmp / "deep" / "new").write_text("new")
    if taken:
        final.mkdir()
        (final / "old").write_text("old")
    replace_dir(tmp, final)
    assert [p.relative_to(final).as_posix() for p in sorted(final.rglob("*"))] == ["deep", "deep/new"]
    assert list(tmp_path.iterdir()) == [final]


def test_blake3_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert blake3_file(tmp_path / "empty") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
