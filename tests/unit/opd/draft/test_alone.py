"""A draft that learns from a frozen model learns what it learns beside a student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.draft.alone import FrozenModel, measure_draft, train_draft
from tests.unit.opd.draft.test_companion import SPEC, load_student, make_rollouts, show, start


def test_a_frozen_models_states_are_those_of_a_student(tiny_model_dir: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    frozen = FrozenModel(model, SPEC.read_layers)
    [known] = frozen.read_batches(make_rollouts(), 16)
    numbers = measure_draft(frozen, SPEC.start(_options(), 0, frozen, torch.device("cpu")), [known])
    student = load_student(tiny_model_dir)
    beside = start(student)
    show(beside, student, "packed", make_rollouts())
    assert numbers == pytest.approx(beside.take_numbers(), rel=1e-4)


def test_it_learns_the_same_for_the_same_seed_and_gets_better(tiny_model_dir: Path) -> None:
    frozen = FrozenModel(AutoModelForCausalLM.from_pretrained(tiny_model_dir), SPEC.read_layers)
    batches = frozen.read_batches(make_rollouts(), 2)
    losses: list[float] = []
    first = train_draft(frozen, SPEC, batches, 30, lambda step, numbers: losses.append(numbers["loss"]))
    second = train_draft(frozen, SPEC, batches, 30)
    assert losses[-1] < losses[0]
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.serving_weights().values(), second.serving_weights().values(), strict=True)
    )
    assert not any(param.grad is not None for param in frozen.lm.parameters())


def _options() -> Any:
    return type("Options", (), {"world_size": 1})
