"""`cluster.placement`: what a role may ask for, in Ray's words."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section

VALID: dict[str, Any] = {
    "name": "two",
    "student": {"model": "base"},
    "experts": {"math": {"model": "m", "domain": "math"}},
    "domains": {"math": {"prompts": "math.jsonl"}},
    "trainer": {"steps": 3, "samples_per_step": 4},
}


def config(teachers: Any, address: str = "auto") -> PipelineConfig:
    cluster = {"address": address, "placement": {"teachers": teachers}}
    return validate_section(PipelineConfig, VALID | {"cluster": cluster}, "p.yaml")


@pytest.mark.parametrize("value", ["x", "!x", "a100-80.g_b", "in(x)", "in(x,y)", "!in(x, y-1)"])
def test_selectors_are_those_of_ray(value: str) -> None:
    from ray._private.label_utils import validate_label_selector

    found = config({"label_selector": {"ray.io/accelerator-type": value, "pool": value}}).cluster.placement.teachers
    assert found.label_selector["pool"] == value
    assert validate_label_selector(found.label_selector) is None


@pytest.mark.parametrize("value", ["", "x y", "in()", "in(x", "x,y", "-x", "!!x", "x" * 64])
def test_what_ray_would_not_read_is_refused(value: str) -> None:
    from ray._private.label_utils import validate_label_selector

    with pytest.raises(ConfigError, match="a label's value, such as teachers, !teachers or in"):
        config({"label_selector": {"pool": value}})
    assert value == "" or validate_label_selector({"pool": value})


@pytest.mark.parametrize(
    ("teachers", "where", "said"),
    [
        ({"strategy": "STRICT"}, "strategy", "strict_pack"),
        ({"cpus": 0}, "cpus", "at least 1"),
        ({"resources": {"GPU": 1}}, "resources", "cluster.*_gpus is for GPU"),
        ({"resources": {"CPU": 1}}, "resources", "cpus is for CPU"),
        ({"resources": {"disk": 0}}, "resources.disk", "above 0"),
        ({"label_selector": {"a b": "x"}}, "label_selector", "a label's name, such as pool"),
        ({"labels": {"pool": "x"}}, "labels", "label_selector"),
    ],
)
def test_what_cannot_be_asked_is_refused(teachers: Any, where: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(teachers)
    told = str(error.value)
    assert told.startswith(f"p.yaml: cluster.placement.teachers.{where}") and said in told, told


def test_one_machine_has_one_place() -> None:
    with pytest.raises(
        ConfigError, match=r"^p.yaml: cluster.placement\n  found:  teachers\n  wanted: nothing with cluster.addr"
    ):
        config({"strategy": "spread"}, address="local")
    assert config({}, address="local").cluster.address == "local"
