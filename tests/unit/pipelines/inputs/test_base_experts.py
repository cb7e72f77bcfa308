"""Experts with which the trainer's ranks cannot score: no adapters of the student."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from opd.config import load_pipeline
from opd.errors import ConfigError
from pipelines.inputs.early_checks import refuse_wrong_models
from pipelines.inputs.read import read_inputs
from pipelines.serve import serve_teachers
from teachers.flight.access import parse_endpoint


@pytest.fixture
def on_base(world: Any, make_adapter: Any) -> Any:
    for name in ("rev", "up"):
        make_adapter(world.root / f"{name}-lora", world.root / "base", seed=len(name))
        world.data["experts"][name]["model"] = f"{name}-lora"
    world.data["student"]["lora"] = {"r": 4}
    world.data["teachers"] = {"engine": "trainer"}
    return world


def test_adapters_of_the_student_are_taken_from_any_copy_of_it(on_base: Any) -> None:
    shutil.copytree(on_base.root / "base", on_base.root / "copy")
    on_base.data["experts"]["rev"]["base"] = "copy"
    config = load_pipeline(on_base.write())
    refuse_wrong_models(config)
    inputs = read_inputs(config)
    assert [w.teacher.adapter_dir.name for (w,) in inputs.scoring.values() if w.teacher.adapter_dir] == [
        "rev-lora",
        "up-lora",
    ]


def test_a_full_model_is_refused_before_a_weight_is_read(on_base: Any) -> None:
    on_base.data["experts"]["up"]["model"] = "up"
    config = load_pipeline(on_base.write())
    for refuse in (refuse_wrong_models, read_inputs):
        with pytest.raises(ConfigError, match=r"^experts\.up\n  found:  a full model, .*/up\n") as error:
            refuse(config)
    assert "set teachers.engine to transformers" in str(error.value)


def test_an_adapter_of_another_base_is_refused(on_base: Any, make_adapter: Any) -> None:
    make_adapter(on_base.root / "other-lora", on_base.root / "rev", seed=3)
    on_base.data["experts"]["rev"]["model"] = "other-lora"
    config = load_pipeline(on_base.write())
    with pytest.raises(
        ConfigError, match=r"^experts\.rev\n  found:  an adapter of .*/rev, whose weights or config are not"
    ):
        read_inputs(config)


def test_teachers_on_the_students_base_are_not_served(on_base: Any) -> None:
    config, nowhere = load_pipeline(on_base.write()), parse_endpoint("127.0.0.1:0", None, None, None)
    with pytest.raises(ConfigError, match=r"^teachers\.engine\n  found:  trainer\n"):
        serve_teachers(config, nowhere, pytest.fail, pytest.fail)
