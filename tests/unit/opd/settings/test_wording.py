"""Findings of pydantic are told in plain English, for every kind of field that our files have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from experts.rl.spec import ReinforceSpec
from experts.spec import ExpertsSpec
from opd.config import PipelineConfig
from opd.settings.suggestions import FOREIGN_KEYS, did_you_mean, find_nearest
from opd.settings.wording import FORMS, WANTED
from opd.settings.yaml_files import iterate_keys


def patterns(schema: Any) -> Iterator[str]:
    """Every regular expression of a JSON schema, those of keys among them."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        for key, value in schema.items():
            if key == "patternProperties":
                yield from value
            yield from patterns(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from patterns(value)


@pytest.mark.parametrize("model", [PipelineConfig, ExpertsSpec, ReinforceSpec], ids=lambda model: model.__name__)
def test_every_pattern_has_words(model: Any) -> None:
    found = set(patterns(model.model_json_schema()))
    assert found and found - set(FORMS) == set(), "give the pattern words in opd/settings/wording.py"


def test_no_words_are_pydantics() -> None:
    assert not [text for text in (*WANTED.values(), *FORMS.values()) if re.search(r"[Ii]nput|should|valid", text)]


def test_names_of_other_tools_lead_to_keys_that_there_are() -> None:
    assert set(FOREIGN_KEYS.values()) - set(iterate_keys(PipelineConfig)) == set()


def test_the_nearest_name_is_found_whatever_its_case() -> None:
    assert find_nearest("Math", ["law", "math"]) == "math"
    assert find_nearest("zzz", ["law", "math"]) is None
    assert did_you_mean("lav", ["law"], "choose") == "did you mean `law`?"
    assert did_you_mean("zzz", ["law"], "choose") == "choose"
