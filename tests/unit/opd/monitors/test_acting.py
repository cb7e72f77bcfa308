"""A monitor's actions, what they leave on disk, and that a resume goes on as if nothing had happened."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.config.monitors import MonitorsConfig
from opd.errors import Paused, RunError, StorageError
from opd.live.interfaces import Display
from opd.live.progress import RunReporter
from opd.monitors.acting import RunMonitors
from opd.monitors.alarms import SAMPLES, SAMPLES_OF_STEP, Alarms
from opd.records.scores import DomainScore, Evaluation
from opd.records.step import AlarmRecord, StepRecord
from opd.run.metrics import MetricsFile
from opd.run.paths import RunPaths
from tests.steps import Letters, rollout, step

OFF: dict[str, Any] = {"warn": None, "stop": None}
QUIET: dict[str, Any] = dict.fromkeys(MonitorsConfig.model_fields, OFF)
LOOPS = [rollout(9, [3] * 20), rollout(9, range(20))]


def limits(**given: dict[str, Any]) -> MonitorsConfig:
    """Nothing but the signals that are given acts."""
    return MonitorsConfig.model_validate(QUIET | {name: OFF | values for name, values in given.items()})


def expert(**tokens: float) -> Evaluation:
    scores = {
        domain: DomainScore(accuracy=1.0, stderr=0.0, low=0.9, high=1.0, questions=9, mean_tokens=mean)
        for domain, mean in tokens.items()
    }
    return Evaluation(model="expert", scores=scores)


def watch(root: Path, config: MonitorsConfig, records: Sequence[StepRecord] = ()) -> RunMonitors:
    found = RunMonitors(config, RunPaths(root), Letters(), tolerance=0.02)
    found.begin(records, expert(a=4.0))
    return found


def judged(one: RunMonitors, records: Sequence[StepRecord]) -> list[StepRecord]:
    """The records with their alarms, as the loop makes them."""
    return [replace(record, alarms=one.judge(record, LOOPS)) for record in records]


def looping(shares: Sequence[int]) -> list[StepRecord]:
    """Steps in which so many of ten responses loop."""
    return [step(number, looping_by_domain={"a": share}) for number, share in enumerate(shares, start=1)]


def steps_with(records: Sequence[StepRecord], action: str) -> dict[int, int]:
    """Step -> since, of the alarms with this action."""
    return {r.step: alarm.since for r in records for alarm in r.alarms if alarm.action == action}


# Limits


def test_a_window_has_to_be_full(tmp_path: Path) -> None:
    one = watch(tmp_path, limits(repetition={"over": 3, "warn": 0.5}))
    assert steps_with(judged(one, looping([9, 9, 9, 0, 0, 0])), "warn") == {3: 3, 4: 3}


def test_the_hardest_limit_that_is_reached_counts(tmp_path: Path) -> None:
    one = watch(tmp_path, limits(repetition={"over": 1, "warn": 0.2, "pause": 0.5, "stop": 0.8}))
    records = judged(one, looping([1, 2, 4, 5, 7, 8]))
    assert [[a.action for a in r.alarms] for r in records] == [[], ["warn"], ["warn"], ["pause"], ["pause"], ["stop"]]
    assert [a.limit for r in records for a in r.alarms] == [0.2, 0.2, 0.5, 0.5, 0.8]


def test_each_domain_is_judged_by_itself(tmp_path: Path) -> None:
    one = watch(tmp_path, limits(truncation={"over": 1, "warn": 0.9}))
    record = step(1, {"a": {}, "b": {}}, truncated_by_domain={"a": 8, "b": 9})
    assert [(a.domain, a.value) for a in one.judge(record, LOOPS)] == [("b", 0.9)]


def test_what_is_no_number_is_no_reading(tmp_path: Path) -> None:
    one = watch(tmp_path, limits(gap={"over": 1, "warn": 0.1}, grad_norm={"over": 1, "warn": 0.1}))
    assert one.judge(step(1, grad_norm=1.0, logprob_gap=float("nan")), LOOPS) == ()
    assert one.judge(step(2, grad_norm=float("nan"), logprob_gap=float("inf")), LOOPS) == ()


def test_the_defaults_leave_a_run_like_the_quickstart_alone(tmp_path: Path) -> None:
    """The worst readings of its metrics file, all at once."""
    worst = {"a": {"student_entropy": 1.29, "teacher_entropy": 0.07, "teacher_top1": 0.28, "tokens": 55}}
    records = [
        step(number, worst, truncated_by_domain={"a": 3}, looping_by_domain={"a": 3}, grad_norm=norm, logprob_gap=1e-6)
        for number, norm in enumerate([1.0, 2.4] * 20, start=1)
    ]
    assert {r.alarms for r in judged(watch(tmp_path, MonitorsConfig()), records)} == {()}
    assert not (tmp_path / "monitors").exists()


def test_the_defaults_stop_what_loops_and_warn_before(tmp_path: Path) -> None:
    records = judged(watch(tmp_path, MonitorsConfig()), looping([0, 1, 2, 3, 4, 7, 9, 9, 9, 9]))
    assert (steps_with(records, "warn"), steps_with(records, "stop")) == ({7: 7, 8: 7}, {9: 9, 10: 9})


# Over a resume


def test_a_resume_goes_on_with_the_same_readings(tmp_path: Path) -> None:
    """Of every signal and at every step: what stands in the metrics file is all that counts."""
    config = MonitorsConfig.model_validate(
        {name: {"over": 3, "warn": 1e-6, "stop": None} for name in MonitorsConfig.model_fields}
    )
    records = [
        step(
            n, {"a": {"tokens": 40 + 7 * n, "student_entropy": 0.1, "teacher_entropy": 0.1 * n, "teacher_top1": 1 / n}},
            looping_by_domain={"a": n % 4}, truncated_by_domain={"a": n % 5}, grad_norm=1.0 + n % 3, logprob_gap=1e-3 * n,
            draft={"accepted_length/a": 2.0, "engine_accepted_length/a": 1.0 + 0.1 * n, "engine_tokens_s": 1.0 * n,
                   "engine_plain_tokens_s": 2.0},
        )
        for n in range(1, 13)
    ]  # fmt: skip
    whole = judged(watch(tmp_path, config), records)
    assert {a.signal for r in whole for a in r.alarms} == set(MonitorsConfig.model_fields)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for record in whole:
        metrics.write(record)
    for done in (11, 7, 3, 2):
        metrics.rewind(done)
        again = watch(tmp_path, config, metrics.read())
        assert judged(again, records[done:]) == whole[done:]


def test_a_pause_ends_the_run_once(tmp_path: Path) -> None:
    config = limits(repetition={"over": 1, "pause": 0.5})
    first = watch(tmp_path, config)
    (record,) = judged(first, looping([6]))
    assert record.ends_run and isinstance(first.end_error(), Paused)
    second = watch(tmp_path, config, [record])
    later = judged(second, looping([6, 7, 2, 8])[1:])
    assert [r.ends_run for r in later] == [False, False, True], "who went on has seen it; after a recovery it is news"
    assert [sorted(p.name for p in (tmp_path / "monitors").iterdir())] == [["step-000001.json", "step-000004.json"]]


def test_a_stop_holds_until_its_limit_is_changed(tmp_path: Path) -> None:
    config = limits(repetition={"over": 1, "stop": 0.5})
    first = watch(tmp_path, config)
    (record,) = judged(first, looping([6]))
    assert record.ends_run and not isinstance(first.end_error(), Paused)
    with pytest.raises(RunError, match=r"step 1: monitor repetition: domain a: 0\.60 .*stop is 0\.5"):
        watch(tmp_path, config, [record])
    for changed in ({"stop": 0.7}, {"stop": None, "warn": 0.1}):
        second = watch(tmp_path, limits(repetition={"over": 1, **changed}), [record])
        assert [r.ends_run for r in judged(second, looping([6, 6])[1:])] == [False]
        assert second.end_error() is None


def test_a_limit_that_is_set_lower_between_two_sittings_acts_after_the_next_step(tmp_path: Path) -> None:
    (record,) = judged(watch(tmp_path, limits(repetition={"over": 1, "stop": 0.9})), looping([6]))
    second = watch(tmp_path, limits(repetition={"over": 1, "stop": 0.5}), [record])
    (later,) = judged(second, looping([6, 6])[1:])
    assert later.ends_run and (tmp_path / "monitors" / "step-000002.json").exists(), "with samples"


# What is left


def test_what_an_alarm_saw(tmp_path: Path) -> None:
    one = watch(tmp_path, limits(repetition={"over": 2, "stop": 0.5}, gap={"over": 1, "pause": 0.8}))
    batch = [rollout(2, [3] * 20 + [n] * n) for n in range(6)] + [rollout(2, [5] * 30, domain="b")]
    one.judge(step(1, logprob_gap=0.001), batch)
    alarms = one.judge(step(2, {"a": {}, "b": {}}, looping_by_domain={"a": 12}, logprob_gap=0.018), batch)
    found = Alarms.from_json(json.loads((tmp_path / "monitors" / "step-000002.json").read_text()))
    assert (found.step, found.alarms) == (2, alarms)
    assert {(a.signal, a.domain) for a in alarms} == {("repetition", "a"), ("gap", "")}
    assert found.readings["repetition"] == {"a": 0.6, "b": 0.0} and found.readings["gap"] == {"": pytest.approx(0.9)}
    loops = [s for s in found.samples if s.signal == "repetition"]
    assert len(loops) == SAMPLES and {s.domain for s in loops} == {"a"}
    assert (loops[0].prompt, loops[0].response, loops[0].tokens, loops[0].truncated) == ("hi", "d" * 23, 23, True)
    numbers = [s.number for s in loops if s.number is not None]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] == pytest.approx(1 - 1 / 18)
    whole = [s for s in found.samples if s.signal == "gap"]
    assert len(whole) == 7 <= SAMPLES_OF_STEP and [s.domain for s in whole[:3]] == ["a", "b", "a"], "domains in turn"
    assert {s.number for s in whole} == {None}


def test_a_warning_that_no_response_shows_has_no_samples(tmp_path: Path) -> None:
    one = watch(tmp_path, limits(gap={"over": 1, "warn": 0.8}))
    (alarm,) = one.judge(step(1, logprob_gap=0.018), [rollout(1, [3] * 20)])
    found = Alarms.from_json(json.loads((tmp_path / "monitors" / "step-000001.json").read_text()))
    assert (alarm.signal, alarm.action, found.samples) == ("gap", "warn", ())


def test_the_error_names_what_was_seen_where_it_lies_and_how_to_go_on(tmp_path: Path) -> None:
    one = watch(tmp_path, limits(repetition={"over": 1, "stop": 0.5}))
    one.judge(looping([8])[0], LOOPS)
    lines = str(one.end_error()).split("\n")
    assert lines[0].startswith("step 1: monitor repetition: domain a: 0.80 of the responses")
    assert [line.split()[0] for line in lines[1:]] == ["saw:", "intact:", "fix:", "go"]
    assert str(tmp_path / "monitors" / "step-000001.json") in lines[1] and "report.html" in lines[1]
    assert "checkpoint of step 1" in lines[2]
    assert lines[4] == f"  go on:  opd merge --resume {tmp_path} --set monitors.repetition.stop=null"
    one = watch(tmp_path, limits(repetition={"over": 1, "pause": 0.5}))
    one.judge(looping([8])[0], LOOPS)
    assert str(one.end_error()).endswith(f"opd merge --resume {tmp_path}")


def test_a_disk_that_refuses_the_samples_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Alarms, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Alarms, "save", full)
    one = watch(tmp_path, limits(repetition={"over": 1, "stop": 0.5}))
    with pytest.raises(StorageError, match=r"step-000001\.json: could not be written"):
        one.judge(looping([8])[0], LOOPS)


def test_an_alarm_is_told_when_it_begins(tmp_path: Path) -> None:
    class Heard(Display):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def say(self, line: str) -> None:
            self.lines.append(line)

    heard = Heard()
    reporter = RunReporter(MetricsFile(tmp_path / "metrics.jsonl"), RunPaths(tmp_path), heard)
    one = watch(tmp_path, limits(truncation={"over": 1, "warn": 0.9}))
    for number, cut in enumerate(({"a": 8}, {"a": 9}, {"a": 10}, {"a": 0}, {"a": 9}), start=1):
        record = step(number, truncated_by_domain=cut, phase_s={"train": 1.0})
        reporter.step(replace(record, alarms=one.judge(record, LOOPS)))
    assert [line.split(" of the")[0] for line in heard.lines] == [
        "warning: step 2: truncation: domain a: 0.90",
        "warning: step 5: truncation: domain a: 0.90",
    ]
    assert "raise rollout.max_new_tokens" in heard.lines[0]


def test_a_record_with_alarms_is_read_as_it_was_written(tmp_path: Path) -> None:
    alarm = AlarmRecord(signal="gap", domain="", value=0.9, limit=0.8, action="warn", since=3)
    metrics, record = MetricsFile(tmp_path / "metrics.jsonl"), step(4, alarms=(alarm,), looping_by_domain={"a": 2})
    metrics.write(record)
    assert metrics.read() == [record]
    assert "alarms" not in step(1).to_json() and "looping_by_domain" not in step(1).to_json()
