"""The mapping of a domain's prompts: a path alone keeps its meaning, a mistake is named by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.config import PipelineConfig
from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.errors import ConfigError
from opd.settings.yaml_files import validate_section


def pipeline(prompts: Any, exam: Any = "e.jsonl") -> dict[str, Any]:
    return {
        "name": "n",
        "student": {"model": "base"},
        "experts": {"e": {"model": "m", "domain": "math"}},
        "domains": {"math": {"prompts": prompts, "eval": {"prompts": exam}}},
        "trainer": {"steps": 1, "samples_per_step": 1},
    }


def read(prompts: Any, exam: Any = "e.jsonl") -> PipelineConfig:
    return validate_section(PipelineConfig, pipeline(prompts, exam), "p.yaml")


def test_a_path_alone_stays_a_path() -> None:
    domain = read("data/p.jsonl").domains["math"]
    assert domain.prompts == Path("data/p.jsonl")
    assert read("p.jsonl").model_dump(mode="json")["domains"]["math"]["prompts"] == "p.jsonl"
    assert as_prompts_config(Path("p.jsonl")) == PromptsConfig(path=Path("p.jsonl"))


def test_a_mapping_comes_back_as_it_was() -> None:
    mapping = {
        "path": "d.parquet", "split": "train", "columns": {"prompt": "question", "answer": "solution"},
        "filter": {"column": "level", "one_of": [5, "5", True, 0.5]}, "shuffle_seed": 7, "limit": 10, "max_prompt_tokens": 9,
    }  # fmt: skip
    config = read(mapping, {"path": "owner/name", "revision": "abc"})
    found = config.model_dump(mode="json")["domains"]["math"]["prompts"]
    assert {key: found[key] for key in mapping} == mapping | {"filter": {**mapping["filter"], "equals": None}}  # type: ignore[dict-item]
    assert [type(value) for value in found["filter"]["one_of"]] == [int, str, bool, float]
    assert PipelineConfig.model_validate(config.model_dump()) == config, "as a Python value too"


@pytest.mark.parametrize(
    ("mapping", "key", "word"),
    [
        ({}, ".path", "found:  nothing"),
        ({"path": "p", "spilt": "train"}, ".spilt", "did you mean `split`?"),
        ({"path": "p", "columns": {"question": "prompt"}}, ".columns.question", "one of: prompt"),
        ({"path": "p", "filter": {"column": "a"}}, ".filter", "found:  neither"),
        ({"path": "p", "filter": {"column": "a", "equals": 1, "one_of": [2]}}, ".filter", "found:  both"),
        ({"path": "p", "filter": {"column": "a", "equals": [1]}}, ".filter.equals", "found:  [1]"),
        ({"path": "p", "filter": "a == 1"}, ".filter", "found:  'a == 1'"),
        ({"path": "p", "limit": 0}, ".limit", "found:  0"),
        ({"path": "p", "max_prompt_tokens": "many"}, ".max_prompt_tokens", "found:  'many'"),
        (3, "", "found:  3"),
    ],
    ids=str,
)
def test_a_mistake_is_named_by_its_key(mapping: Any, key: str, word: str) -> None:
    for where, prompts, exam in (("prompts", mapping, "e.jsonl"), ("eval.prompts", "p.jsonl", mapping)):
        with pytest.raises(ConfigError) as error:
            read(prompts, exam)
        assert str(error.value).startswith(f"p.yaml: domains.math.{where}{key}"), str(error.value)
        assert word in str(error.value)


def test_the_home_directory_is_written_as_in_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    data = {
        "student": {"model": "~/base"},
        "experts": {"rev": {"model": "~/rev", "base": "~/base", "domain": "math"}},
        "registry": "~/registry",
        "evaluate": {"lm_eval": ["~/task.yaml", "gsm8k"]},
    }
    config = validate_section(PipelineConfig, pipeline("~/p.jsonl", {"path": "~/e.jsonl"}) | data, "p.yaml")
    found = config.model_dump(mode="json")
    assert "~" not in json.dumps(found) and found["domains"]["math"]["eval"]["prompts"]["path"] == "/home/me/e.jsonl"
    assert found["evaluate"]["lm_eval"]["tasks"] == ["/home/me/task.yaml", "gsm8k"]
    assert read("~nobody-at-all/p.jsonl").domains["math"].prompts == Path("~nobody-at-all/p.jsonl")


def test_a_column_may_be_left_unread_but_not_what_asks() -> None:
    config = PromptsConfig(path=Path("p.jsonl"), columns={"tools": None})
    assert config.named_columns == {} and config.prompt_column == "prompt"
    with pytest.raises(ConfigError, match=r"prompts\n  found:  no column `prompt`"):
        read({"path": "p.jsonl", "columns": {"prompt": None}})


def test_variables_of_the_template_are_its_own() -> None:
    data = pipeline("p.jsonl") | {"student": {"model": "base", "chat_template_kwargs": {"tokenize": False}}}
    with pytest.raises(ConfigError, match=r"student\.chat_template_kwargs\n  found:  `tokenize`"):
        validate_section(PipelineConfig, data, "p.yaml")
