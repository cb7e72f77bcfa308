"""`rollout.engine: transformers`: what it takes that vLLM refuses, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ConfigError, ModelError
from opd.records.types import Prompt, Rollout, RolloutBatch
from pipelines.check.measure import measure_speed
from pipelines.inputs.read import read_inputs, refuse_what_is_not_here
from tests.sparse_models import build_sparse_model_dir


@pytest.fixture
def sparse_world(world: Any, tmp_path: Path) -> Any:
    """The world of a merge, with models that vLLM's CPU build does not serve."""
    model = build_sparse_model_dir(tmp_path / "sparse", layers=2)
    world.data["student"]["model"] = str(model)
    for expert in world.data["experts"].values():
        expert["model"] = str(model)
    return world


def test_a_family_that_vllm_lacks_is_taken(sparse_world: Any) -> None:
    with pytest.raises(ModelError, match="no sparse attention") as refusal:
        read_inputs(load_pipeline(sparse_world.write()))
    assert "or set rollout.engine to transformers, which is slower" in str(refusal.value)
    sparse_world.data["rollout"]["engine"] = "transformers"
    read_inputs(load_pipeline(sparse_world.write()))


def test_a_student_may_share_more_indexers_than_its_experts(sparse_world: Any, tmp_path: Path) -> None:
    """So a merge can bring a student back to its experts after sharing."""
    shared = build_sparse_model_dir(tmp_path / "shared", layers=2, indexer_types=["full", "shared"])
    sparse_world.data["student"]["model"] = str(shared)
    sparse_world.data["rollout"]["engine"] = "transformers"
    inputs = read_inputs(load_pipeline(sparse_world.write()))
    assert inputs.student.parameters < inputs.experts["rev"].info.parameters


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("rollout", "engine_args", {"swap_space": 1}, "only vLLM obeys it"),
        ("rollout", "tensor_parallel_size", 2, "only vLLM obeys it"),
        ("sync", "kind", "direct", "direct with rollout.engine transformers"),
    ],
)
def test_what_only_vllm_can_do_is_refused(world: Any, section: str, key: str, value: Any, message: str) -> None:
    world.data.setdefault("rollout", {})["engine"] = "transformers"
    world.data.setdefault(section, {})[key] = value
    if value in (2, "direct"):
        world.data["cluster"] = {"rollout_gpus": 1, "trainer_gpus": 1}
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        refuse_what_is_not_here(load_pipeline(world.write()))
    assert str(refusal.value).startswith(f"{section}.{key}")


def test_episodes_are_refused(world: Any) -> None:
    world.data.setdefault("rollout", {})["engine"] = "transformers"
    name = next(iter(world.data["domains"]))
    world.data["domains"][name]["environment"] = {"name": "sorting"}
    with pytest.raises(ConfigError, match="only vLLM plays episodes"):
        refuse_what_is_not_here(load_pipeline(world.write()))


def test_a_check_says_how_slow_it_is(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def generate(self, prompts: list[Prompt], *, step: int, policy_version: int) -> RolloutBatch:
            rollouts: list[Rollout] = [
                Rollout.from_tokens(prompt.id, prompt.token_ids, (5, 6), prompt.domain) for prompt in prompts
            ]
            return RolloutBatch(rollouts=tuple(rollouts), quarantined=())

    world.data.setdefault("rollout", {})
    seconds = iter([0.0, 2.0])
    monkeypatch.setattr("pipelines.check.measure.time.monotonic", lambda: next(seconds))
    for engine, levels in (("vllm", []), ("transformers", ["warn"])):
        world.data["rollout"]["engine"] = engine
        config = load_pipeline(world.write())
        found = list(measure_speed(config, read_inputs(config), Engine()))  # type: ignore[arg-type]
        assert [finding.level for finding in found] == levels
    assert re.search(r"rollout.engine transformers wrote \d+ tokens/s: the \d+ responses of a step", found[0].message)
