"""A push is believed only when the engine's log-probs say so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opd import leftovers
from opd.errors import RunError
from opd.sync import SYNCS
from opd.sync.shared_memory import SharedMemorySync, probe_sequences
from opd.types import Prompt

NAN = float("nan")
PROBE = [[1, 2, 3], [4, 5]]


class FakeTrainer:
    base: Path | None = None

    def export_changed(self, path: Path) -> Path | None:
        (path / "model.safetensors").write_bytes(b"new")
        return self.base

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[-1.0] * (len(ids) - 1) for ids in token_ids]


class FakeEngine:
    """Each worker's log-probs are the trainer's plus its own gap on the last token."""

    def __init__(self, *gaps: float) -> None:
        self.gaps = gaps
        self.loaded: list[tuple[Path, bytes]] = []

    def load(self, model_dir: Path, again: Any = None, base: Path | None = None) -> None:
        self.again, self.base = again, base
        self.loaded.append((model_dir, (model_dir / "model.safetensors").read_bytes()))

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        rows = [[[-1.0] * (len(ids) - 1) for ids in token_ids] for _ in self.gaps]
        for row, gap in zip(rows, self.gaps, strict=True):
            row[-1][-1] += gap
        return rows


def sync(
    engine: FakeEngine, tolerance: float = 0.02, nbytes: int = 10, told: list[str] | None = None
) -> SharedMemorySync:
    trainer: Any = FakeTrainer()
    fake: Any = engine
    tell = ([] if told is None else told).append
    return SharedMemorySync(trainer, fake, PROBE, tolerance=tolerance, nbytes=nbytes, tell=tell)


def test_a_push_loads_what_the_trainer_wrote_and_leaves_nothing_behind() -> None:
    engine = FakeEngine(0.0, 0.003)
    report = sync(engine).push(7)
    assert (report.version, report.gap) == (7, pytest.approx(0.001))  # three probe tokens
    ((path, content),) = engine.loaded
    assert content == b"new"
    assert not path.exists()


@pytest.mark.parametrize("gaps", [(0.3,), (-0.3,), (0.3, 0.0), (0.0, 0.3), (0.0, 0.0, -0.3)])
def test_any_engine_that_holds_other_weights_stops_the_run(gaps: tuple[float, ...]) -> None:
    engine = FakeEngine(*gaps)
    told: list[str] = []
    with pytest.raises(RunError, match=r"weight push 7: .* 0\.1000 nats .* sync.tolerance is 0\.02"):
        sync(engine, told=told).push(7)
    assert len(engine.loaded) == 2, "an engine may have missed one push, not two"
    assert told == ["weight push 7: engine and trainer differ by 0.1000 nats a token; pushed again"]
    assert not any(path.exists() for path, _ in engine.loaded)


def test_a_push_that_an_engine_missed_is_made_again() -> None:
    class Misses(FakeEngine):
        def load(self, model_dir: Path, again: Any = None, base: Path | None = None) -> None:
            super().load(model_dir)
            self.gaps = (0.3,) if len(self.loaded) == 1 else (0.0,)

    engine, told = Misses(0.0), list[str]()
    assert sync(engine, told=told).push(7).gap == 0.0
    assert (len(engine.loaded), len(told)) == (2, 1)


@pytest.mark.parametrize("gaps", [(NAN,), (NAN, 0.0), (0.0, NAN), (0.0, NAN, 0.0)])
def test_nan_from_any_engine_stops_the_run(gaps: tuple[float, ...]) -> None:
    with pytest.raises(RunError, match="weight push 1"):
        sync(FakeEngine(*gaps)).push(1)


def test_the_tolerance_is_the_pipelines() -> None:
    assert sync(FakeEngine(0.3), tolerance=0.11).push(1).gap == pytest.approx(0.1)
    with pytest.raises(RunError):
        sync(FakeEngine(0.3), tolerance=0.09).push(1)


def test_a_failed_load_leaves_nothing_behind() -> None:
    class Refuses(FakeEngine):
        def load(self, model_dir: Path, again: Any = None, base: Path | None = None) -> None:
            super().load(model_dir)
            raise RunError("vLLM refused")

    engine = Refuses(0.0)
    with pytest.raises(RunError, match="refused"):
        sync(engine).push(1)
    assert not engine.loaded[0][0].exists()


def test_files_that_are_kept_lie_there_until_the_next_push() -> None:
    engine = FakeEngine(0.0)
    pushing = sync(engine)
    pushing.keeps_files = True
    for version in (1, 2):
        pushing.push(version)
        with engine.again() as directory:
            assert directory == engine.loaded[-1][0]
            assert (directory / "model.safetensors").read_bytes() == b"new"
        assert [path.exists() for path, _ in engine.loaded] == [False] * (version - 1) + [True]
    pushing.keeps_files = False
    pushing.push(3)
    assert not engine.loaded[-1][0].exists()


def test_weights_too_large_for_shared_memory_go_through_the_disk_and_the_user_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.sync.shared_memory.tempfile.tempdir", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("opd.sync.shared_memory.SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    free = 100 << 20
    monkeypatch.setattr("opd.sync.shared_memory.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    engine, told = FakeEngine(0.0), list[str]()
    pushing = sync(engine, nbytes=60 << 20, told=told)
    for free in (100 << 20, 100 << 20, 121 << 20, 121 << 20):  # noqa: B007 - `disk_usage` reads it
        pushing.push(1)
    assert [path.parent.name for path, _ in engine.loaded] == ["disk", "disk", "shm", "shm"]
    assert told == [
        f"{tmp_path / 'shm'} has 100 MiB free, new weights need 120: they go through {tmp_path / 'disk'}, which is slower",
        f"{tmp_path / 'shm'} has room again: new weights go through it",
    ]


def test_without_shared_memory_weights_go_through_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.sync.shared_memory.tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("opd.sync.shared_memory.SHARED_MEMORY", tmp_path / "none")
    engine, told = FakeEngine(0.0), list[str]()
    sync(engine, told=told).push(1)
    assert engine.loaded[0][0].parent == tmp_path
    assert len(told) == 1


def test_ways_are_found_by_name() -> None:
    assert {"shared_memory": SharedMemorySync} == SYNCS


# Probe


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(id=f"d/{i}", domain="d", token_ids=tuple(range(n))) for i, n in enumerate(lengths)]


def test_the_probe_is_the_beginnings_of_the_first_prompts() -> None:
    chosen = probe_sequences(prompts(5, 5, 5, 5, 5), tokens=8, room=100)
    assert [len(ids) for ids in chosen] == [3, 3, 3, 3]
    assert chosen[0] == (0, 1, 2)
    assert [len(ids) for ids in probe_sequences(prompts(3, 3, 3, 3, 3, 3), tokens=12, room=100)] == [3] * 6


@pytest.mark.parametrize("lengths", [(500,), (500, 500, 500), (3,), (1, 1), (1, 0, 4, 1)])
def test_the_probe_holds_several_sequences_whatever_the_prompts(lengths: tuple[int, ...]) -> None:
    """One alone cannot show that neighbours in a row see each other."""
    chosen = probe_sequences(prompts(*lengths), tokens=64, room=100)
    assert len(chosen) > 1
    assert all(1 < len(ids) <= 64 for ids in chosen)


def test_prompts_without_a_scored_token_are_passed_over() -> None:
    assert [len(ids) for ids in probe_sequences(prompts(1, 0, 4, 1, 4), tokens=16, room=100)] == [4, 4]


@pytest.mark.parametrize("room", [9, 15])
def test_a_probe_sequence_fits_the_engines_context(room: int) -> None:
    (ids, *_) = probe_sequences(prompts(500, 500), tokens=64, room=room)
    assert len(ids) == room - 1  # the engine writes one token after it


def test_long_prompts_are_cut_to_what_the_probe_needs() -> None:
    assert [len(ids) for ids in probe_sequences(prompts(*[500] * 9), tokens=64, room=1000)] == [17] * 4


def test_a_worker_that_comes_later_gets_the_same_weights() -> None:
    engine = FakeEngine(0.0)
    sync(engine).push(7)
    ((first, _),) = engine.loaded
    with engine.again() as directory:
        assert directory != first and (directory / "model.safetensors").read_bytes() == b"new"
        assert directory.name.startswith(leftovers.prefix())
    assert not directory.exists()


def test_the_engine_is_told_where_the_weights_are_that_a_push_leaves_out(tmp_path: Path) -> None:
    engine = FakeEngine(0.0)
    trainer: Any = FakeTrainer()
    trainer.base = tmp_path
    fake: Any = engine
    SharedMemorySync(trainer, fake, PROBE, tolerance=0.02, nbytes=10, tell=print).push(7)
    assert engine.base == tmp_path
    sync(engine).push(8)
    assert engine.base is None, "all weights came"
