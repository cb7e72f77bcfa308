"""An agent's program that cannot be used is refused before any compute, and says how it can be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ConfigError, ModelError
from opd.rollouts.endpoint.options import AgentOptions
from pipelines.inputs.environments import episode_options
from pipelines.inputs.read import read_inputs


@pytest.fixture
def acting(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pipeline's first domain has an agent."""
    (world.root / "agent.py").write_text("pass\n")
    monkeypatch.chdir(world.root)
    world.data["domains"]["reverse"]["agent"] = {"command": ["python", "agent.py", "--quick"], "render": "text"}
    return world


def test_every_key_reaches_the_program(acting: Any) -> None:
    keys = {
        "env": {"A": "b"}, "inherit": ["HOME"], "metadata": ["n"], "verifier": "numeric", "timeout_s": 9, "parallel": 3,
        "max_calls": 5, "max_tokens": 77, "max_broken": 0.25,
    }  # fmt: skip
    acting.data["domains"]["reverse"]["agent"] |= keys
    config = load_pipeline(acting.write())
    (options,) = episode_options(config).values()
    assert isinstance(options, AgentOptions)
    assert options.command == ("python", str(acting.root / "agent.py"), "--quick"), "it runs in another directory"
    assert {name: getattr(options, name) for name in keys} == keys | {"inherit": ("HOME",), "metadata": ("n",)}
    assert options.max_turn_tokens == config.rollout.max_new_tokens


def test_a_pipeline_with_an_agent(acting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    inputs = read_inputs(load_pipeline(acting.write()))
    assert Path(sys.executable).name.startswith("python"), "which is the `python` that is found without any PATH"
    assert str(inputs.prompts["reverse"][0].text).startswith("rev ")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"command": ["no-such-agent"]}, ["domains.reverse.agent.command", "'no-such-agent', which is no program"]),
        ({"command": ["./agent.py"]}, ["which is no program", "make the file executable"]),
        ({"env": {"PATH": "/nowhere"}}, ["'python', which is no program"]),
        ({"command": []}, ["domains.reverse.agent.command"]),
        ({"command": "python agent.py"}, ["domains.reverse.agent.command"]),
        ({"env": {"OPENAI_API_KEY": "k"}}, ["domains.reverse.agent.env", "other names than OPENAI_BASE_URL"]),
        ({"timeout_s": 3600}, ["domains.reverse.agent.timeout_s", "less than cluster.phase_timeout_s, 3600"]),
        ({"inherit": ["A-B"]}, ["domains.reverse.agent.inherit"]),
        ({"max_turns": 3}, ["domains.reverse.agent", "max_turns"]),
    ],
)
def test_what_cannot_be_used_is_refused(changes: dict[str, Any], told: list[str], acting: Any) -> None:
    acting.data["domains"]["reverse"]["agent"] |= changes
    with pytest.raises(ConfigError) as caught:
        read_inputs(load_pipeline(acting.write()))
    assert all(part in str(caught.value) for part in told), caught.value


def test_an_environment_and_an_agent(acting: Any) -> None:
    acting.data["domains"]["reverse"]["environment"] = {"name": "mazes:Maze"}
    with pytest.raises(ConfigError, match="either `environment` or `agent`"):
        load_pipeline(acting.write())


def test_a_chat_template_that_cannot_append_is_refused_whatever_the_prompts_are(acting: Any) -> None:
    del acting.data["domains"]["reverse"]["agent"]["render"]
    with pytest.raises(ModelError, match="changes what stands before a turn") as caught:
        read_inputs(load_pipeline(acting.write()))
    assert "set agent.render to text" in str(caught.value)
