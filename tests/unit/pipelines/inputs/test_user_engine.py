"""A user's rollout engine that cannot do what a pipeline asks is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section
from pipelines.inputs.early_checks import refuse_at_once
from pipelines.inputs.read import read_inputs
from pipelines.inputs.user_engine import METHODS, refuse_unfit

NAME = "users_engines_of_a_test"
ENGINES = """
from opd.interfaces import RolloutEngine
class WithoutReceive:
    def generate(self, prompts, *, step, policy_version): ...
    def answer(self, prompts, *, n=1, temperature=0.0): ...
    def load(self, model_dir, restart_weights=None, base=None): ...
    def logprobs(self, token_ids): ...
    def wait_ready(self): ...
class Whole(WithoutReceive):
    def receive(self, send): ...
class Inherited(RolloutEngine):
    def wait_ready(self): ...
class Nothing:
    answer = 3
def made(spec, tokenizer):
    return Whole()
"""


@pytest.fixture
def pipeline(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pipeline with an engine of this name and other sections."""
    (Path.cwd() / f"{NAME}.py").write_text(ENGINES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)

    def make(engine: str, **sections: Any) -> PipelineConfig:
        data = world.data | {"rollout": world.data["rollout"] | {"engine": f"{NAME}:{engine}"}} | sections
        return validate_section(PipelineConfig, data, "p.yaml")

    return make


def test_the_methods_are_those_of_the_protocol() -> None:
    methods = {"generate", "answer", "load", "load_draft", "receive", "receive_directly", "logprobs", "wait_ready"}
    assert set(METHODS) == methods


@pytest.mark.parametrize("look", [refuse_at_once, read_inputs])
def test_an_engine_that_takes_no_weights_from_the_network(pipeline: Any, look: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        look(pipeline("WithoutReceive", sync={"kind": "network"}))
    message = str(refused.value)
    assert message.startswith(f"rollout.engine\n  found:  {NAME}:WithoutReceive without receive()\n"), message
    assert "sync.kind network" in message and "set sync.kind to shared_memory" in message


def test_an_engine_that_takes_no_weights_directly_from_the_trainer(pipeline: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_at_once(pipeline("Whole", sync={"kind": "direct"}))
    message = str(refused.value)
    assert message.startswith(f"rollout.engine\n  found:  {NAME}:Whole without receive_directly()\n"), message
    assert "sync.kind direct" in message and "set sync.kind to shared_memory" in message


def test_an_engine_that_takes_no_draft_is_refused_with_one_alone(pipeline: Any) -> None:
    config = pipeline("Whole")
    refuse_unfit(config)
    guessing = config.rollout.model_copy(update={"num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match=r"Whole without load_draft\(\)"):
        refuse_unfit(config.model_copy(update={"rollout": guessing}))


@pytest.mark.parametrize(("engine", "last"), [("Nothing", ", wait_ready()"), ("Inherited", "")])
def test_an_engine_without_methods_is_told_which(engine: str, last: str, pipeline: Any) -> None:
    """Also one whose methods are those of the protocol, which do nothing."""
    with pytest.raises(ConfigError) as refused:
        refuse_at_once(pipeline(engine))
    assert f"without generate(), answer(), load(), logprobs(){last}\n" in str(refused.value)


@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        ("WithoutReceive", {}),
        ("Whole", {"sync": {"kind": "network"}, "cluster": {"address": "auto"}}),
        ("made", {"sync": {"kind": "network"}}),
    ],
)
def test_engines_that_have_what_they_need(pipeline: Any, engine: str, sections: Any) -> None:
    refuse_at_once(pipeline(engine, **sections))


@pytest.mark.parametrize("look", [refuse_at_once, read_inputs])
def test_nobody_pushes_through_one_machines_memory_to_workers_that_may_be_anywhere(pipeline: Any, look: Any) -> None:
    """Before a cluster is asked: there is none here."""
    with pytest.raises(ConfigError) as refused:
        look(pipeline("Whole", cluster={"address": "auto"}))
    message = str(refused.value)
    assert message.startswith(f"sync.kind\n  found:  shared_memory, with rollout.engine {NAME}:Whole and cluster."), (
        message
    )
    assert "set sync.kind to network" in message
