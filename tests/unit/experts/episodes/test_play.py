"""Episodes that a solver plays: every row is what the environment says, and mistakes are read but not learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import app
from experts.episodes.encode import EpisodeEncoder
from experts.episodes.play import PlaySettings, play_tasks
from experts.episodes.rows import has_episodes, read_episode, read_episodes
from experts.suites import DOMAINS, SUITES, write_suite
from experts.suites.letters import build_tokenizer
from opd.environments import ENVIRONMENTS, find_environment
from opd.errors import ConfigError
from opd.prompts import read_prompt_lines
from opd.records.environments import Action, Outcome
from tests.chatml import CHATML, WITH_TOOLS, chat_tokenizer
from tests.spoken import spoken

GAMES = ["hanoi", "maze", "sorting", "number", "calculator"]


def said(row: Mapping[str, Any]) -> list[str]:
    return [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]


def rows_of(name: str, num: int = 20, **play: Any) -> list[dict[str, Any]]:
    return play_tasks(name, find_environment(name, "here").tasks(num, 3), PlaySettings(**play))


@pytest.mark.parametrize("name", GAMES)
def test_every_turn_of_weight_1_is_the_solvers_and_no_other(name: str) -> None:
    wrong = total = 0
    for row in rows_of(name):
        environment = find_environment(name, "here")()
        environment.reset(row["metadata"], 0)
        for turn in row["messages"]:
            if turn["role"] != "assistant":
                continue
            right = environment.solve()
            assert (turn["content"] == right.text) == (turn["weight"] == 1)
            calls = right.calls if turn["weight"] else ()
            if name == "calculator" and turn["content"].startswith("calculate") and not calls:
                break  # a mistaken call: the next right action does not depend on its result
            environment.step(Action(text=turn["content"], calls=calls))
            wrong, total = wrong + (turn["weight"] == 0), total + 1
    assert 0.1 < wrong / total < 0.4


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("form", ["characters", "chat"])
def test_a_rollout_of_the_same_turns_has_the_same_tokens(name: str, form: str) -> None:
    """The real environment through the real runner: its observations are those of the row, to the token."""
    tokenizer = build_tokenizer() if form == "characters" else chat_tokenizer(WITH_TOOLS)
    environment = find_environment(name, "here")
    tools = {"tools": [tool.schema() for tool in environment.tools]}
    encoder = EpisodeEncoder(tokenizer)
    for row in play_tasks(name, environment.tasks(10, 0, form=form), PlaySettings(mistakes=0.4)):
        ids, learned = encoder.encode(read_episode(row | tools))
        found = spoken(tokenizer, ENVIRONMENTS[name], row, said(row))
        (rollout,) = found.rollouts
        assert ids == [*rollout.prompt_ids, *rollout.response_ids]
        sampled = [False] * len(rollout.prompt_ids) + list(rollout.loss_mask)
        assert all(mine <= theirs for mine, theirs in zip(learned, sampled, strict=True))
        assert (
            (found.stop_reason, found.reward) == ("done", 1.0)
            or len(said(row)) == PlaySettings().max_turns
            or found.reward == 0
        )
        assert tokenizer.unk_token_id not in ids, "the alphabet has every sign"


def test_without_mistakes_an_episode_is_the_solution() -> None:
    for row in rows_of("hanoi", num=20, mistakes=0.0):
        assert " ".join(said(row)) == row["answer"]
        assert all(turn["weight"] == 1 for turn in row["messages"] if turn["role"] == "assistant")


def test_mistakes_lead_off_the_way_and_some_cannot_be_done() -> None:
    rows = rows_of("maze", num=60)
    seen = [turn["content"] for row in rows for turn in row["messages"] if turn["role"] == "user"]
    assert any(text.startswith("no, ") for text in seen)
    assert sum(len(said(row)) > row["metadata"]["moves"] for row in rows) > 30
    assert rows == rows_of("maze", num=60), "the same rows again"
    assert rows != rows_of("maze", num=60, seed=1)


def test_an_episode_that_mistakes_would_spend_on_nothing_is_played_right() -> None:
    rows = play_tasks("calculator", find_environment("calculator", "here").tasks(40, 0), PlaySettings(mistakes=0.95))
    assert all(any(turn.get("weight") for turn in row["messages"]) for row in rows)


class Unsolved:
    """An environment without a solver."""

    tools = ()

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        return ""

    def step(self, action: Action) -> Outcome:
        return Outcome(done=True)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "play", "says"),
    [
        (f"{__name__}:Unsolved", PlaySettings(), "no method `solve`"),
        ("hanio", PlaySettings(), "did you mean `hanoi`"),
        ("hanoi", PlaySettings(mistakes=1.0), "a share of mistakes from 0 to below 1"),
        ("hanoi", PlaySettings(max_turns=0), "max_turns 0"),
    ],
)
def test_what_cannot_be_played_is_refused(name: str, play: PlaySettings, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        play_tasks(name, [], play)


# The suite


def test_the_suite_keeps_exams_apart_and_repeats_tasks_of_small_domains(tmp_path: Path) -> None:
    written = write_suite("agents", tmp_path, train=300, eval=40, seed=0)
    assert list(written) == list(DOMAINS["agents"])
    for domain, paths in written.items():
        train, held_out = (read_prompt_lines(paths[kind]) for kind in ("train", "eval"))
        assert (len(train), len(held_out)) == (300, 40)
        asked = {str(line.prompt) for line in held_out}
        assert len(asked) == 40 and not asked & {str(line.prompt) for line in train}, domain
    rows = SUITES["agents"].make_rows("hanoi", 340, 0)
    assert len({row["prompt"] for row in rows}) < 300, "there are only so many states"
    again = [row["messages"] for row in rows if row["prompt"] == rows[100]["prompt"]]
    assert len(again) > 1 and again[0] != again[1], "a task that comes again is played another way"
    with pytest.raises(ConfigError, match="prompts on both sides"):
        write_suite("agents", tmp_path, domains=["hanoi"], train=300, eval=150, seed=0)


def test_a_domain_in_chat_has_another_prompt() -> None:
    (row,) = play_tasks("maze", find_environment("maze", "here").tasks(1, 0, form="chat"), PlaySettings())
    ids, _ = EpisodeEncoder(chat_tokenizer(CHATML)).encode(read_episode(row))
    text = chat_tokenizer(CHATML).decode(ids)
    assert text.startswith("<|im_start|>user\nYou walk through a maze.") and text.endswith("<|im_end|>")


def test_the_command_writes_episodes_that_an_expert_can_learn(tmp_path: Path) -> None:
    output = tmp_path / "new" / "maze.jsonl"
    asked = ["environments", "episodes", "maze", "--n", "5", "--seed", "3", "--mistakes", "0.2", "--set", "mazes=2"]
    done = CliRunner().invoke(app, [*asked, "--output", str(output)])
    assert (done.exit_code, done.output) == (0, f"maze: 5 episodes in {output}\n")
    rows = play_tasks("maze", find_environment("maze", "here").tasks(5, 3, mazes=2), PlaySettings(mistakes=0.2, seed=3))
    assert has_episodes(output) and read_episodes(output) == [read_episode(row) for row in rows]
    done = CliRunner().invoke(app, [*asked[:3], "--mistakes", "2", "--output", str(tmp_path / "no.jsonl")])
    assert done.exit_code == 2 and "a share of mistakes" in done.output and not (tmp_path / "no.jsonl").exists()
