"""Merges of weights before any tensor is touched: what mergekit is told, what is refused, where a strength is chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ModelError, PromptError
from pipelines.baselines.weights import WEIGHT_METHODS, check_one_architecture, validation_exams
from pipelines.inputs.read import read_inputs


def test_a_method_with_a_strength_starts_from_the_student(world: Any) -> None:
    student = read_inputs(load_pipeline(world.write())).student
    recipe = WEIGHT_METHODS["ties"].mergekit_recipe(student, [Path("a"), Path("b")], 0.5)
    assert recipe["base_model"] == student.path
    assert recipe["parameters"] == {"lambda": 0.5, "density": 0.2}
    assert [m["model"] for m in recipe["models"]] == ["a", "b"]
    assert recipe["out_dtype"] == "float32"
    assert "base_model" not in WEIGHT_METHODS["linear"].mergekit_recipe(student, [Path("a")], None)


def test_experts_of_other_shapes_are_named(world: Any, make_model_dir: Callable[..., Path]) -> None:
    make_model_dir(world.root / "wide", hidden=128, heads=4)
    world.data["experts"]["up"]["model"] = "wide"
    inputs = read_inputs(load_pipeline(world.write()))
    with pytest.raises(ModelError, match=r"--method ties\n  found:  .*: up \(LlamaForCausalLM, ") as error:
        check_one_architecture("ties", inputs)
    assert "rev (" not in str(error.value)


def test_experts_like_the_student_pass(world: Any) -> None:
    check_one_architecture("linear", read_inputs(load_pipeline(world.write())))


def test_a_strength_is_chosen_on_the_last_training_prompts(world: Any) -> None:
    world.data["evaluate"] = {"samples": 2}
    config = load_pipeline(world.write())
    inputs = read_inputs(config)
    exams = validation_exams(config, inputs)
    assert [p.id for p in exams["reverse"].prompts] == ["reverse/4", "reverse/5"]
    assert exams["reverse"].verifier is inputs.exams["reverse"].verifier


def test_validation_prompts_that_the_verifier_may_not_judge_are_refused(world: Any, tmp_path: Path) -> None:
    """Some of reasoning-gym's scorers run what a prompts file says: training prompts pass the same door as questions."""
    good = {"task": "chain_sum", "entry": {"answer": "3"}}
    evil = {"task": "codeio", "entry": {"answer": "print()"}}
    for file, metadata in (("upper-eval", good), ("upper", evil)):
        rows = [{"prompt": f"{file} {i}=", "answer": "3", "metadata": metadata} for i in range(3)]
        (world.root / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    world.data["domains"]["upper"]["eval"]["verifier"] = "reasoning_gym"
    config = load_pipeline(world.write())
    with pytest.raises(
        PromptError, match=r"domains\.upper\.prompts: prompt upper/0\n  found:  metadata\.task 'codeio'"
    ):
        validation_exams(config, read_inputs(config))


def test_validation_prompts_without_answers_are_refused(world: Any) -> None:
    (world.root / "upper.jsonl").write_text('{"prompt": "upp a="}\n' * 3)
    config = load_pipeline(world.write())
    with pytest.raises(PromptError, match=r"domains\.upper\.prompts: prompt upper/0\n  found:  no answer"):
        validation_exams(config, read_inputs(config))
