"""Sub-agents of a pipeline: what they become, and settings that are refused before any compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ConfigError
from opd.rollouts.episodes.spec import EpisodeOptions
from pipelines.inputs.environments import episode_options
from pipelines.inputs.read import read_inputs

WORLD = """
from opd.records.environments import Outcome, Tool

class Maze:
    tools = ()
    def __init__(self, width=3):
        pass
    def reset(self, metadata, seed):
        return ""
    def step(self, action):
        return Outcome(done=True)
    def close(self):
        pass

class Desk(Maze):
    tools = (Tool(name="look", description="Look."),)
"""


@pytest.fixture
def asking(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pipeline's first domain has a desk and a sub-agent that the second domain's expert scores."""
    (world.root / "desks.py").write_text(WORLD)
    monkeypatch.chdir(world.root)
    monkeypatch.syspath_prepend(str(world.root))
    world.data["domains"]["reverse"]["environment"] = {
        "name": "desks:Desk",
        "sub_agents": {"ask": {"description": "Writes in capitals.", "domain": "upper"}},
        "max_sub_agents": 3,
        "max_depth": 2,
    }
    return world


def agents_of(world: Any) -> Any:
    options = episode_options(load_pipeline(world.write()))["reverse"]
    assert isinstance(options, EpisodeOptions)
    return options.sub_agents


def test_what_a_sub_agent_becomes(asking: Any) -> None:
    found = agents_of(asking)
    assert (found.at_most, found.depth, found.domains) == (3, 2, {"upper"})
    ask = found.kinds["ask"]
    assert (ask.domain, ask.environment, ask.shares, ask.prompt) == ("upper", "", False, "{task}")
    (tool,) = found.tools
    assert (tool.name, tool.description, tool.parameters["required"]) == ("ask", "Writes in capitals.", ["task"])
    read_inputs(load_pipeline(asking.write()))


def test_an_environment_of_its_own_is_that_of_its_domain(asking: Any) -> None:
    section = asking.data["domains"]["reverse"]["environment"]["sub_agents"]
    asking.data["domains"]["upper"]["environment"] = {
        "name": "desks:Maze", "options": {"width": 4}, "step_timeout_s": 7,
    }  # fmt: skip
    section["ask"] |= {"environment": "domain"}
    section["look_up"] = {"description": "Looks.", "environment": "parent"}
    ask, look_up = agents_of(asking).kinds.values()
    assert (ask.environment, ask.options, ask.step_timeout_s) == ("desks:Maze", {"width": 4}, 7)
    assert (look_up.environment, look_up.shares, look_up.domain) == ("", True, "")
    read_inputs(load_pipeline(asking.write()))


def test_a_domain_without_sub_agents_is_as_before(asking: Any) -> None:
    del asking.data["domains"]["reverse"]["environment"]["sub_agents"]
    assert agents_of(asking) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"description": ""}, ["sub_agents.ask.description"]),
        ({"domain": "uper"}, ["sub_agents.ask.domain", "uper", "reverse, upper"]),
        ({"environment": "domain"}, ["sub_agents.ask.domain", "upper", "a domain with an environment", "reverse"]),
        ({"environment": "own"}, ["sub_agents.ask.environment"]),
        ({"prompt": "do it"}, ["sub_agents.ask.prompt", "{task}"]),
        ({"result": "{answer} {answer}"}, ["sub_agents.ask.result", "{answer}"]),
        ({"max_turns": 0}, ["sub_agents.ask.max_turns"]),
        ({"turns": 1}, ["did you mean `max_turns`?"]),
        ({"system": "You write."}, ["sub_agents.ask.system", "no chat messages", "sub_agents.ask.prompt"]),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(changes: dict[str, Any], told: list[str], asking: Any) -> None:
    asking.data["domains"]["reverse"]["environment"]["sub_agents"]["ask"] |= changes
    with pytest.raises(ConfigError) as caught:
        read_inputs(load_pipeline(asking.write()))
    assert all(part in str(caught.value) for part in ["domains.reverse.environment", *told]), caught.value


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sub_agents": {"look": {"description": "Looks."}}}, ["sub_agents.look", "same name", "none of look"]),
        ({"sub_agents": {"look up": {"description": "Looks."}}}, ["sub_agents", "look up"]),
        (
            {"name": "desks:Maze", "sub_agents": {"go": {"description": "Goes.", "environment": "parent"}}},
            ["sub_agents.go.environment", "desks:Maze has no tools", "none, or to domain"],
        ),
        ({"max_sub_agents": 0}, ["max_sub_agents"]),
        ({"max_depth": 0}, ["max_depth"]),
    ],
)
def test_sub_agents_that_do_not_fit_their_environment(changes: dict[str, Any], told: list[str], asking: Any) -> None:
    asking.data["domains"]["reverse"]["environment"] |= changes
    with pytest.raises(ConfigError) as caught:
        read_inputs(load_pipeline(asking.write()))
    assert all(part in str(caught.value) for part in told), caught.value


def test_a_system_message_that_the_template_refuses(asking: Any) -> None:
    prompts = asking.root / "chat.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"go {n}"}], "metadata": {"n": n}} for n in range(3)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    domain = asking.data["domains"]["reverse"]
    domain["prompts"] = str(prompts)
    domain["environment"]["sub_agents"]["ask"]["system"] = "You write."
    refuses = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{{ m['role'] + ': ' + m['content'] + '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    student = Path(asking.data["student"]["model"])
    (student / "chat_template.jinja").write_text(refuses)
    with pytest.raises(ConfigError, match=r"(?s)sub_agents\.ask\.system.*no system here"):
        read_inputs(load_pipeline(asking.write()))
