"""Steps that keep episodes: the early ones by powers of two, and the newest; a killed run keeps the same ones."""

from __future__ import annotations

from pathlib import Path

from opd.records.types import RolloutBatch, StepReport
from opd.run.paths import RunPaths
from opd.traces.record import read_traces
from opd.traces.trace_files import TraceFiles
from pipelines.merging.results import withdraw_results
from tests.rows import make_rollout
from tests.steps import Letters


def keep(files: TraceFiles, step: int, stop_reason: str = "done") -> None:
    rollout = make_rollout(
        sample_id=f"{step:06d}/maze/0", step=step, domain="maze", prompt_ids=(1,), response_ids=(2, 3),
        stop_reason=stop_reason, reward=float(step),
    )  # fmt: skip
    report = StepReport(step=step, loss=0, grad_norm=0, lr=0, logprob_gap=0, domains={}, token_losses={rollout.sample_id: (0.5, step)})  # fmt: skip
    files.keep(step, RolloutBatch(rollouts=(rollout,), quarantined=()), report)


def kept(paths: RunPaths) -> dict[int, str]:
    return {step: file.read_text() for step, file in paths.traces_by_step().items()}


def test_early_steps_stay_and_of_the_others_the_newest(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    files = TraceFiles(paths, Letters(), every=5, last=23)
    seen = []
    for step in range(1, 24):
        keep(files, step)
        seen.append(sorted(kept(paths)))
    assert seen[4] == [1, 2, 4, 5] and seen[9] == [1, 2, 4, 8, 10] and seen[-1] == [1, 2, 4, 8, 16, 23]
    (episode,) = read_traces(paths.trace_file(16)).episodes
    (piece,) = episode.segments[0].pieces
    assert (episode.reward, piece.texts, piece.losses) == (16.0, ("c", "d"), (0.5, 16))


def test_a_run_that_was_killed_keeps_the_same(tmp_path: Path) -> None:
    whole, killed = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "killed")
    for paths, steps in ((whole, [*range(1, 24)]), (killed, [*range(1, 14), *range(11, 24)])):
        paths.root.mkdir()
        files = TraceFiles(paths, Letters(), every=5, last=23)
        for before, step in zip([0, *steps], steps, strict=False):
            if step < before:
                withdraw_results(paths, step - 1, 23)
                assert max(kept(paths)) < step
            keep(files, step)
    assert kept(whole) == kept(killed)


def test_a_step_without_an_episode_leaves_nothing(tmp_path: Path) -> None:
    keep(TraceFiles(RunPaths(tmp_path), Letters(), every=5, last=23), 1, "stop")
    assert list(tmp_path.iterdir()) == []
