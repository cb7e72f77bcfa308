"""Files are replaced at once and whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from opd import files
from opd.errors import StorageError
from opd.files import (
    atomic_write_text,
    blake3_file,
    place_dir,
    raise_storage_errors,
    replace_dir,
    sweep_temporary_files,
)


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


@pytest.mark.parametrize("taken", ["directory", "file"])
def test_place_dir_replaces_nothing(taken: str, tmp_path: Path) -> None:
    tmp, final = tmp_path / "tmp", tmp_path / "final"
    (tmp / "deep").mkdir(parents=True)
    old = final
    if taken == "directory":
        final.mkdir()
        old = final / "old"
    old.write_text("old")
    with pytest.raises(FileExistsError, match="final"):
        place_dir(tmp, final)
    assert old.read_text() == "old" and (tmp / "deep").is_dir()
    old.unlink()
    place_dir(tmp, final)
    assert (final / "deep").is_dir() and list(tmp_path.iterdir()) == [final]


def test_blake3_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert blake3_file(tmp_path / "empty") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_sweep_takes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    for name in (".tmp-step-000004", ".step-000002.77.old", ".step-000003.77.old", "step-000002", "step-000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "origin").write_text(name)
    for name in (".lock", ".metrics.jsonl.77.tmp", "notes.tmp", ".tmpfile"):
        (tmp_path / name).write_text("")
    found = sweep_temporary_files(tmp_path)
    assert found == [".metrics.jsonl.77.tmp", ".step-000002.77.old", ".step-000003.77.old", ".tmp-step-000004"]
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == [".lock", ".tmpfile", "notes.tmp", "step-000001", "step-000002", "step-000003"]
    # Its successor never came, so what was moved aside is what there is.
    assert (tmp_path / "step-000003" / "origin").read_text() == ".step-000003.77.old"
    assert (tmp_path / "step-000002" / "origin").read_text() == "step-000002"
    assert sweep_temporary_files(tmp_path) == sweep_temporary_files(tmp_path / "nowhere") == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_disk_has_against_a_write_is_said_with_the_path(number: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(StorageError) as error, raise_storage_errors(path):
        raise OSError(number, os.strerror(number))
    assert str(error.value) == f"{path}: could not be written: {os.strerror(number)}"
    with pytest.raises(StorageError, match=r"x/y: could"), raise_storage_errors(path):
        raise OSError(number, os.strerror(number), str(path / "y"))
    with pytest.raises(StorageError, match=r"x/copy: could"), raise_storage_errors(path):  # as `shutil.copy` does
        raise OSError(number, os.strerror(number), "source", None, str(path / "copy"))
    with pytest.raises(StorageError), raise_storage_errors(path):
        raise SafetensorError(f"Error while serializing: I/O error: some words (os error {number})")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "x"), SafetensorError("header too large"), KeyError()]
)
def test_other_errors_pass(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)), raise_storage_errors(tmp_path):
        raise error


def test_an_output_is_whole_or_not_there_whatever_an_earlier_call_left(tmp_path: Path) -> None:
    (tmp_path / ".tmp-out").mkdir()
    (tmp_path / ".tmp-out" / "left").write_text("by a call that was killed")
    with pytest.raises(ValueError, match="broke"), files.fill_output(tmp_path / "out") as folder:
        (folder / "half").write_text("")
        raise ValueError("broke")
    assert list(tmp_path.iterdir()) == []
    with files.fill_output(tmp_path / "out") as folder:
        (folder / "whole").write_text("")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"] and len(list(tmp_path.iterdir())) == 1
