"""Weights go through files that are there as long as somebody may need them. What is proven afterwards: `test_proof`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opd.errors import RunError
from opd.machine import orphans
from opd.sync import SharedMemorySync, SyncSpec


class FakeTrainer:
    base: Path | None = None
    asked = 0

    def begin_logprobs(self, token_ids: Sequence[Sequence[int]]) -> Callable[[], list[list[float]]]:
        self.asked += 1
        return lambda: [[-1.0] * (len(ids) - 1) for ids in token_ids]

    def export_changed(self, path: Path) -> Path | None:
        (path / "model.safetensors").write_bytes(b"new")
        return self.base


class FakeEngine:
    def __init__(self) -> None:
        self.loaded: list[tuple[Path, bytes]] = []

    def load(self, model_dir: Path, restart_weights: Any = None, base: Path | None = None) -> None:
        self.again, self.base = restart_weights, base
        self.loaded.append((model_dir, (model_dir / "model.safetensors").read_bytes()))


def sync(
    engine: FakeEngine,
    *,
    base: Path | None = None,
    keeps: bool = False,
    nbytes: int = 10,
    told: list[str] | None = None,
) -> SharedMemorySync:
    trainer: Any = FakeTrainer()
    trainer.base = base
    ends: dict[str, Any] = {"trainer": trainer, "engine": engine, "probe": [[1, 2]]}
    tell = ([] if told is None else told).append
    return SharedMemorySync(SyncSpec(**ends, tolerance=0.02, keeps_weights=keeps, nbytes=nbytes, tell=tell))


def test_a_push_loads_what_the_trainer_wrote_and_leaves_nothing_behind() -> None:
    engine = FakeEngine()
    sync(engine).send_weights(7)
    ((path, content),) = engine.loaded
    assert content == b"new"
    assert not path.exists()


def test_the_trainer_scores_the_probe_while_the_engines_load() -> None:
    class Watching(FakeEngine):
        def load(self, model_dir: Path, restart_weights: Any = None, base: Path | None = None) -> None:
            super().load(model_dir)
            self.asked = pushing._spec.trainer.asked  # type: ignore[attr-defined]

        def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
            return [[[-1.0] * (len(ids) - 1) for ids in token_ids]]

    engine = Watching()
    pushing = sync(engine)
    assert pushing.push(7).gap == 0
    trainer: Any = pushing._spec.trainer
    assert (engine.asked, trainer.asked) == (1, 1), "asked before the load, and once"
    assert pushing.measure_gap() == 0 and trainer.asked == 2, "of weights that may be others"


def test_a_failed_load_leaves_nothing_behind() -> None:
    class Refuses(FakeEngine):
        def load(self, model_dir: Path, restart_weights: Any = None, base: Path | None = None) -> None:
            super().load(model_dir)
            raise RunError("vLLM refused")

    engine = Refuses()
    with pytest.raises(RunError, match="refused"):
        sync(engine).send_weights(1)
    assert not engine.loaded[0][0].exists()


def test_files_that_are_kept_lie_there_until_the_next_push() -> None:
    engine = FakeEngine()
    pushing = sync(engine, keeps=True)
    for version in (1, 2):
        pushing.send_weights(version)
        with engine.again() as directory:
            assert directory == engine.loaded[-1][0]
            assert (directory / "model.safetensors").read_bytes() == b"new"
        assert [path.exists() for path, _ in engine.loaded] == [False] * (version - 1) + [True]


def test_weights_too_large_for_shared_memory_go_through_the_disk_and_the_user_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.sync.shared_memory.tempfile.tempdir", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("opd.sync.shared_memory.SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    free = 100 << 20
    monkeypatch.setattr("opd.sync.shared_memory.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    engine, told = FakeEngine(), list[str]()
    pushing = sync(engine, nbytes=60 << 20, told=told)
    for free in (100 << 20, 100 << 20, 121 << 20, 121 << 20):  # noqa: B007 - `disk_usage` reads it
        pushing.send_weights(1)
    assert [path.parent.name for path, _ in engine.loaded] == ["disk", "disk", "shm", "shm"]
    assert told == [
        f"{tmp_path / 'shm'} has 100 MiB free, new weights need 120: they go through {tmp_path / 'disk'}, which is slower",
        f"{tmp_path / 'shm'} has room again: new weights go through it",
    ]


def test_room_for_the_kept_weights_and_the_new_ones_is_enough_for_every_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept weights take their part of the room already, and go when the new ones are there."""
    monkeypatch.setattr("opd.sync.shared_memory.SHARED_MEMORY", tmp_path)

    def usage(directory: Path) -> SimpleNamespace:
        return SimpleNamespace(free=(125 << 20) - (60 << 20) * len(list(directory.iterdir())))

    monkeypatch.setattr("opd.sync.shared_memory.shutil.disk_usage", usage)
    engine, told = FakeEngine(), list[str]()
    pushing = sync(engine, keeps=True, nbytes=60 << 20, told=told)
    for version in (1, 2, 3):
        pushing.send_weights(version)
    assert [path.parent for path, _ in engine.loaded] == [tmp_path] * 3 and told == []


def test_without_shared_memory_weights_go_through_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.sync.shared_memory.tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("opd.sync.shared_memory.SHARED_MEMORY", tmp_path / "none")
    engine, told = FakeEngine(), list[str]()
    sync(engine, told=told).send_weights(1)
    assert engine.loaded[0][0].parent == tmp_path
    assert len(told) == 1


def test_a_worker_that_comes_later_gets_the_same_weights() -> None:
    engine = FakeEngine()
    sync(engine).send_weights(7)
    ((first, _),) = engine.loaded
    with engine.again() as directory:
        assert directory != first and (directory / "model.safetensors").read_bytes() == b"new"
        assert directory.name.startswith(orphans.directory_prefix())
    assert not directory.exists()


def test_the_engine_is_told_where_the_weights_are_that_a_push_leaves_out(tmp_path: Path) -> None:
    engine = FakeEngine()
    sync(engine, base=tmp_path).send_weights(7)
    assert engine.base == tmp_path
    sync(engine).send_weights(8)
    assert engine.base is None, "all weights came"
