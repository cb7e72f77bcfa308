"""Teacher turns need an expert that can write, and room for it; a replay needs prefixes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.environments.maze import Maze
from opd.errors import ConfigError
from pipelines.inputs.drift import check_drift, drift_options
from pipelines.inputs.read import read_inputs
from pipelines.sizing.memory import estimate_memory


@pytest.fixture
def acting(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pipeline's first domain is played in an environment."""
    monkeypatch.chdir(world.root)
    for file, seed in (("mazes", 0), ("mazes-eval", 1)):
        rows = Maze.tasks(6, seed=seed, size=4, mazes=0)
        (world.root / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    world.data["domains"]["reverse"] |= {
        "prompts": "mazes.jsonl",
        "environment": {"name": "maze", "max_turns": 7},
        "eval": {"prompts": "mazes-eval.jsonl"},
    }
    world.data["rollout"]["max_model_len"] = 128
    return world


def test_an_expert_that_is_a_whole_model_writes(acting: Any) -> None:
    acting.data["domains"]["reverse"]["environment"]["teacher_turns"] = {"share": 0.5, "over_steps": 3}
    config = load_pipeline(acting.write())
    inputs = read_inputs(config)
    (drift,) = drift_options(config, inputs.routes).values()
    assert (
        drift.teacher_turns is not None
        and drift.teacher_turns.model_dir == inputs.routes["reverse"][0].teacher.model_dir
    )
    del acting.data["domains"]["reverse"]["environment"]["teacher_turns"]
    plain = load_pipeline(acting.write())
    both = (
        sum(need.nbytes for need in estimate_memory(given, inputs) if "rollout" in need.part)
        for given in (config, plain)
    )
    assert next(both) == 2 * next(both), "the expert has an engine of its own"


def test_an_expert_that_cannot_write_is_refused(acting: Any) -> None:
    acting.data["domains"]["reverse"]["environment"]["teacher_turns"] = {"share": 0.5, "over_steps": 3}
    config = load_pipeline(acting.write())
    inputs = read_inputs(config)
    first = inputs.routes["reverse"][0]
    lora = replace(first, teacher=replace(first.teacher, adapter_dir=Path("adapter")))
    with pytest.raises(ConfigError, match="a LoRA adapter, which the engine that writes cannot load"):
        check_drift(config, {**inputs.routes, "reverse": (lora,)}, inputs.prompts)
    acting.data["cluster"] = {"rollout_gpus": 1}
    with pytest.raises(ConfigError, match=r"at most 0\.45: student and expert each have an engine"):
        check_drift(load_pipeline(acting.write()), inputs.routes, inputs.prompts)


def test_a_replay_needs_prefixes(acting: Any) -> None:
    acting.data["domains"]["reverse"]["environment"]["replay"] = True
    with pytest.raises(ConfigError, match=r"whose first row has no metadata\.turn") as caught:
        read_inputs(load_pipeline(acting.write()))
    assert str(caught.value).startswith("domains.reverse.prompts\n") and "opd environments prefixes" in str(
        caught.value
    )
    rows = [{"prompt": f"maze {i}=", "metadata": {"turn": i}} for i in range(4)]
    (acting.root / "prefixes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    acting.data["domains"]["reverse"] |= {"prompts": "prefixes.jsonl"}
    assert len(read_inputs(load_pipeline(acting.write())).prompts["reverse"]) == 4
