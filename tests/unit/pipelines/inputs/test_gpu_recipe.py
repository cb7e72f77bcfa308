"""The recipes of docs/gpu.md: pipelines that load, and that fit on the GPUs they are meant for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.config import PipelineConfig
from opd.settings.yaml_files import validate_section
from pipelines.catalog import find_pipeline
from pipelines.inputs.read import read_inputs
from pipelines.plan.plan import MergePlan, make_plan
from pipelines.plan.spec import ClusterSpec, load_spec
from pipelines.sizing import gpu_memory
from pipelines.sizing.gpu_memory import gpu_roles, place_roles, refuse_crowded_gpus

CARD = round(23.6 * 2**30)
"""Bytes of a card that is sold as one of 24 GB."""
PAGE = Path(__file__).parents[4] / "docs" / "gpu.md"


def recipes() -> dict[str, dict[str, Any]]:
    """Whole pipelines on the page, by name; other blocks show a section."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return {block["name"]: block for block in map(yaml.safe_load, blocks) if "name" in block}


def test_all_load() -> None:
    assert set(recipes()) == {"one-gpu", "one-card"}
    for recipe in recipes().values():
        config = validate_section(PipelineConfig, recipe, PAGE)
        assert config.rollout.sleep and config.trainer.ranks == 1


@pytest.mark.parametrize("name", ["one-gpu", "one-card"])
def test_each_is_one_gpu_and_fits_there(
    world: Any, make_adapter: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the tiny models in the place of its own, and their short context."""
    recipe = recipes()[name]
    kept = {key: world.data[key] for key in ("student", "experts", "domains")}
    if name == "one-card":
        for expert in world.data["experts"].values():
            make_adapter(world.root / f"{expert['domain']}-lora", world.root / "base")
            expert["model"] = f"{expert['domain']}-lora"
        kept["student"] |= {"lora": recipe["student"]["lora"]}
    recipe["rollout"] |= {"max_model_len": 64, "max_new_tokens": 8}
    config = validate_section(PipelineConfig, recipe | kept, PAGE)
    inputs = read_inputs(config)
    assert len(place_roles(gpu_roles(config, inputs))) == 1
    monkeypatch.setattr(gpu_memory, "gpu_sizes", lambda: [24 << 30])
    assert refuse_crowded_gpus(config, inputs) == []


def plan_on_one_card(**changes: Any) -> MergePlan:
    """Plan the recipe with a student of seven billion parameters and ten LoRA experts of it, on a card of 24 GB."""
    recipe, large = recipes()["one-card"], yaml.safe_load(find_pipeline("merge-7b").read_text(encoding="utf-8"))
    recipe["student"]["model"] = large["student"]["model"]
    recipe |= {key: large[key] for key in ("experts", "domains")}
    config = validate_section(PipelineConfig, recipe | {k: recipe[k] | v for k, v in changes.items()}, PAGE)
    spec = load_spec("8-gpus").model_dump() | {"placement": None}
    spec["machine"] = {"cores": 16, "memory": 64 << 30, "gpus": 1, "gpu_memory": CARD}
    return make_plan(config, ClusterSpec.model_validate(spec))


def test_seven_billion_and_ten_lora_experts_fit_on_a_card_of_24_gb() -> None:
    made = plan_on_one_card()
    assert made.experts == 10 and made.fits
    gib = {room.what: room.needed / 2**30 for room in made.room}
    card = gib["rollout engine (rollout.gpu_memory_utilization) + trainer rank"]
    page = PAGE.read_text(encoding="utf-8")
    assert f"| together | {card:.1f} |" in page
    assert f"and {gib['all machines, beside their GPUs']:.0f} GiB of the machine's memory" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"teachers": {"engine": "transformers"}, "cluster": {"rollout_gpus": 0.3, "teacher_gpus": 0.2}},
        {"trainer": {"deepspeed": {}}},
        {"rollout": {"sleep": False}},
    ],
    ids=["the base a second time", "the base on the card while the engine writes", "the engine beside the trainer"],
)
def test_each_part_of_the_recipe_is_needed(changes: dict[str, Any]) -> None:
    assert not plan_on_one_card(**changes).fits
