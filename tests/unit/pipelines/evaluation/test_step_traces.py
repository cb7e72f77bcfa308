"""`opd traces --step`: the episodes of a training step as trees, from the target log or from what was kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli import app
from opd.records.types import Rollout
from opd.run.paths import RunPaths
from opd.stream.rollouts import write_file
from opd.traces.record import StepTraces
from opd.traces.rendering import make_trace
from opd.traces.selection import choose_episodes, group_episodes
from tests.chatml import CHATML, chat_tokenizer
from tests.unit.opd.rollouts.episodes.test_compaction import options, policy
from tests.unit.opd.rollouts.episodes.test_runner import play, request

TOKENIZER = chat_tokenizer(CHATML)


def traces(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["traces", *map(str, args)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    """Of one episode that was summed up twice, and of two short ones."""
    long = request(0, options={"goal": 11}, max_turns=20, compaction=options())
    results, _ = play(long, request(1, options={"goal": 2}), request(2, options={"goal": 1}), policy=policy)
    return [rollout for result in results for rollout in result.rollouts]


@pytest.fixture
def run(tmp_path: Path, world: object, rollouts: list[Rollout]) -> RunPaths:
    """A run whose log has step 3, and whose directory of traces has steps 2 and 3."""
    paths = RunPaths(tmp_path / "run")
    (paths.targets / "step-000003").mkdir(parents=True)
    paths.traces.mkdir()
    (paths.targets / "step-000003" / "rollouts.arrow").write_bytes(write_file(rollouts))
    TOKENIZER.save_pretrained(tmp_path / "student")
    data = dict(world.data) | {"student": {"model": str(tmp_path / "student")}}  # type: ignore[attr-defined]
    paths.pipeline.write_text(yaml.safe_dump(data))
    episodes = group_episodes(rollouts)
    for step in (2, 3):
        losses = {r.sample_id: [0.5 * step] * r.num_trained for r in rollouts}
        kept = [make_trace(episodes[name], why, losses, TOKENIZER) for name, why in choose_episodes(episodes).items()]
        StepTraces(step=step, episodes=tuple(kept)).save(paths.trace_file(step))
    return paths


def test_the_tree_of_an_episode_from_the_log(run: RunPaths) -> None:
    code, out = traces(run.root, "--step", 3)
    assert code == 0, out
    assert out.count("== ") == 3
    assert "== s0: done, reward 2.75, 13 turns, 3 segments" in out, "eleven turns and two summaries"
    lines = out.splitlines()
    assert "segment s0, main, goes on in s0+1" in lines
    assert "  segment s0+1, summary of s0, goes on in s0+2" in lines
    assert "    segment s0+2, summary of s0+1" in lines
    assert "  prompt, 8 tokens: count:0 " in lines
    assert "    copied, 25 tokens: count:0 so far at 6 6<|im_end|> 6 " in lines
    assert "  turn 1, 2 tokens by weights 2, mean loss 1.500: 1<|im_end|>" in lines, (
        "the losses are those that were kept"
    )
    assert "  environment, 3 tokens:  1 " in lines


def test_a_student_that_has_moved(run: RunPaths, tmp_path: Path) -> None:
    known = traces(run.root, "--step", 3)
    moved = (tmp_path / "student").rename(tmp_path / "elsewhere")
    code, out = traces(run.root, "--step", 3)
    assert code == 2 and f"error: {tmp_path / 'student'}\n  found:  no such directory" in out
    (tmp_path / "student").symlink_to(moved)
    assert traces(run.root, "--step", 3) == known, "the way out that the error names"
    (tmp_path / "student").unlink()
    moved.rename(run.model)
    assert traces(run.root, "--step", 3) == known, "the merged model has the same tokenizer"


def test_the_newest_step_and_what_was_kept_of_a_step_that_the_log_has_no_more(run: RunPaths) -> None:
    assert traces(run.root, "--step", "last") == traces(run.root, "--step", 3)
    code, out = traces(run.root, "--step", 2)
    assert code == 0 and "mean loss 1.000" in out and "segment s0, main, goes on in s0+1" in out
    _, few = traces(run.root, "--step", 3, "--limit", 1)
    assert few.count("== ") == 1


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--step", "7"], "episodes of the steps 2, 3"),
        (["--step", "-1"], "wanted: step -1"),
        (["--step", "newest"], "wanted: step newest"),
        (["--step", "3", "--domain", "cave"], "no episode of cave in step 3"),
    ],
)
def test_what_is_not_there_is_told(run: RunPaths, args: list[str], told: str) -> None:
    code, out = traces(run.root, *args)
    assert code == 2 and told in out and "fix:" in out


def test_a_run_without_agents(tmp_path: Path) -> None:
    code, out = traces(tmp_path, "--step", "last")
    assert code == 2 and "episodes of no step" in out


def test_a_log_of_an_older_release_is_refused_in_a_sentence(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.stream.rollouts.VERSION", "9")
    code, out = traces(run.root, "--step", 3)
    assert code == 2 and "rollouts of version 3, wanted 9" in out and "fix:" in out


def test_files_that_are_damaged(run: RunPaths) -> None:
    (run.targets / "step-000003" / "rollouts.arrow").write_bytes(b"short")
    code, out = traces(run.root, "--step", 3)
    assert code == 2 and "not a whole Arrow stream" in out
    run.trace_file(2).write_text("{")
    code, out = traces(run.root, "--step", 2)
    assert code == 2 and "step-000002.json" in out
