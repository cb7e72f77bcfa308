"""New weights between machines: two Ray nodes with an object store each, on this machine, and a whole merge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.push import two_machines
from opd import cluster
from opd.cluster import Worker
from opd.config.sections import ClusterConfig
from opd.records.scores import Evaluation
from opd.run.paths import RunPaths
from tests.integration.parts import (
    PROBE,
    altered,
    config,
    start_engine,
    start_sync,
    start_trainer,
    stop,
)
from tests.integration.test_merge import opd, records, write

Make = Callable[..., Path]


@pytest.fixture
def two_nodes() -> Iterator[None]:
    with two_machines() as address, cluster.ray_session(ClusterConfig(address=address), 2):
        yield


def node(worker: Worker[Any]) -> str:
    """The Ray node that a worker is on."""
    import ray

    found: str = ray._private.state.actors(worker._actor._actor_id.hex())["Address"]["NodeID"]
    return found


def test_an_engine_on_another_machine_gets_what_was_pushed_and_nothing_newer(
    two_nodes: None, tmp_path: Path, make_model_dir: Make, tiny_tokenizer: Any
) -> None:
    """Also one that dies and is started again while the trainer has gone on."""
    student, other = (make_model_dir(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    cfg = config(student, ranks=1)
    trainer = start_trainer(cfg)
    engine = start_engine(cfg, student, tiny_tokenizer)
    assert node(trainer._ranks[0]) != node(engine._workers[0])
    # Ray sends what is smaller than 100 KiB beside the call, not through the object stores.
    sync = start_sync("network", trainer, engine, keeps_weights=True, bucket=150_000)
    engine.load(other)
    assert sync.measure_gap() > 0.05
    for version in (1, 2):
        assert sync.push(version).gap < 1e-5
    before = engine.logprobs(PROBE)
    trainer.load(altered(trainer, tmp_path / "saved"))
    assert sync.measure_gap() > 0.01, "the trainer has other weights"
    engine._workers[0].kill()
    deadline = time.monotonic() + 120
    while not engine._restarted:  # a worker that is killed may answer once more
        assert engine.logprobs(PROBE) == before and time.monotonic() < deadline
    stop(engine, trainer)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_a_merge_over_the_network_or_directly_ends_with_the_weights_of_one_through_files(
    tmp_path: Path, pipeline: dict[str, Any], schedule: str
) -> None:
    runs = {}
    pipeline["schedule"] = {"mode": schedule}
    for kind in ("shared_memory", "network", "direct"):
        pipeline["sync"] = {"kind": kind}
        runs[kind] = tmp_path / kind
        done = opd("merge", write(tmp_path, pipeline), "--run-dir", runs[kind], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    first, *others = (load_file(run / "model" / "model.safetensors") for run in runs.values())
    exam, *exams = (Evaluation.load(RunPaths(run).evaluation_file("expert")) for run in runs.values())
    for theirs, other_exam in zip(others, exams, strict=True):
        assert set(first) == set(theirs) and all(torch.equal(first[name], theirs[name]) for name in first)
        assert exam.scores == other_exam.scores and exam.answers == other_exam.answers != ()
    for steps in zip(*map(records, runs.values()), strict=True):
        assert len({(step["loss"], step["probe_gap"]) for step in steps}) == 1
