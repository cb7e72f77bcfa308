"""A disk that fills up, for real: a small tmpfs under the checkpoint, the target log and the export."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opd.config import load_pipeline
from opd.config.sections import CheckpointConfig
from opd.errors import StorageError
from opd.files import raise_storage_errors
from opd.records.types import Prompt, RolloutBatch, WrittenFile
from opd.run.checkpoints import CheckpointStore, choose_checkpoint
from opd.run.paths import RunPaths
from opd.stream.log import ArrowTargetLog
from opd.stream.schema import PartRecord, write_stream
from opd.stream.targets import ExpectedRow, TargetStream, TeacherRequest, make_part
from opd.train.shards import write_shard
from pipelines.inputs.read import read_inputs
from pipelines.merging.directory import explain_what_is_intact
from pipelines.merging.run import MergeRun, _export_model
from tests.rows import make_rollout, make_row

FULL = "could not be written: No space left on device"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunPaths]:
    """A run directory on a disk of 512 KiB."""
    root = tmp_path / "run"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(root)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this account may not mount a file system")
    yield RunPaths(root)
    subprocess.run(["umount", str(root)], check=True)


class OneRank:
    """Writes a shard of as many numbers as it is told."""

    def __init__(self) -> None:
        self.numel = 20_000

    def begin_save(self, path: Path) -> None:
        self._path = path

    def saved(self, wait_s: float) -> tuple[WrittenFile, ...]:
        return write_shard(self._path, 0, 1, {"param/x": torch.zeros(self.numel)}, 1)

    def export(self, path: Path) -> None:
        from safetensors.torch import save_file

        with raise_storage_errors(path):
            save_file({"x": torch.zeros(self.numel)}, path / "model.safetensors")


def checkpoints(run: RunPaths, rank: Any) -> CheckpointStore:
    keep = CheckpointConfig(keep=1)
    return CheckpointStore(run.checkpoints, rank, keep, world_size=1, identity={}, timeout_s=60)


def test_a_checkpoint_leaves_the_one_before(run: RunPaths) -> None:
    rank = OneRank()
    saver = checkpoints(run, rank)
    saver.save(5, 5)
    assert saver.committed(wait=True)
    rank.numel = 200_000
    saver.save(10, 10)
    with pytest.raises(StorageError) as error, explain_what_is_intact(run):
        saver.committed(wait=False)
    assert FULL in str(error.value)
    assert "intact: checkpoint of step 5\n" in str(error.value)
    assert f"opd merge --resume {run.root}" in str(error.value)
    found = choose_checkpoint(run.checkpoints, "latest", print)
    assert found is not None
    assert found.step == 5
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-000005"], "the half checkpoint made room"


def test_the_target_log_leaves_the_steps_before(run: RunPaths, in_process: Any) -> None:
    prompts = [Prompt(id="a/0", domain="a", token_ids=(1,))]
    log = ArrowTargetLog(run.targets, SimpleNamespace(heads=lambda: {"h": 0}), 76, print)  # type: ignore[arg-type]

    def write(step: int, width: int) -> None:
        rollout = make_rollout(
            sample_id=f"{step:06d}/a/0", step=step, domain="a", policy_version=0, prompt_ids=(1,), response_ids=(2,),
            behaviour_logprobs=(-1.0,),
        )  # fmt: skip
        row = make_row(
            sample_id=rollout.sample_id, step=step, domain="a", teacher="t", policy_version=0, prompt_ids=[1],
            response_ids=[2], loss_mask=[True], behaviour_logprobs=[-1.0], head="h", hidden_size=width,
            hidden=bytes(4 * width),
        )  # fmt: skip
        part = np.frombuffer(write_stream([row], "float32", part=PartRecord(teachers={"t": 1})), np.uint8)
        teachers = {"a": {"t": ExpectedRow(weight=1.0, head="h")}}
        targets = TargetStream(
            iter([make_part(part, "teachers")]),
            TeacherRequest(rollouts=[rollout], teachers=teachers, kind=("float32", "hidden_states"), max_quarantined=0), heads={},
        )  # fmt: skip
        log.record(step, 0, prompts, RolloutBatch(rollouts=(rollout,), quarantined=()), targets)
        targets.wait_for_parts()
        targets.wait_for_sinks()

    write(1, 20_000)
    with pytest.raises(StorageError, match=FULL):
        write(2, 200_000)
    assert [p.name for p in run.targets.iterdir()] == ["step-000001"]
    assert log.replay(1, 0, prompts) is not None


def test_the_export_leaves_the_checkpoint_and_the_model_before(run: RunPaths, world: Any) -> None:
    config, rank = load_pipeline(world.write()), OneRank()
    merge = MergeRun(config=config, inputs=read_inputs(config), paths=run, identity={})
    saver = checkpoints(run, rank)
    saver.save(2, 2)
    saver.committed(wait=True)
    parts: Any = SimpleNamespace(trainer=rank)
    _export_model(parts, merge)
    before = {p.name: p.read_bytes() for p in run.model.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= set(before)
    rank.numel = 200_000
    with pytest.raises(StorageError, match=FULL) as error, explain_what_is_intact(run):
        _export_model(parts, merge)
    assert "intact: checkpoint of step 2\n" in str(error.value)
    assert {p.name: p.read_bytes() for p in run.model.iterdir()} == before
    assert sorted(p.name for p in run.root.iterdir()) == ["checkpoints", "model"]
