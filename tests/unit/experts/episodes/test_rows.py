"""Rows that hold an episode: what is read, and what is refused by line and message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experts.episodes.rows import has_episodes, is_learned, read_episodes
from experts.registry import Registry
from experts.spec import ExpertsSpec
from experts.train import train_experts
from opd.config.prompts import FilterConfig, PromptsConfig
from opd.errors import PromptError
from opd.settings.yaml_files import validate_section

SAYS = {"role": "assistant", "content": "N"}
SEES = {"role": "user", "content": "b3:"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_episode_is_split_into_observations_and_turns(tmp_path: Path) -> None:
    wrong = SAYS | {"weight": 0}
    path = write(tmp_path / "p.jsonl", {"prompt": "maze", "messages": [SEES, wrong, SEES, SAYS, SEES], "id": 7})
    assert has_episodes(path)
    (row,) = read_episodes(path)
    assert (row.prompt, row.observations, row.turns) == ("maze", ((SEES,), (SEES,)), (wrong, SAYS))
    assert [is_learned(turn) for turn in row.turns] == [False, True]
    assert row.asks and row.tools == ()


def test_rows_with_a_completion_are_prompts_whatever_else_they_have(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b", "messages": [SAYS]}
    assert not has_episodes(write(tmp_path / "p.jsonl", row))


def test_a_pipeline_says_which_rows_and_columns_are_meant(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "kind": 1}, {"prompt": "a", "kind": 2, "messages": [SAYS]})
    assert not has_episodes(path)
    assert has_episodes(PromptsConfig(path=path, filter=FilterConfig(column="kind", equals=2)))
    whole = write(tmp_path / "q.jsonl", {"prompt": "a", "said": "b", "messages": [SAYS]})
    assert has_episodes(PromptsConfig(path=whole))
    assert not has_episodes(PromptsConfig(path=whole, columns={"completion": "said"}))
    assert not has_episodes(PromptsConfig(path=whole, columns={"prompt": "messages"})), "the conversation is the prompt"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "completion": "b"}, "no list `messages`"),
        ({"prompt": "a", "messages": "b"}, "no list `messages`"),
        ({"prompt": "a", "messages": [SEES, "b"]}, "message 2: 'b'"),
        ({"prompt": "a", "messages": [{"role": "user"}]}, "message 1: `content` is no text: None"),
        ({"prompt": "a", "messages": [SAYS | {"weight": 0.5}]}, "message 1: the `weight` 0.5, wanted 0 or 1"),
        ({"prompt": "a", "messages": [SAYS | {"weight": True}]}, "message 1: the `weight` True"),
        ({"prompt": "a", "messages": [SEES | {"weight": 1}, SAYS]}, "message 1: a `weight`, but the role is 'user'"),
        ({"prompt": "a", "messages": [SAYS | {"tool_calls": [{}]}]}, "message 1: a call beside the text"),
        ({"prompt": "a", "messages": [SAYS | {"weight": 0}]}, "no turn of the assistant with weight 1"),
        ({"prompt": "a", "messages": [SAYS, SAYS]}, "nothing between two turns"),
        ({"prompt": "a", "messages": [SAYS, SEES, SEES, SAYS]}, "user and user between two turns"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}, SAYS]}, "begin with the prompt once more"),
        ({"prompt": 3, "messages": [SAYS]}, "column `prompt"),
        ({"prompt": "a", "messages": [SAYS], "tools": [{"name": "add"}]}, "the tool {'name': 'add'}"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, row: Any, says: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "maze", "messages": [SAYS]}, row)
    with pytest.raises(PromptError) as caught:
        read_episodes(path)
    assert f"{path}:2" in str(caught.value) and says in str(caught.value)


def test_an_expert_learns_episodes_and_is_registered_with_those_that_ask(tmp_path: Path) -> None:
    talk = [SEES, SAYS, SEES, SAYS | {"content": "S"}]
    files = {
        "asks": write(tmp_path / "asks.jsonl", *[{"prompt": "maze\n", "messages": talk}] * 4),
        "told": write(tmp_path / "told.jsonl", *[{"messages": talk}] * 4),
    }
    raw = {
        "output_dir": str(tmp_path / "models"),
        "base": {
            "from_scratch": {
                "tokenizer": "letters",
                "hidden_size": 32,
                "layers": 1,
                "heads": 1,
                "intermediate_size": 64,
            }
        },
        "train": {"max_steps": 20, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "max_length": 32},
        "experts": {name: {"domain": name, "data": str(path)} for name, path in files.items()},
        "registry": str(tmp_path / "registry"),
    }
    lines: list[str] = []
    train_experts(validate_section(ExpertsSpec, raw, "spec.yaml"), lines.append)
    for name in files:
        losses = [float(line.split("loss ")[1].split(" ")[0]) for line in lines if line.startswith(f"{name}: step")]
        assert losses[-1] < losses[0] / 2
    found = Registry(tmp_path / "registry")
    assert found.get("asks").prompts == str(files["asks"].resolve())
    assert found.get("told").prompts is None, "a merge cannot read rows without a prompt"
