"""A checkpoint is complete or absent, nothing older goes before it is, and no changed byte is trained from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from opd.config.sections import CheckpointConfig
from opd.errors import RunDirError, RunError, StorageError
from opd.files import blake3_file
from opd.records.types import SavedCheckpoint, WrittenFile
from opd.run.checkpoints import CheckpointStore, CompanionSaver, choose_checkpoint, set_newer_aside, verify_checkpoint

IDENTITY = {"config": "c", "student": "s", "experts": {"e": "h"}}


class FakeTrainer:
    """Two ranks; their files are on disk at once, and said to be so when a test lets them."""

    def __init__(self) -> None:
        self.done = True
        self.full = False
        self.begun: list[str] = []
        self.waits: list[float] = []

    def begin_save(self, path: Path) -> None:
        assert path.is_absolute()
        self.begun.append(path.name)
        self._files = {
            "rank-0.safetensors": b"zero" * len(self.begun),
            "rank-1.safetensors": b"one",
            "trainer.json": b"{}",
        }
        for name, data in self._files.items():
            (path / name).write_bytes(data)

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        self.waits.append(wait_s)
        if self.full:
            raise StorageError("rank-1.safetensors: could not be written: No space left on device")
        if not self.done:
            return None
        return [
            WrittenFile(name=name, blake3=blake3(data).hexdigest(), size=len(data), seconds=float(i))
            for i, (name, data) in enumerate(self._files.items())
        ]


def store(root: Path, timeout_s: float = 60, **keep: int) -> tuple[CheckpointStore, FakeTrainer]:
    trainer: Any = FakeTrainer()
    config = CheckpointConfig(**{"keep": 2} | keep)
    return CheckpointStore(root, trainer, config, world_size=2, identity=IDENTITY, timeout_s=timeout_s), trainer


def write(saver: CheckpointStore, *steps: int) -> None:
    for step in steps:
        saver.save(step, step + 100)
        saver.committed(wait=True)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_carried_files_are_part_of_it(tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    saver.save(5, 5, {"written.arrow": b"rows", "written.json": b"{}"})
    saver.committed(wait=True)
    path = tmp_path / "step-000005"
    assert (path / "written.arrow").read_bytes() == b"rows"
    assert verify_checkpoint(path).step == 5
    (path / "written.arrow").write_bytes(b"rowS")
    with pytest.raises(RunDirError, match=r"written\.arrow"):
        verify_checkpoint(path)


def test_nothing_is_found_where_nothing_was_written(tmp_path: Path) -> None:
    for wanted in ("latest", "latest-valid"):
        assert choose_checkpoint(tmp_path / "checkpoints", wanted, print) is None
    (tmp_path / ".tmp-step-000004").mkdir()
    (tmp_path / "step-000004-copy").mkdir()
    assert choose_checkpoint(tmp_path, "latest", print) is None


def test_the_newest_is_found_with_all_that_was_written_of_it(tmp_path: Path) -> None:
    saver, _ = store(tmp_path, keep=9)
    write(saver, 2, 1000000, 999999)
    found = choose_checkpoint(tmp_path, "latest", print)
    assert found is not None
    assert (found.path, found.step, found.policy_version) == (tmp_path / "step-1000000", 1000000, 1000100)
    assert (found.world_size, found.identity) == (2, IDENTITY)
    data = json.loads((found.path / "checkpoint.json").read_text())
    assert data["files"]["rank-1.safetensors"] == {"blake3": blake3(b"one").hexdigest(), "bytes": 3}
    assert set(data["files"]) | {"checkpoint.json"} == set(names(found.path))


def test_it_is_written_beside_the_run_and_committed_when_all_is_there(tmp_path: Path) -> None:
    saver, trainer = store(tmp_path)
    write(saver, 5)
    trainer.done = False
    saver.save(10, 10)
    assert saver.committed(wait=False) is None
    assert names(tmp_path) == [".tmp-step-000010", "step-000005"]
    trainer.done = True
    assert saver.committed(wait=False) == SavedCheckpoint(step=10, background_s=2.0, size=4 * 2 + 3 + 2)
    assert names(tmp_path) == ["step-000005", "step-000010"]
    assert saver.committed(wait=True) is None, "told once"
    assert trainer.waits[1:] == [0.0, 0.0], "a run that goes on is not held up"


def test_there_is_one_under_way_at_most(tmp_path: Path) -> None:
    saver, trainer = store(tmp_path)
    saver.save(5, 5)
    saver.save(10, 10)
    assert trainer.begun == [".tmp-step-000005", ".tmp-step-000010"]
    assert names(tmp_path) == [".tmp-step-000010", "step-000005"]
    assert trainer.waits[0] > 50, "the one before is waited for"


def test_one_that_is_not_written_in_time_ends_the_run(tmp_path: Path) -> None:
    saver, trainer = store(tmp_path, timeout_s=1e-6)
    trainer.done = False
    saver.save(5, 5)
    with pytest.raises(RunError, match=r"step-000005: the trainer took longer than 0 s"):
        saver.committed(wait=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("keep", "kept"),
    [({"keep": 1}, [10]), ({"keep": 2}, [9, 10]), ({"keep": 1, "keep_every": 4}, [4, 8, 10]), ({"keep": 3, "keep_every": 5}, [5, 8, 9, 10])],
)  # fmt: skip
def test_the_newest_stay_and_every_so_many_for_good(keep: dict[str, int], kept: list[int], tmp_path: Path) -> None:
    saver, _ = store(tmp_path, **keep)
    write(saver, *range(1, 11))
    assert names(tmp_path) == [f"step-{step:06d}" for step in kept]


def test_nothing_older_goes_before_the_new_one_is_there(tmp_path: Path) -> None:
    saver, trainer = store(tmp_path, keep=1)
    write(saver, 5)
    trainer.full = True
    saver.save(10, 10)
    with pytest.raises(StorageError, match="No space"):
        saver.committed(wait=False)
    assert names(tmp_path) == ["step-000005"], "and what was begun makes room"
    assert verify_checkpoint(tmp_path / "step-000005").step == 5
    trainer.full = False
    write(saver, 10)
    assert names(tmp_path) == ["step-000010"]


def test_a_full_disk_under_the_manifest_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, _ = store(tmp_path, keep=1)
    write(saver, 5)
    saver.save(10, 10)
    with monkeypatch.context() as patch:

        def full(self: Path, *_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device", str(self))

        patch.setattr(Path, "write_text", full)
        with pytest.raises(StorageError, match=r"checkpoint\.json: could not be written: No space left on device"):
            saver.committed(wait=True)
    assert names(tmp_path) == ["step-000005"]
    assert verify_checkpoint(tmp_path / "step-000005").policy_version == 105


def test_a_full_disk_under_a_carried_file_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, _ = store(tmp_path)
    write(saver, 5)
    as_ever = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        as_ever(self, data[:2])
        raise OSError(28, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(StorageError, match=r"written\.arrow: could not be written: No space left on device"):
            saver.save(10, 10, {"written.arrow": b"rows"})
    assert names(tmp_path) == ["step-000005"]


def test_a_kill_before_the_rename_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, _ = store(tmp_path)

    def killed(tmp: Path, final: Path) -> None:
        raise KeyboardInterrupt

    saver.save(5, 5)
    with monkeypatch.context() as patch:
        patch.setattr("opd.run.checkpoints.replace_dir", killed)
        with pytest.raises(KeyboardInterrupt):
            saver.committed(wait=True)
    assert choose_checkpoint(tmp_path, "latest", print) is None
    again, _ = store(tmp_path)
    write(again, 5)
    assert names(tmp_path) == ["step-000005"]


# What a resume goes on from


DAMAGE = {
    "a bit of the weights": ("rank-0.safetensors", lambda data: bytes([data[0] ^ 1]) + data[1:], "BLAKE3"),
    "a bit of the last rank's": ("rank-1.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 128]), "BLAKE3"),
    "a file cut short": ("rank-1.safetensors", lambda data: data[:-1], "2 bytes"),
    "a file grown": ("trainer.json", lambda data: data + b" ", "3 bytes"),
    "a missing file": ("rank-0.safetensors", None, "no such file"),
    "no manifest": ("checkpoint.json", None, "no such file"),
    "an empty manifest": ("checkpoint.json", lambda _: b"", "JSONDecodeError"),
    "a cut manifest": ("checkpoint.json", lambda data: data[:-9], "JSONDecodeError"),
    "a manifest that is a list": ("checkpoint.json", lambda _: b"[]", "TypeError"),
    "a manifest without files": ("checkpoint.json", lambda _: b'{"format": 2, "step": 10}', "KeyError"),
    "an older format": ("checkpoint.json", lambda data: data.replace(b'"format": 2', b'"format": 1'), "format 1"),
    "another step's manifest": ("checkpoint.json", lambda data: data.replace(b'"step": 10', b'"step": 11'), "step 11"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_refused_by_name_and_passed_over_when_told(damage: str, tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    write(saver, 5, 10)
    name, change, found = DAMAGE[damage]
    file = tmp_path / "step-000010" / name
    file.write_bytes(change(file.read_bytes())) if change else file.unlink()
    for wanted in ("latest", "10"):
        with pytest.raises(RunDirError) as error:
            choose_checkpoint(tmp_path, wanted, print)
        lines = str(error.value).split("\n")
        assert lines[0] == str(file)
        assert found in lines[1]
        assert "--resume-from latest-valid" in lines[3]
    said: list[str] = []
    chosen = choose_checkpoint(tmp_path, "latest-valid", said.append)
    assert chosen is not None
    assert chosen.step == 5
    assert len(said) == 1
    assert all(word in said[0] for word in ("step-000010", name, found))
    (tmp_path / "step-000005" / "rank-0.safetensors").unlink()
    with pytest.raises(RunDirError, match="2 checkpoints, every one of them damaged"):
        choose_checkpoint(tmp_path, "latest-valid", print)


def test_one_that_the_disk_does_not_give_back_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, _ = store(tmp_path)
    write(saver, 5, 10)

    def read(path: Path) -> str:
        if path.name == "rank-1.safetensors" and path.parent.name == "step-000010":
            raise OSError(5, "Input/output error", str(path))
        return blake3_file(path)

    monkeypatch.setattr("opd.run.checkpoints.blake3_file", read)
    with pytest.raises(RunDirError, match=r"rank-1\.safetensors\n  found:  Input/output error"):
        choose_checkpoint(tmp_path, "latest", print)
    said: list[str] = []
    chosen = choose_checkpoint(tmp_path, "latest-valid", said.append)
    assert chosen is not None and chosen.step == 5
    assert "rank-1.safetensors: Input/output error" in said[0]


@pytest.mark.parametrize("wanted", ["latest", "latest-valid", "10"])
def test_a_newer_format_is_not_taken_for_damage(wanted: str, tmp_path: Path) -> None:
    saver, _ = store(tmp_path)
    write(saver, 5, 10)
    file = tmp_path / "step-000010" / "checkpoint.json"
    file.write_text(json.dumps({"format": 3, "who": "knows"}))
    with pytest.raises(RunDirError) as error:
        choose_checkpoint(tmp_path, wanted, print)
    assert str(error.value).startswith(f"{file}\n  found:  checkpoint format 3\n")
    assert "a newer one" in str(error.value)


def test_a_step_can_be_named(tmp_path: Path) -> None:
    saver, _ = store(tmp_path, keep=3)
    write(saver, 5, 10, 15)
    chosen = choose_checkpoint(tmp_path, "10", print)
    assert chosen is not None
    assert chosen.step == 10
    for wanted in ("7", "lates", "-5"):
        with pytest.raises(RunDirError, match=r"checkpoints of steps 5, 10, 15\n"):
            choose_checkpoint(tmp_path, wanted, print)
    with pytest.raises(RunDirError, match="no checkpoint in"):
        choose_checkpoint(tmp_path / "none", "5", print)


def test_what_a_resume_goes_back_behind_is_kept_until_the_run_has_passed_it(tmp_path: Path) -> None:
    saver, _ = store(tmp_path, keep=3)
    write(saver, 5, 10, 15)
    assert set_newer_aside(tmp_path, 15) == []
    assert set_newer_aside(tmp_path, 5) == ["step-000010", "step-000015"]
    chosen = choose_checkpoint(tmp_path, "latest", print)
    assert chosen is not None
    assert chosen.step == 5
    write(saver, 10)
    assert names(tmp_path) == ["step-000005", "step-000010", "superseded-step-000015"]
    set_newer_aside(tmp_path, 5)  # a second time
    assert names(tmp_path) == ["step-000005", "superseded-step-000010", "superseded-step-000015"]
    (tmp_path / "superseded-step-000010-mine").mkdir()  # a user's, who wants to keep it
    write(saver, 15)
    assert names(tmp_path) == ["step-000005", "step-000015", "superseded-step-000010-mine"]


class Other:
    """Something else that is saved, perhaps later than the trainer."""

    def __init__(self) -> None:
        self.done = True

    def begin_save(self, path: Path) -> None:
        (path / "rank-0.safetensors").write_bytes(b"its own")

    def saved(self, wait_s: float) -> Sequence[WrittenFile] | None:
        digest = blake3(b"its own").hexdigest()
        return [WrittenFile(name="rank-0.safetensors", blake3=digest, size=7, seconds=0.0)] if self.done else None


def test_what_is_saved_beside_the_trainer_has_a_directory_of_its_own(tmp_path: Path) -> None:
    trainer, other = FakeTrainer(), Other()
    other.done = False
    both = CompanionSaver(trainer, other, "credit")
    saver = CheckpointStore(tmp_path, both, CheckpointConfig(), world_size=2, identity=IDENTITY, timeout_s=60)
    saver.save(3, 3)
    assert saver.committed(wait=False) is None, "not before both are there"
    other.done = True
    saved = saver.committed(wait=True)
    assert saved is not None and saved.size == 4 + 3 + 2 + 7
    path = tmp_path / "step-000003"
    assert (path / "rank-0.safetensors").read_bytes() == b"zero"
    assert (path / "credit" / "rank-0.safetensors").read_bytes() == b"its own"
    assert verify_checkpoint(path).step == 3
    (path / "credit" / "rank-0.safetensors").write_bytes(b"changed")
    with pytest.raises(RunDirError, match=r"credit/rank-0\.safetensors"):
        verify_checkpoint(path)


def test_what_takes_too_long_beside_the_trainer_misses_the_same_deadline(tmp_path: Path) -> None:
    other = Other()
    other.done = False
    both = CompanionSaver(FakeTrainer(), other, "credit")
    saver = CheckpointStore(tmp_path, both, CheckpointConfig(), world_size=2, identity=IDENTITY, timeout_s=0.05)
    saver.save(3, 3)
    with pytest.raises(RunError, match="took longer"):
        saver.committed(wait=True)
    assert list(tmp_path.iterdir()) == []
