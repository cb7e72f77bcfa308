"""A step's record on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opd.live.displays import RunStart, open_display, step_facts
from opd.live.interfaces import Display
from opd.live.progress import RunReporter
from opd.records.scores import DomainScore, Evaluation
from opd.records.step import StepRecord
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths


class Heard(Display):
    """A display that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def step(self, record: StepRecord) -> None:
        self.lines.append(f"{record.step}: {'  '.join(step_facts(record))}")


def record(**changes: Any) -> StepRecord:
    plain = {"step": 3, "loss": 0.5, "response_tokens": 20, "probe_gap": 1e-3, "quarantined": {}, "phase_s": {"a": 4.0}}
    more = {"truncated_by_domain": {}, "domains": {"x": {"samples": 10}, "y": {"samples": 10}}}
    return StepRecord.from_json(plain | more | changes)


def test_a_step_is_stored_and_shown(tmp_path: Path) -> None:
    metrics, heard = MetricsFile(tmp_path / "metrics.jsonl"), Heard()
    RunReporter(metrics, RunPaths(tmp_path), heard).step(record(accuracy={"x": 0.25, "y": 0.75}, quarantined={"x": 2}))
    assert heard.lines == ["3: loss 0.5000  5 tok/s  gap 1.0e-03  accuracy 0.500  quarantined 2"]
    assert [r.step for r in metrics.read()] == [3]


def test_a_worker_that_was_started_again_is_told(tmp_path: Path) -> None:
    heard = Heard()
    RunReporter(MetricsFile(tmp_path / "metrics.jsonl"), RunPaths(tmp_path), heard).step(
        record(restarted=["teacher worker 1"])
    )
    assert heard.lines[0] == "teacher worker 1 died in step 3 and was started again; its rows were scored again"
    assert len(heard.lines) == 2


def test_a_sub_agent_that_broke_is_told(tmp_path: Path) -> None:
    heard = Heard()
    episodes = {"x": {"episodes": 4, "sub_agents": {"raised": 1}, "error": "s/ask-1: step: KeyError"}}
    RunReporter(MetricsFile(tmp_path / "metrics.jsonl"), RunPaths(tmp_path), heard).step(record(episodes=episodes))
    assert heard.lines[0] == "step 3: a sub-agent of domain x broke: s/ask-1: step: KeyError"


def test_an_environment_that_could_not_be_closed_is_told(tmp_path: Path) -> None:
    heard = Heard()
    episodes = {"x": {"episodes": 4, "not_closed": 2, "close_error": "s: close: OSError: stuck"}}
    RunReporter(MetricsFile(tmp_path / "metrics.jsonl"), RunPaths(tmp_path), heard).step(record(episodes=episodes))
    assert heard.lines[0] == (
        "warning: step 3: 2 of 4 episodes of domain x had an environment that could not be closed, and count as they ended: "
        "s: close: OSError: stuck"
    )


def test_rewards_are_shown_and_verifiers_that_fail_are_told(tmp_path: Path) -> None:
    heard = Heard()
    domains = {
        "x": {"episodes": 4, "reward": 0.25, "failed": 3, "error": "ValueError: no"},
        "y": {"episodes": 2, "reward": 0.75},
    }
    RunReporter(MetricsFile(tmp_path / "metrics.jsonl"), RunPaths(tmp_path), heard).step(
        record(reward={"weight": 1.0, "domains": domains})
    )
    assert heard.lines == [
        "step 3: the verifier of x failed on 3 of 4 responses, whose reward is 0: ValueError: no",
        "3: loss 0.5000  5 tok/s  gap 1.0e-03  reward 0.500",
    ]


def test_an_evaluation_is_a_file_of_its_own(tmp_path: Path) -> None:
    found = Evaluation(model="me", scores={"x": DomainScore(accuracy=0.5, stderr=0.1, low=0.3, high=0.7, questions=9)})
    reporter = RunReporter(MetricsFile(tmp_path / "metrics.jsonl"), RunPaths(tmp_path), Heard())
    reporter.evaluation("before", found)
    reporter.evaluation("before", found)  # a resume writes it again
    assert Evaluation.load(tmp_path / "evaluation" / "before.json") == found


def test_what_a_terminal_would_obey_is_spelt_out(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(RunStart("ten", Path("runs/ten"), 10)) as shown:
        shown.say("expert \x1b]0;mine\x07 [red]x[/red] \u202e: 1")
    assert capsys.readouterr().err == "expert \\x1b]0;mine\\x07 [red]x[/red] \\u202e: 1\n"


def test_other_sinks_get_every_record(tmp_path: Path) -> None:
    got: list[Any] = []

    class Sink:
        def step(self, taken: StepRecord) -> None:
            assert [r.step for r in MetricsFile(tmp_path / "metrics.jsonl").read()] == [3], "the file comes first"
            got.append(taken)

    RunReporter(MetricsFile(tmp_path / "metrics.jsonl"), RunPaths(tmp_path), Heard(), [Sink()]).step(record())
    assert got == [record()]
