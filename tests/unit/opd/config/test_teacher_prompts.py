"""A teacher's own prompt, checked before any row is read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from opd.config import PipelineConfig, scored_model_len
from opd.config.teacher_prompts import TeacherPromptConfig, list_row_columns


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("Be short.", []),
        ("{{ row.solution }}", ["solution"]),
        ("{{ row['the solution'] }} and {{ row.hint|upper }}, {{ row.hint }}", ["hint", "the solution"]),
        ("{% if row.metadata.easy %}Easy.{% endif %} {{ row.answer }}", ["metadata", "answer"]),
    ],
)
def test_columns_that_a_text_reads(text: str, columns: list[str]) -> None:
    assert sorted(list_row_columns(text)) == sorted(columns)


@pytest.mark.parametrize(
    "text", ["{{ solution }}", "{{ row }}", "{{ row.a", "{% for c in row %}{{ c }}{% endfor %}", "{{ row[row.a] }}"]
)
def test_a_text_that_names_no_column_is_refused(text: str) -> None:
    with pytest.raises(PydanticCustomError):
        list_row_columns(text)


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"max_model_len": 64},
        {"system": "  "},
        {"system": "{{ x }}"},
        {"messages": [{"role": "tool", "content": "a"}]},
    ],
)
def test_a_prompt_that_says_nothing_or_what_it_cannot_is_refused(prompt: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TeacherPromptConfig.model_validate(prompt)


def test_only_columns_that_nothing_else_reads_are_read_for_it() -> None:
    prompt = TeacherPromptConfig(
        system="{{ row.solution }}", messages=[{"role": "user", "content": "{{ row.answer }}{{ row.hint }}"}]
    )
    assert prompt.row_columns == ("solution", "answer", "hint")
    assert prompt.more_columns == ("solution", "hint")


def test_the_longest_prompt_of_a_teacher_counts_as_its_context() -> None:
    data: dict[str, Any] = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {"e": {"model": "m", "domain": "d"}},
        "domains": {"d": {}},
        "rollout": {"max_model_len": 32},
        "trainer": {"steps": 1, "samples_per_step": 2},
    }
    assert scored_model_len(PipelineConfig.model_validate(data)) == 32
    data["experts"]["e"]["prompt"] = {"system": "Be short."}
    assert scored_model_len(PipelineConfig.model_validate(data)) == 32
    data["experts"]["e"]["prompt"]["max_model_len"] = 100
    assert scored_model_len(PipelineConfig.model_validate(data)) == 100
    data["experts"] = {"use": ["e"], "prompts": {"e": {"system": "Be short.", "max_model_len": 50}}}
    assert scored_model_len(PipelineConfig.model_validate(data)) == 50
