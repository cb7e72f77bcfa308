"""An environment that cannot be used is refused before any compute, and says how it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.environments.sorting import Sorting
from opd.errors import ConfigError, ModelError, PromptError
from opd.rollouts.episodes.spec import EpisodeOptions
from pipelines.inputs.environments import episode_options
from pipelines.inputs.prompts import load_training
from pipelines.inputs.read import load_tokenizer, read_inputs
from tests.tool_templates import ODD

WORLD = """
from opd.records.environments import Outcome, Tool

class Maze:
    tools = ()
    def __init__(self, width=3):
        if width > 9:
            raise ValueError("a maze is at most 9 wide")
    def reset(self, metadata, seed):
        return ""
    def step(self, action):
        return Outcome(done=True)
    def close(self):
        pass

class Slow(Maze):
    def close(self):
        import time
        time.sleep(5)

class Odd(Maze):
    tools = ["look"]

class Looking(Maze):
    tools = (Tool(name="look", description="Look around."),)

class NoTools:
    close = Maze.close
"""


@pytest.fixture
def acting(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pipeline's first domain has an environment."""
    (world.root / "mazes.py").write_text(WORLD)
    monkeypatch.chdir(world.root)
    monkeypatch.syspath_prepend(str(world.root))
    world.data["domains"]["reverse"]["environment"] = {"name": "mazes:Maze", "options": {"width": 5}, "max_turns": 7}
    return world


def test_a_pipeline_with_an_environment(acting: Any) -> None:
    config = load_pipeline(acting.write())
    (options,) = episode_options(config).values()
    assert (options.environment, options.options, options.max_turns) == ("mazes:Maze", {"width": 5}, 7)
    assert options.max_turn_tokens == config.rollout.max_new_tokens
    prompt = read_inputs(config).prompts["reverse"][0]
    assert isinstance(prompt.text, str) and prompt.text.startswith("rev ")


def test_tools_of_a_row_are_not_read_where_the_environment_has_them(acting: Any) -> None:
    tool = {"type": "function", "function": {"name": "fly", "parameters": {}}}
    asks = [{"role": "user", "content": "rev abc"}]
    rows = [{"prompt": asks, "tools": [tool], "system": "Be brief."} for _ in range(3)]
    (acting.root / "reverse.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    acting.data["student"]["chat_template_kwargs"] = {"message": 1}
    config = load_pipeline(acting.write())
    (options,) = episode_options(config).values()
    assert options.chat_template_kwargs == {"message": 1}
    prompts: list[str] = []
    table = load_training(
        config, {"reverse": acting.root / "reverse.jsonl"}, load_tokenizer(acting.root / "base"), prompts.append
    )
    assert table["reverse"][0].text == [{"role": "system", "content": "Be brief."}, *asks]
    assert any("columns that are not read: tools" in told for told in prompts)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "mazes:Nothing"}, ["domains.reverse.environment.name", "no `Nothing` in mazes"]),
        ({"name": "nowhere:Maze"}, ["domains.reverse.environment.name", "no module `nowhere`"]),
        ({"name": "labyrinth"}, ["domains.reverse.environment.name", "labyrinth", "module:Class"]),
        ({"options": {"width": 10}}, ["domains.reverse.environment.options", "a maze is at most 9 wide"]),
        ({"options": {"height": 1}}, ["domains.reverse.environment.options", "unexpected keyword argument 'height'"]),
        ({"name": "mazes:Slow", "options": {}, "step_timeout_s": 1}, ["close was not back after 1 s", "step_timeout_s"]),
        ({"name": "mazes:Odd", "options": {}}, ["tools = ['look']", "opd.records.environments.Tool"]),
        ({"name": "mazes:NoTools", "options": {}}, ["no attribute 'tools'"]),
        ({"name": "a maze"}, ["domains.reverse.environment.name"]),
        ({"max_turns": 0}, ["domains.reverse.environment.max_turns"]),
        ({"turns": 3}, ["did you mean `max_turns`?"]),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(changes: dict[str, Any], told: list[str], acting: Any) -> None:
    acting.data["domains"]["reverse"]["environment"] |= changes
    with pytest.raises(ConfigError) as caught:
        read_inputs(load_pipeline(acting.write()))
    assert all(part in str(caught.value) for part in told), caught.value


def test_prompts_that_are_made_for_another_environment(acting: Any) -> None:
    domain = acting.data["domains"]["reverse"]
    domain["environment"] = {"name": "sorting"}
    with pytest.raises(PromptError) as caught:
        read_inputs(load_pipeline(acting.write()))
    assert all(
        word in str(caught.value) for word in ("reverse.jsonl", "reset: ", "KeyError: 'game'", "opd environments tasks")
    )

    good = [json.dumps(row) for row in Sorting.tasks(6, seed=0)]
    (acting.root / "tasks.jsonl").write_text("\n".join(good) + "\n")
    domain["prompts"] = "tasks.jsonl"
    acting.data["rollout"]["max_model_len"] = 64
    with pytest.raises(PromptError, match=r"domains\.reverse\.eval"):
        read_inputs(load_pipeline(acting.write()))
    domain.pop("eval")
    assert len(read_inputs(load_pipeline(acting.write())).prompts["reverse"]) == 6

    bad = json.dumps({"prompt": "rev a=", "metadata": {}})
    (acting.root / "tasks.jsonl").write_text("\n".join([bad, *good]) + "\n")
    read_inputs(load_pipeline(acting.write()))  # one bad row breaks its own episode alone


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["python", "agnet.py"], "'agnet.py', which is no file"),
        (["bash", "run.sh", "--fast"], "'run.sh', which is no file"),
        (["python", "-m", "agent"], ""),
        (["python", "mazes.py"], ""),
    ],
)
def test_the_script_of_an_agent_is_there(command: list[str], told: str, acting: Any) -> None:
    domain = acting.data["domains"]["reverse"]
    del domain["environment"]
    domain["agent"] = {"command": command, "render": "text"}
    if not told:
        assert read_inputs(load_pipeline(acting.write()))
        return
    with pytest.raises(ConfigError, match=r"domains\.reverse\.agent\.command") as caught:
        read_inputs(load_pipeline(acting.write()))
    assert told in str(caught.value)


def rows(path: Path, prompts: list[Any]) -> str:
    path.write_text("".join(json.dumps({"prompt": p, "metadata": {"n": n}}) + "\n" for n, p in enumerate(prompts)))
    return str(path)


def test_a_chat_template_that_cannot_append_is_refused_where_prompts_are_messages(acting: Any) -> None:
    domain = acting.data["domains"]["reverse"]
    domain["prompts"] = rows(acting.root / "chat.jsonl", [[{"role": "user", "content": f"go {n}"}] for n in range(3)])
    with pytest.raises(ModelError, match="the student's chat template"):
        read_inputs(load_pipeline(acting.write()))


def test_calls_that_nobody_reads_are_refused_where_an_environment_has_tools(acting: Any) -> None:
    template = acting.root / acting.data["student"]["model"] / "chat_template.jinja"
    end = json.loads((template.parent / "tokenizer_config.json").read_text())["eos_token"]
    template.write_text(ODD.replace("<|im_end|>", end))
    acting.data["rollout"]["max_model_len"] = 400
    domain = acting.data["domains"]["reverse"]
    domain.pop("eval")
    domain["prompts"] = rows(acting.root / "chat.jsonl", [[{"role": "user", "content": f"go {n}"}] for n in range(3)])
    read_inputs(load_pipeline(acting.write()))  # without tools it serves
    domain["environment"]["name"] = "mazes:Looking"
    with pytest.raises(ModelError, match=r"student\.tool_call_parser") as caught:
        read_inputs(load_pipeline(acting.write()))
    assert "@look_up" in str(caught.value)
    acting.data["student"]["tool_call_parser"] = "pythonic"
    config = load_pipeline(acting.write())
    (options,) = episode_options(config).values()
    assert options.tool_call_parser == "pythonic" and read_inputs(config)


def test_a_parser_that_nobody_knows(acting: Any) -> None:
    acting.data["student"]["tool_call_parser"] = "glm-45"
    with pytest.raises(ConfigError, match=r"student\.tool_call_parser") as caught:
        load_pipeline(acting.write())
    assert "did you mean `glm45`" in str(caught.value) and "vLLM's --tool-call-parser" in str(caught.value)


def test_tasks_with_one_text_differ_by_their_metadata(acting: Any) -> None:
    domain = acting.data["domains"]["reverse"]
    domain["prompts"] = rows(acting.root / "train.jsonl", ["find the way out"] * 4)
    path = acting.root / "exam.jsonl"
    path.write_text(json.dumps({"prompt": "find the way out", "metadata": {"n": 9}}) + "\n")
    domain["eval"] = {"prompts": str(path)}
    assert len(read_inputs(load_pipeline(acting.write())).exams["reverse"].prompts) == 1
    rows(path, ["find the way out"])
    with pytest.raises(PromptError, match="1 of the 1 questions of reverse are training prompts of reverse"):
        read_inputs(load_pipeline(acting.write()))


def test_a_summary_that_could_come_too_late(acting: Any) -> None:
    environment = acting.data["domains"]["reverse"]["environment"]
    config = load_pipeline(acting.write())
    most = config.rollout.max_model_len - 2 * config.rollout.max_new_tokens
    environment["context"] = {"compact_at": most}
    config = load_pipeline(acting.write())
    (options,) = episode_options(config).values()
    assert isinstance(options, EpisodeOptions) and options.compaction is not None
    assert options.compaction.max_tokens == config.rollout.max_new_tokens
    read_inputs(config)
    environment["context"] = {"compact_at": most + 1}
    with pytest.raises(ConfigError) as error:
        read_inputs(load_pipeline(acting.write()))
    said = str(error.value)
    assert "domains.reverse.environment.context.compact_at" in said and f"at most {most}" in said and "lower it" in said


@pytest.mark.parametrize("resume", ["what happened", "{summary} and {summary}"])
def test_a_resume_without_one_place_for_the_summary(acting: Any, resume: str) -> None:
    acting.data["domains"]["reverse"]["environment"]["context"] = {"compact_at": 10, "resume": resume}
    with pytest.raises(ConfigError, match=r"context\.resume"):
        load_pipeline(acting.write())
