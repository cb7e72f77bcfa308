"""Engines get what the trainer sends, and those that come later the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd.models.buckets import WeightStream
from opd.models.files import ModelFiles
from opd.sync import NetworkSync, SyncSpec


class FakeTrainer:
    """Its buckets are its version and their number."""

    version = 0

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def stream_changed(self, nbytes: int) -> WeightStream:
        def buckets() -> Iterator[tuple[int, int]]:
            for i in range(nbytes):
                self.sent.append((self.version, i))
                yield self.version, i

        return WeightStream(model_dir=Path("/student"), whole=True, buckets=buckets())


class FakeEngine:
    def load(self, model_dir: Path) -> None:
        self.loaded = model_dir

    def receive(self, send: Callable[[], WeightStream]) -> None:
        self.send = send
        self.got = list(send().buckets)


def sync(keeps: bool, bucket: int = 3) -> tuple[FakeTrainer, FakeEngine, NetworkSync]:
    trainer: Any = FakeTrainer()
    engine: Any = FakeEngine()
    known: dict[str, Any] = {"tolerance": 0.02, "nbytes": 10, "bucket": bucket, "keeps": keeps, "tell": print}
    return trainer, engine, NetworkSync(SyncSpec(trainer=trainer, engine=engine, probe=[[1, 2]], **known))


def test_a_worker_that_comes_later_gets_a_stream_of_its_own() -> None:
    trainer, engine, pushing = sync(keeps=False)
    trainer.version = 7
    pushing.send_weights(7)
    assert engine.got == [(7, 0), (7, 1), (7, 2)] == trainer.sent
    assert list(engine.send().buckets) == engine.got
    assert len(trainer.sent) == 6, "nothing was kept"


def test_while_the_trainer_computes_a_worker_gets_what_was_kept() -> None:
    trainer, engine, pushing = sync(keeps=True)
    for version in (1, 2):
        trainer.version = version
        pushing.send_weights(version)
        trainer.version += 1  # it has taken a step
        assert list(engine.send().buckets) == engine.got == [(version, i) for i in range(3)]
    assert len(trainer.sent) == 6, "each was gathered once"


def test_engines_get_the_files_of_a_model_that_they_cannot_reach(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file or several, in buckets of several tensors, and again for a worker that comes later."""
    monkeypatch.setattr("opd.sync.files.put_object", lambda bucket: bucket)
    monkeypatch.setattr("opd.sync.files.list_nodes", lambda: [SimpleNamespace(id="here"), SimpleNamespace(id="there")])
    tensors = load_file(tiny_model_dir / "model.safetensors")
    with ModelFiles(tmp_path, tensors, shard=50_000) as files:
        files.write(tensors)
        files.finish()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for path, nbytes in ((tiny_model_dir, 1 << 30), (tmp_path, 1 << 30), (tmp_path, 40_000)):
        _, engine, pushing = sync(keeps=False, bucket=nbytes)
        pushing.hold(path, shape_of=tiny_model_dir)
        for got in (engine.got, list(engine.send().buckets)):
            found = [pair for bucket in got for pair in bucket.tensors()]
            assert len(found) == len(tensors) and all(torch.equal(tensor, tensors[name]) for name, tensor in found)
        assert engine.send().model_dir == tiny_model_dir and engine.send().whole
        assert engine.send().node == "here", "the driver reads the files"
        assert len(engine.got) == 1 if nbytes > 1 << 20 else 1 < len(engine.got) < len(tensors)
        assert all(len(b.data) <= nbytes or len(b.places) == 1 for b in engine.got)


def test_engines_of_a_family_that_takes_no_stream_read_the_files(tmp_path: Path) -> None:
    """Its adapters can be trained over the network; the whole model that comes out is examined all the same."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    _, engine, pushing = sync(keeps=False)
    pushing.hold(Path("/merged"), shape_of=tmp_path)
    assert engine.loaded == Path("/merged")
