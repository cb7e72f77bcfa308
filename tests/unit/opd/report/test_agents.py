"""Agents on the page: the audit of their tokens, and episodes turn by turn, whatever an environment wrote."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from opd.records.episodes import EpisodesRecord, TurnRecord
from opd.records.step import StepRecord
from opd.report import agent_rows, baseline_rows, write_report
from opd.report.agents import MOST_CHARACTERS, episode_curves, episode_rows, loss_level
from opd.traces.record import EpisodeTrace, Piece, SegmentTrace, StepTraces
from tests.unit.opd.report.conftest import HOSTILE, record
from tests.unit.opd.report.test_page import written


def audit(number: int, **more: Any) -> EpisodesRecord:
    turns = (TurnRecord(tokens=10, loss=0.5, logprob_gap=1e-6), TurnRecord(tokens=30, loss=number, logprob_gap=2e-6))
    known: dict[str, Any] = {
        "episodes": 4, "turns": 2.0, "reward": 0.25 * number, "tokens": 40, "trained": 1.0, "segments": 4,
        "stop_reasons": {"done": 3, "turns": 1}, "by_turn": turns[: 1 + (number > 1)],
    }  # fmt: skip
    return EpisodesRecord(**known | more)


def segment(*pieces: Piece, **more: Any) -> SegmentTrace:
    known: dict[str, Any] = {
        "sample_id": "000004/letters/0", "domain": "letters", "origin": "main", "parent": None, "next": None,
        "prompt": "go:", "prompt_length": 3,
    }  # fmt: skip
    return SegmentTrace(**known | more, pieces=pieces)


def wrote(*texts: str, losses: tuple[float, ...] | None = None, origin: Any = "policy") -> Piece:
    given = tuple(0.1 * place for place in range(len(texts))) if losses is None else losses
    return Piece(origin=origin, policy_version=3, length=len(texts), texts=texts, losses=given)


def saw(text: str) -> Piece:
    return Piece(origin="environment", policy_version=3, length=9, texts=(text,))


def episode(*segments: SegmentTrace, **more: Any) -> EpisodeTrace:
    known: dict[str, Any] = {
        "episode": "000004/letters/0", "domain": "letters", "why": ("best", "first"), "stop_reason": "done", "reward": 1.0,
    }  # fmt: skip
    return EpisodeTrace(**known | more, segments=segments)


FAMILY = episode(
    segment(wrote("left", "<|end|>", losses=(0.01, 2.5)), saw("a wall "), wrote("up\n"), next="000004/letters/0+2"),
    segment(
        wrote("asked"), sample_id="000004/letters/0+1", parent="000004/letters/0", origin="sub_agent", domain="sums",
        prompt="a task",
    ),
    segment(
        wrote("kept", origin="masked", losses=()), wrote("on"), sample_id="000004/letters/0+2", parent="000004/letters/0",
        origin="summary", prompt="so far",
    ),
    segment(wrote("forked", losses=()), sample_id="000004/letters/0+3", parent="000004/letters/0", prompt="rewritten"),
)  # fmt: skip


def add_agents(run_dir: Path, *episodes: EpisodeTrace) -> Path:
    """Make `letters` a domain of agents, with these episodes of its last step and one of its first."""
    lines = [record(n, episodes={"letters": json.loads(json.dumps(audit(n), default=asdict))}) for n in range(1, 5)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "traces").mkdir()
    first = episode(
        segment(wrote("began")), why=("first",), episode="000001/letters/0", reward=None, stop_reason="turns"
    )
    StepTraces(step=1, episodes=(first, replace(FAMILY, why=("best",)))).save(run_dir / "traces" / "step-000001.json")
    StepTraces(step=4, episodes=episodes).save(run_dir / "traces" / "step-000004.json")
    return run_dir


def records(*found: EpisodesRecord) -> list[StepRecord]:
    return [StepRecord(step=step, episodes={"maze": one}) for step, one in enumerate(found, 1)]


def test_the_audit_of_a_whole_run() -> None:
    last = audit(
        2,
        episodes=12,
        trained=0.5,
        tokens=120,
        forks=2,
        lost_turns=1,
        broken=1,
        error="s3: it fell",
        sub_agents={"done": 2},
    )
    row = episode_rows(records(audit(1), last))["maze"]
    assert (row["episodes"], row["tokens"], row["forks"], row["lost_turns"], row["broken"]) == (16, 160, 2, 1, 1)
    assert row["trained"] == pytest.approx((40 + 60) / 160) and row["reward"] == pytest.approx((0.25 + 3 * 0.5) / 4)
    assert (row["stop_reasons"], row["error"]) == ({"done": 6, "turns": 2}, "s3: it fell")
    assert row["sub_agents"] == {"done": 2}
    assert [turn["tokens"] for turn in row["by_turn"]] == [20, 30]
    assert [turn["logprob_gap"] for turn in row["by_turn"]] == [pytest.approx(1e-6), pytest.approx(2e-6)]
    assert episode_rows([StepRecord(step=1)]) == {}
    nobody = episode_rows(records(audit(1, reward=None, tokens=0, episodes=1, by_turn=())))["maze"]
    assert (nobody["reward"], nobody["trained"], nobody["by_turn"]) == (None, None, [])


def test_steps_without_a_reward_count_as_zero_where_others_have_one() -> None:
    steps = records(audit(0, reward=None), audit(2), audit(0, reward=None))
    assert episode_rows(steps)["maze"]["reward"] == pytest.approx(0.5 / 3)
    assert episode_curves([[one] for one in steps])["episode_reward"] == {"maze": [0.0, 0.5, 0.0]}
    assert episode_curves([steps[:1], steps[2:]])["episode_reward"] == {"maze": [None, None]}, "a domain without any"


def test_the_audit_is_in_the_json_and_on_the_page(run_dir: Path) -> None:
    text, page = written(add_agents(run_dir, FAMILY))
    report = json.loads((run_dir / "report.json").read_text())
    assert report["episodes"]["letters"]["trained"] == 1.0 and report["episodes"]["letters"]["episodes"] == 16
    assert (
        report["curves"]["episode_reward"]["letters"] == [0.25, 0.5, 0.75, 1.0]
        and "sums" not in report["curves"]["episode_turns"]
    )
    assert {f"plot-agents-{key}" for key in ("reward", "turns", "loss", "logprob_gap")} <= set(page.ids())
    assert "done 12, turns 4" in text and "100.0 %" in text


def test_the_audit_as_a_table() -> None:
    report = {"episodes": episode_rows(records(audit(1), audit(2, forks=3)))}
    assert agent_rows(report) == [("maze", "8", "2.0", "0.375", "100 %", "3", "0", "0", "2.0e-06")]
    nobody = {"episodes": episode_rows(records(audit(1, reward=None, tokens=0, by_turn=())))}
    assert agent_rows(nobody) == [("maze", "4", "2.0", "-", "-", "0", "0", "0", "-")] and agent_rows({}) == []


@pytest.mark.usefixtures("no_plots")
def test_a_run_without_agents_has_neither(run_dir: Path) -> None:
    _, page = written(run_dir)
    report = json.loads((run_dir / "report.json").read_text())
    assert (
        not {"agents", "traces"} & set(page.ids())
        and "episodes" not in report
        and "episode_reward" not in report["curves"]
    )


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page without its plots, those of agents among them."""
    from opd.report import page

    sections = ("gains", "learning", "time", "matrix", "baselines", "agents")
    monkeypatch.setattr(page, "_section_plots", lambda report, run: {key: [] for key in sections})


@pytest.mark.usefixtures("sections")
def test_an_episode_turn_by_turn(run_dir: Path) -> None:
    text, _ = written(add_agents(run_dir, FAMILY))
    shown = text[text.index('<section id="traces">') :]
    assert "letters, step 4: best, first, reward 1, done after 5 turns" in shown
    assert "letters, step 1: first, turns after 1 turn<" in shown and shown.count("<details") - 2 == 2
    assert '<span class="loss0" title="0.01">left</span><span class="loss5" title="2.5">&lt;|end|&gt;</span>' in shown
    assert '<span class="no-loss">kept</span>' in shown and "<span>forked</span>" in shown
    assert "⏎" in shown and "a wall " in shown
    titles = [
        "000004/letters/0: main, goes on in 000004/letters/0+2",
        "000004/letters/0+1: sub-agent of 000004/letters/0, scored by the expert of sums",
        "000004/letters/0+2: summary of 000004/letters/0",
        "000004/letters/0+3: fork of 000004/letters/0",
    ]
    assert [title in shown for title in titles] == [True] * 4
    assert shown.count(">copied<br>") == 2 and shown.count(">prompt<br>") == 3
    assert shown.count("margin-left: 1.2rem") == 3


@pytest.mark.usefixtures("sections")
def test_what_environments_write_stays_text_and_is_cut(run_dir: Path) -> None:
    hostile = HOSTILE.replace("\ud800", "")
    trace = episode(
        segment(wrote(hostile, hostile), saw(hostile + "wall " * 2_000_000), prompt=hostile), stop_reason="observation"
    )
    text, page = written(add_agents(run_dir, trace, episode(segment(saw(hostile)), why=("worst",))))
    assert [tag for tag, _ in page.elements].count("script") == 1 and "title='owned'</script>" not in text
    assert "1 more episodes did not fit here" in text and len(text) < 1_000_000
    assert "\\x1b[31m\\u202eabc" in text
    assert MOST_CHARACTERS < 5_000_000


@pytest.mark.usefixtures("sections")
def test_many_long_episodes_do_not_blow_the_page_up(run_dir: Path) -> None:
    long = [episode(segment(wrote(*["token"] * 2000)), why=("longest",), episode=f"e{n}") for n in range(40)]
    text, _ = written(add_agents(run_dir, *long))
    assert len(text) < MOST_CHARACTERS + 500_000 and "more episodes did not fit here" in text


@pytest.mark.usefixtures("sections")
def test_turns_that_an_expert_wrote(run_dir: Path) -> None:
    trace = episode(
        segment(wrote("guided", origin="teacher", losses=()), saw("a wall"), wrote("taught", origin="taught"))
    )
    assert (trace.sampled, trace.trained) == (0, 0)
    text, _ = written(add_agents(run_dir, trace))
    assert '<span class="no-loss">guided</span>' in text and '<span class="loss0" title="0.0">taught</span>' in text
    assert text.count(", the expert<br>") == 2


def test_the_colour_of_a_loss() -> None:
    assert [loss_level(loss) for loss in (None, -1.0, 0.0, 0.05, 0.49, 0.5, 1.99, 2.0, 99.0)] == [
        -1,
        0,
        0,
        1,
        2,
        3,
        4,
        5,
        5,
    ]


def test_what_an_environment_said_is_nowhere_trained_on(run_dir: Path) -> None:
    add_agents(run_dir)
    lines = [
        json.loads(line) | {"response_tokens": 5000} for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text, _ = written(run_dir)
    report = json.loads((run_dir / "report.json").read_text())
    assert report["curves"]["tokens"] == [24, 48, 72, 96]
    assert [point["tokens"] for point in report["evaluations"]] == [0, 48, 96]
    assert "<b>96 tokens</b>" in text and 'data-value="96">96</td>' in text
    assert baseline_rows(report)[0][:3] == ("this merge", "1", "96")


def test_a_damaged_file_of_episodes_is_told(run_dir: Path) -> None:
    from opd.errors import RunDirError

    (add_agents(run_dir) / "traces" / "step-000004.json").write_text("{}")
    with pytest.raises(RunDirError, match=r"step-000004.json(?s:.*)move the file away"):
        write_report(run_dir)
