"""The source built for the section `balance`: today's prompts by default, else one that hears of every step."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest.mock import MagicMock

import pytest

from opd.config import load_pipeline
from opd.errors import RunDirError
from opd.interfaces import Sink
from opd.prompts import BalancedPrompts, MixedPrompts
from opd.records.step import DomainRecord, StepRecord
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths
from pipelines import build
from pipelines.build import prompt_source
from pipelines.inputs.read import read_inputs
from pipelines.merging.changes import accept_changes, refuse_lost_records, run_identity
from pipelines.merging.manifest import make_manifest


def ids(prompts: Any) -> list[str]:
    return [p.id for p in prompts]


def record(step: int, upper: float) -> StepRecord:
    losses = {"reverse": 1.0, "upper": upper}
    return StepRecord(
        step=step,
        domains={name: DomainRecord(loss=loss, tokens=8, samples=2) for name, loss in losses.items()},
        prompts=dict.fromkeys(losses, 2),
        phase_s={"train": 1.0},
    )


@pytest.fixture
def learning(world: Any) -> Any:
    world.data["trainer"] = {"steps": 20, "samples_per_step": 14}
    world.data["domains"]["upper"]["weight"] = 3.0
    return world


def parts_of(world: Any, monkeypatch: pytest.MonkeyPatch, sinks: list[Sink]) -> Any:
    """Let `build` put a merge together around workers that do nothing."""
    monkeypatch.setattr(build, "_start_roles", lambda *_: (MagicMock(), MagicMock(), MagicMock()))
    config = load_pipeline(world.write())
    return build.build_merge(config, read_inputs(config), RunPaths(world.root), MagicMock(), {}, sinks)


def test_by_samples_the_weights_alone_decide(learning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(learning, monkeypatch, [])
    before = MixedPrompts(read_inputs(load_pipeline(learning.write())).prompts, {"reverse": 3.5, "upper": 10.5}, 0)
    assert [ids(parts.prompts.take(step)) for step in (1, 2, 19)] == [ids(before.take(step)) for step in (1, 2, 19)]


@pytest.mark.parametrize("kind", ["tokens", "gap"])
def test_the_source_hears_of_every_step_beside_the_other_sinks(
    kind: str, learning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning.data["balance"] = {"kind": kind, "window": 2}
    other = MagicMock()
    parts = parts_of(learning, monkeypatch, [other])
    counts = []
    for step in range(1, 12):
        asked = ids(parts.prompts.take(step))
        counts.append(sum(i.startswith("upper") for i in asked))
        parts.reporter.step(record(step, upper=1.0 if step < 3 else 0.01))
    assert other.step.call_count == 11
    assert len(MetricsFile(RunPaths(learning.root).metrics).read()) == 11
    assert counts[0] in (10, 11) and counts[-1] in ((5, 6) if kind == "gap" else (10, 11)), (
        "by the gap: half, for it is done"
    )


def test_a_resume_hears_of_the_steps_that_were_taken(learning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learning.data["balance"] = {"kind": "gap", "window": 2}
    first = parts_of(learning, monkeypatch, [])
    taken = []
    for step in range(1, 10):
        taken.append(ids(first.prompts.take(step)))
        first.reporter.step(record(step, upper=1.0 if step < 3 else 0.01))
    MetricsFile(RunPaths(learning.root).metrics).rewind(5)
    again = parts_of(learning, monkeypatch, [])
    assert isinstance(again.prompts, BalancedPrompts)
    for step in range(6, 10):
        assert ids(again.prompts.take(step)) == taken[step - 1]
        again.reporter.step(record(step, upper=0.01))


def test_a_resume_may_not_change_it(learning: Any) -> None:
    config = load_pipeline(learning.write())
    before = make_manifest(config, read_inputs(config))
    learning.data["balance"] = "samples"
    config = load_pipeline(learning.write())
    assert (
        accept_changes(before["config"], make_manifest(config, read_inputs(config))["config"], learning.root / "m")
        == []
    )
    older = {key: value for key, value in before["config"].items() if key != "balance"}
    assert accept_changes(older, before["config"], learning.root / "m") == [], "begun by a release that did not have it"
    learning.data["balance"] = "gap"
    config = load_pipeline(learning.write())
    now = make_manifest(config, read_inputs(config))
    assert run_identity(now)["config"] != run_identity(before)["config"]
    with pytest.raises(RunDirError, match=r"balance.kind +samples +gap"):
        accept_changes(before["config"], now["config"], learning.root / "m")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([1, 2], "records of 2 steps, and a checkpoint of step 3"),
        ([], "records of 0 steps, and a checkpoint of step 3"),
        ([1, 3, 4], "records of 3 steps, and a checkpoint of step 3"),
        (["no json"], "a line that is no record: "),
    ],
    ids=str,
)
def test_a_resume_without_its_records_is_refused(lines: list[Any], found: str, learning: Any) -> None:
    paths = RunPaths(learning.root)
    text = [json.dumps(record(line, 1.0).to_json()) if isinstance(line, int) else line for line in lines]
    paths.metrics.write_text("".join(f"{line}\n" for line in text))
    refuse_lost_records(load_pipeline(learning.write()), paths, 3)  # by samples no record is needed
    learning.data["balance"] = "tokens"
    with pytest.raises(RunDirError, match=r"metrics\.jsonl\n  found:  " + re.escape(found)):
        refuse_lost_records(load_pipeline(learning.write()), paths, 3)


def test_a_resume_with_all_its_records_goes_on(learning: Any) -> None:
    learning.data["balance"] = "gap"
    metrics = MetricsFile(RunPaths(learning.root).metrics)
    for step in (1, 2, 3, 4):  # the last one was killed before its checkpoint
        metrics.write(record(step, 1.0))
    refuse_lost_records(load_pipeline(learning.write()), RunPaths(learning.root), 3)


def test_it_reads_no_records_that_it_does_not_need(learning: Any) -> None:
    config = load_pipeline(learning.write())
    metrics = MagicMock()
    assert isinstance(prompt_source(config, read_inputs(config), metrics), MixedPrompts)
    metrics.read.assert_not_called()
