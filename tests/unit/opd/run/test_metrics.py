"""A run's numbers survive a kill and are rewound on a resume."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from opd.records.episodes import EpisodesRecord, EpisodeStats, TurnRecord
from opd.records.step import DomainRecord, PositionRecord, StepRecord, _count_prompts
from opd.records.types import DomainStats, QuarantinedPrompt, Rollout, RolloutBatch, SavedCheckpoint
from opd.run.metrics import MetricsFile, PhaseClock, count_steps_and_tokens


def test_what_an_environment_answers_is_not_trained_on() -> None:
    answers = StepRecord(step=1, response_tokens=90, domains={"a": DomainRecord(tokens=88)})
    acts = StepRecord(
        step=2, response_tokens=900, domains={"a": DomainRecord(tokens=88)}, episodes={"a": EpisodesRecord()}
    )
    assert count_steps_and_tokens([answers, acts]) == (2, 178)


def test_a_step_without_an_optimiser_step_trains_no_token() -> None:
    """As while a critic learns alone: the responses are there all the same."""
    cold = StepRecord(step=1, response_tokens=90, skipped=True)
    assert count_steps_and_tokens([cold, StepRecord(step=2, response_tokens=80)]) == (2, 80)


def test_an_episode_without_a_reward_counts_as_zero_as_in_an_exam() -> None:
    """Games pay those that win and nobody else: the mean over the winners is 1 whatever the others did."""
    assert EpisodesRecord.from_stats(EpisodeStats(episodes=4, rewarded=1, reward_sum=1.0), {}).reward == 0.25
    assert EpisodesRecord.from_stats(EpisodeStats(episodes=4), {}).reward is None


def test_what_is_written_is_read(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    assert metrics.read() == []
    records = [
        StepRecord(step=1, loss=0.1 + 0.2, quarantined_reasons={"a/1": "é\n"}, restarted=("teacher worker 1",)),
        StepRecord(
            step=2,
            domains={"a": DomainRecord(loss=1e-9, tokens=3)},
            positions={"2-3": PositionRecord(loss=0.5, tokens=2)},
            episodes={
                "a": EpisodesRecord(
                    episodes=2,
                    reward=0.5,
                    stop_reasons={"done": 1, "raised": 1},
                    broken=1,
                    error="é",
                    by_turn=(TurnRecord(tokens=3, loss=0.25, logprob_gap=1e-7),),
                ),
            },
            checkpoint=SavedCheckpoint(step=1, background_s=0.25, size=9),
            replayed=True,
        ),
    ]
    for record in records:
        metrics.write(record)
    assert metrics.read() == records
    assert MetricsFile(tmp_path / "m.jsonl").read() == records
    assert (tmp_path / "m.jsonl").read_text().count("\n") == 2


def test_what_a_newer_release_adds_is_ignored_wherever_it_stands() -> None:
    record = StepRecord(
        step=1,
        positions={"0": PositionRecord(loss=0.5, tokens=2)},
        episodes={"a": EpisodesRecord(by_turn=(TurnRecord(tokens=3, loss=0.25, logprob_gap=1e-7),))},
        checkpoint=SavedCheckpoint(step=1, background_s=0.25, size=9),
    )
    newer = json.loads(json.dumps(record.to_json()))
    for part in (newer, newer["positions"]["0"], newer["episodes"]["a"]["by_turn"][0], newer["checkpoint"]):
        part["new"] = 1
    assert StepRecord.from_json(newer) == record


def test_means_over_no_token_are_not_known() -> None:
    zeros = {field.name: 0.0 for field in fields(DomainStats)} | {"tokens": 0, "samples": 0}
    assert DomainRecord.from_stats(DomainStats(**zeros)) == DomainRecord()
    one = DomainStats(**zeros | {"tokens": 1, "samples": 1, "teacher_entropy_sum": math.nan})
    assert (DomainRecord.from_stats(one).loss, DomainRecord.from_stats(one).teacher_entropy) == (0.0, None)


@pytest.mark.parametrize("part", ["domains", "positions", "episodes", "checkpoint", "reward"])
@pytest.mark.parametrize("found", [["a"], "a"])
def test_a_part_of_another_form_is_a_type_error(part: str, found: object) -> None:
    with pytest.raises(TypeError, match=rf"{part} is .*: input should be a"):
        StepRecord.from_json({"step": 1, part: found})


@pytest.mark.parametrize("found", [["a"], {"d": 3}])
def test_rewards_of_another_form_are_a_type_error(found: object) -> None:
    with pytest.raises(TypeError, match=r"reward\.domains.* is .*: input should be a"):
        StepRecord.from_json({"step": 1, "reward": {"domains": found}})


def test_sub_agents_are_counted_where_there_are_any(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    episodes = {"a": EpisodesRecord(episodes=1), "b": EpisodesRecord(sub_agents={"done": 2, "refused": 1})}
    metrics.write(StepRecord(step=1, episodes=episodes))
    (written,) = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert "sub_agents" not in written["episodes"]["a"] and written["episodes"]["b"]["sub_agents"]["refused"] == 1
    assert metrics.read() == [StepRecord(step=1, episodes=episodes)]


def test_a_prompt_counts_in_its_own_domain_whoever_scores_its_segments() -> None:
    def row(sample_id: str, domain: str) -> Rollout:
        return replace(Rollout.from_tokens(sample_id, (1,), (2,), domain), episode=sample_id.partition("+")[0])

    rollouts = (row("1/a/0", "a"), row("1/a/0+1", "b"), row("1/a/0+2", "a"), row("1/b/0", "b"))
    refused = (QuarantinedPrompt(prompt_id="b/1", domain="b", reason="too long"),)
    assert _count_prompts(RolloutBatch(rollouts=rollouts, quarantined=refused)) == {"a": 1, "b": 2}


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_last_line_that_was_cut_is_left_out(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = MetricsFile(path)
    metrics.write(StepRecord(step=1))
    metrics.write(StepRecord(step=2))
    path.write_bytes(path.read_bytes()[:-cut])
    assert metrics.read() == [StepRecord(step=1)]


@pytest.mark.parametrize(("step", "left"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_rewind_forgets_later_steps(step: int, left: list[int], tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    for i in (1, 2, 3):
        metrics.write(StepRecord(step=i))
    metrics.rewind(step)
    assert [r.step for r in metrics.read()] == left
    metrics.write(StepRecord(step=step + 1))
    assert [r.step for r in metrics.read()] == [*left, step + 1]


def test_after_a_rewind_a_cut_line_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    metrics = MetricsFile(path)
    metrics.rewind(1)
    metrics.write(StepRecord(step=2))
    assert metrics.read() == [StepRecord(step=1), StepRecord(step=2)]


def test_a_file_of_another_release_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "of_tomorrow": 5, "domains": {"a": {"tokens": 3, "skill": 1}}}\n')
    metrics = MetricsFile(path)
    assert metrics.read() == [StepRecord(step=1, domains={"a": DomainRecord(tokens=3)})]
    metrics.rewind(1)
    assert "of_tomorrow" in path.read_text(), "a rewind keeps the lines as they are"


@pytest.mark.parametrize("line", ["[1]", '{"step": 1, "domains": {"a": 7}}', '{"loss": 1}'])
def test_a_line_that_is_no_record_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TypeError):
        MetricsFile(path).read()


def test_rewind_of_a_run_without_records(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.rewind(0)
    assert metrics.read() == []


def test_the_clock_adds_up_a_phase_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 1, 10, 12.5, 20, 20.25])
    monkeypatch.setattr("opd.run.metrics.time.monotonic", lambda: next(ticks))
    clock = PhaseClock()
    with clock("rollout"):
        pass
    with clock("rollout"):
        pass
    with pytest.raises(KeyError), clock("train"):
        raise KeyError
    assert clock.take_seconds() == {"rollout": 3.5, "train": 0.25}
    assert clock.take_seconds() == {}
