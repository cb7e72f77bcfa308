"""The section `monitors`: its defaults stay beside what is changed, and limits that make no sense are refused."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section

VALID: dict[str, Any] = {
    "name": "one",
    "student": {"model": "base"},
    "experts": {"math": {"model": "m", "domain": "math"}},
    "domains": {"math": {"prompts": "math.jsonl"}},
    "trainer": {"steps": 3, "samples_per_step": 4},
}


def pipeline(**monitors: Any) -> PipelineConfig:
    return validate_section(PipelineConfig, VALID | {"monitors": monitors}, "p.yaml")


def test_a_key_that_is_changed_leaves_the_others_as_they_are() -> None:
    before, now = pipeline().monitors, pipeline(repetition={"stop": 0.9}).monitors
    assert (now.repetition.warn, now.repetition.stop, now.repetition.over) == (before.repetition.warn, 0.9, 5)
    assert now.model_copy(update={"repetition": before.repetition}) == before


def test_only_loops_stop_a_merge_by_default() -> None:
    monitors = pipeline().monitors
    named = {name: getattr(monitors, name) for name in type(monitors).model_fields}
    assert [name for name, one in named.items() if one.stop is not None] == ["repetition"]
    assert all(one.warn is not None and one.pause is None for one in named.values())


def test_the_hardest_of_the_limits_that_a_reading_reaches() -> None:
    one = pipeline(length={"warn": 2, "pause": 3, "stop": 4}).monitors.length
    assert [one.find_reached(value) for value in (1.9, 2.0, 3.5, 9.0)] == [None, ("warn", 2), ("pause", 3), ("stop", 4)]
    assert pipeline(length={"warn": None}).monitors.length.find_reached(1e9) is None


@pytest.mark.parametrize(
    ("section", "where", "found", "wanted"),
    [
        ({"repetition": {"warn": 0.8}}, "monitors.repetition", "stop 0.75 below warn 0.8", "do not fall"),
        ({"length": {"pause": 2}}, "monitors.length", "pause 2 below warn 3", "do not fall"),
        ({"truncation": {"stop": 95}}, "monitors.truncation", "stop 95", "at most 1, since it is a share"),
        ({"entropy": {"warn": 0}}, "monitors.entropy.warn", "0", "above 0"),
        ({"gap": {"over": 0}}, "monitors.gap.over", "0", "at least 1"),
        ({"repetition": {"halt": 0.5}}, "monitors.repetition.halt", "an unknown key", "over, warn, pause, stop"),
        ({"repetitions": {"stop": 0.5}}, "monitors.repetitions", "an unknown key", "repetition"),
        ({"length": 3}, "monitors.length", "3", "a mapping of keys"),
    ],
)
def test_limits_that_are_refused(section: dict[str, Any], where: str, found: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as error:
        pipeline(**section)
    lines = str(error.value).split("\n")
    assert lines[0] == f"p.yaml: {where}"
    assert found in lines[1] and wanted in lines[2], lines
