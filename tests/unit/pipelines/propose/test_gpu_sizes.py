"""The proposal of `opd init` for GPUs has room for a student of 7 billion parameters, and README.md shows it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd.config import PipelineConfig, load_pipeline
from pipelines.catalog import find_pipeline
from pipelines.plan.models import read_models
from pipelines.propose.sizes import choose_sizes
from pipelines.sizing.auto import choose_numbers
from pipelines.sizing.gpu_memory import fits_machine, memory_rooms
from pipelines.sizing.machine import MachineFacts
from pipelines.sizing.models import MergeModels
from pipelines.sizing.shrink import apply_change, shrink_to_fit

GIB = 1 << 30
README = Path(__file__).parents[4] / "README.md"
SHIPPED = load_pipeline(find_pipeline("merge-7b"))
ADAPTED = {"student": {"model": str(SHIPPED.student.model), "lora": {"r": 16, "alpha": 32}}}


def machine(cards: int) -> MachineFacts:
    return MachineFacts(cores=16 * cards, memory=256 * cards * GIB, gpus=(80 * GIB,) * cards)


def proposal(cards: int) -> dict[str, Any]:
    """A pipeline for ten adapters of a 7B student, before it is made to fit."""
    shipped = SHIPPED.model_dump(mode="json", exclude_unset=True)
    data = {key: shipped[key] for key in ("name", "student", "experts", "domains")}
    data["student"].pop("lora", None)
    data["rollout"] = {"max_new_tokens": 2048, "max_model_len": 4096}
    return apply_change(data, choose_sizes(7_615_616_512, 10, machine(cards)))


def models_of(data: dict[str, Any]) -> MergeModels:
    return read_models(PipelineConfig.model_validate(data)).merge


def test_the_readme_shows_what_is_written_for_eight_gpus_and_it_fits() -> None:
    data = proposal(8)
    (block,) = re.findall(r"```yaml\n(rollout.*?)```", README.read_text(encoding="utf-8"), re.S)
    for section, keys in yaml.safe_load(block).items():
        assert {key: data[section][key] for key in keys} == keys
    models = models_of(data)
    config = choose_numbers(PipelineConfig.model_validate(data), models, machine(8))
    assert fits_machine(config, models, machine(8))
    (rank,) = (room for room in memory_rooms(config, models, machine(8)) if room.what == "trainer rank")
    assert f"{rank.needed / GIB:.0f} of 80 GiB" in README.read_text(encoding="utf-8")
    assert config.objective.chunk == 1024 and config.trainer.gradient_checkpointing


@pytest.mark.parametrize("cards", [1, 2])
def test_few_cards_train_adapters_and_nothing_else_is_made_smaller(cards: int) -> None:
    full = models_of(proposal(cards))
    adapted = models_of(proposal(cards) | ADAPTED)

    def fits(data: dict[str, Any]) -> bool:
        models = adapted if "lora" in data["student"] else replace(full, lora=None)
        return fits_machine(
            choose_numbers(PipelineConfig.model_validate(data), models, machine(cards)), models, machine(cards)
        )

    data, measures, fit = shrink_to_fit(proposal(cards), fits, gpus=True)
    assert fit and measures == ["adapters in place of all weights"]
    assert "micro_batch_tokens" not in data["trainer"]
