"""A checkpoint is complete or absent, and no changed byte is trained from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opd.checkpoints import Checkpoint, CheckpointStore, latest
from opd.errors import RunDirError


class FakeTrainer:
    """Writes two files; may die after the first."""

    def __init__(self) -> None:
        self.dies = False
        self.saved = 0

    def save(self, path: Path) -> None:
        assert path.is_absolute()
        self.saved += 1
        (path / "trainer.safetensors").write_bytes(b"weights" * self.saved)
        if self.dies:
            raise OSError(28, "No space left on device")
        (path / "trainer.json").write_text("{}")


def store(root: Path, keep: int = 2) -> tuple[CheckpointStore, FakeTrainer]:
    trainer = FakeTrainer()
    return CheckpointStore(root, trainer, keep), trainer  # type: ignore[arg-type]


def steps(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if not p.name.startswith("."))


def test_nothing_is_found_where_nothing_was_written(tmp_path: Path) -> None:
    assert latest(tmp_path / "checkpoints") is None
    (tmp_path / ".tmp-step-000004").mkdir()
    assert latest(tmp_path) is None


def test_the_newest_is_found_with_its_numbers(tmp_path: Path) -> None:
    saver, _ = store(tmp_path / "c", keep=9)
    for step in (2, 10, 9):
        saver.save(step, step + 100)
    assert latest(tmp_path / "c") == Checkpoint(tmp_path / "c" / "step-000010", 10, 110)
    assert sorted(p.name for p in (tmp_path / "c" / "step-000010").iterdir()) == [
        "state.json",
        "trainer.json",
        "trainer.safetensors",
    ]


def test_only_the_newest_stay(tmp_path: Path) -> None:
    saver, _ = store(tmp_path, keep=2)
    for step in range(1, 6):
        saver.save(step, step)
    assert steps(tmp_path) == ["step-000004", "step-000005"]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_save_that_fails_leaves_the_older_one_as_it_was(tmp_path: Path) -> None:
    saver, trainer = store(tmp_path, keep=1)
    saver.save(5, 5)
    trainer.dies = True
    with pytest.raises(OSError, match="No space"):
        saver.save(10, 10)
    assert steps(tmp_path) == ["step-000005"]
    assert latest(tmp_path) == Checkpoint(tmp_path / "step-000005", 5, 5)
    trainer.dies = False
    saver.save(10, 10)
    assert steps(tmp_path) == ["step-000010"]
    assert latest(tmp_path) is not None


def test_a_kill_before_the_rename_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, _ = store(tmp_path)

    def killed(tmp: Path, final: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("opd.checkpoints.replace_dir", killed)
        with pytest.raises(KeyboardInterrupt):
            saver.save(5, 5)
    assert latest(tmp_path) is None
    saver.save(5, 6)
    assert latest(tmp_path) == Checkpoint(tmp_path / "step-000005", 5, 6)


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    saver.save(5, 5)
    saver.save(5, 7)
    assert latest(tmp_path) == Checkpoint(tmp_path / "step-000005", 5, 7)
    assert (tmp_path / "step-000005" / "trainer.safetensors").read_bytes() == b"weights" * 2


@pytest.mark.parametrize("name", ["trainer.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_changed_byte_is_refused_with_the_file(name: str, damage: str, tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    saver.save(4, 4)
    saver.save(5, 5)
    file = tmp_path / "step-000005" / name
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(RunDirError) as error:
        latest(tmp_path)
    assert str(error.value).startswith(f"{file}\n")
    assert f"delete {tmp_path / 'step-000005'}" in str(error.value)


@pytest.mark.parametrize(
    "text", [None, "", '{"step": 5', "[]", "{}", "3", '{"step": 4, "policy_version": 4, "files": {}}']
)
def test_a_broken_state_file_is_refused(text: str | None, tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    saver.save(5, 5)
    file = tmp_path / "step-000005" / "state.json"
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(RunDirError) as error:
        latest(tmp_path)
    assert str(error.value).startswith(f"{file}\n")


def test_the_state_file_is_plain_json(tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    saver.save(5, 6)
    state = json.loads((tmp_path / "step-000005" / "state.json").read_text())
    assert (state["format"], state["step"], state["policy_version"]) == (1, 5, 6)
    assert set(state["files"]) == {"trainer.safetensors", "trainer.json"}
