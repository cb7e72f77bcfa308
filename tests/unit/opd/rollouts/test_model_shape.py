"""The shape of a model is read once for all copies of its config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd.rollouts import worker


def write(directory: Path, width: int) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": width}))
    return directory


def test_a_copy_of_a_config_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    really = worker._read_shape

    def counted(model_dir: Path) -> dict[str, object]:
        read.append(model_dir)
        return really(model_dir)

    monkeypatch.setattr(worker, "_read_shape", counted)
    monkeypatch.setattr(worker, "_shapes", {})
    one, copy, wider = write(tmp_path / "one", 64), write(tmp_path / "copy", 64), write(tmp_path / "wider", 96)
    assert worker.read_model_shape(one) == worker.read_model_shape(copy) and read == [one]
    assert worker.read_model_shape(wider)["hidden_size"] == 96
    write(copy, 32)  # the same directory with another model
    assert worker.read_model_shape(copy)["hidden_size"] == 32 and read == [one, wider, copy]


def test_a_directory_without_a_config_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"config.json"):
        worker.read_model_shape(tmp_path)
