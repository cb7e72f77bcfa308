"""The section `balance`: a name or a mapping, one form once read, and refused where it is neither."""

from __future__ import annotations

from typing import Any

import pytest

from opd.config import PipelineConfig, split_rounds
from opd.config.balance import GapBalance, SamplesBalance, TokensBalance
from opd.errors import ConfigError
from opd.settings.yaml_files import apply_overrides, validate_section

VALID: dict[str, Any] = {
    "name": "two",
    "student": {"model": "base"},
    "experts": {"math": {"model": "m", "domain": "math"}},
    "domains": {"math": {"prompts": "math.jsonl"}},
    "trainer": {"steps": 3, "samples_per_step": 4},
}


def read(balance: Any) -> PipelineConfig:
    return validate_section(PipelineConfig, VALID | {"balance": balance}, "p.yaml")


def refusal(balance: Any) -> str:
    with pytest.raises(ConfigError) as error:
        read(balance)
    return str(error.value)


@pytest.mark.parametrize(
    ("balance", "section"),
    [
        ("samples", SamplesBalance(kind="samples")),
        ("tokens", TokensBalance(kind="tokens", window=10)),
        ("gap", GapBalance(kind="gap", of="samples", floor=0.5, cap=3.0, window=10)),
        ({"kind": "samples"}, SamplesBalance(kind="samples")),
        ({"kind": "tokens", "window": 3}, TokensBalance(kind="tokens", window=3)),
        ({"kind": "gap", "of": "tokens", "floor": 1, "cap": 1}, GapBalance(kind="gap", of="tokens", floor=1, cap=1)),
    ],
    ids=str,
)
def test_a_name_is_its_kind_with_the_defaults(balance: Any, section: Any) -> None:
    config = read(balance)
    assert config.balance == section and type(config.balance) is type(section)
    data = config.model_dump(mode="json")
    assert data["balance"]["kind"] == section.kind and validate_section(PipelineConfig, data, "p.yaml") == config


def test_without_the_section_it_is_by_samples() -> None:
    assert validate_section(PipelineConfig, VALID, "p.yaml").balance == SamplesBalance(kind="samples")
    assert validate_section(PipelineConfig, apply_overrides(VALID, ["balance=gap"]), "p.yaml").balance.kind == "gap"


@pytest.mark.parametrize(
    ("balance", "found", "wanted"),
    [
        ("token", "token", "did you mean `tokens`? one of: samples, tokens, gap"),
        ("auto", "auto", "one of: samples, tokens, gap"),
        ({"kind": "gaps"}, "gaps", "did you mean `gap`?"),
        ({"floor": 0.5}, "no `kind`", "one of: samples, tokens, gap"),
        ({"kind": ["gap"]}, "['gap']", "one of: samples, tokens, gap"),
        (3, "3", "a kind, or a mapping with `kind` and options"),
        (None, "None", "a kind, or a mapping with `kind` and options"),
    ],
    ids=str,
)
def test_what_is_no_kind_is_refused_with_the_nearest(balance: Any, found: str, wanted: str) -> None:
    message = refusal(balance)
    assert message.startswith("p.yaml: balance\n"), message
    assert f"found:  {found}\n" in message and wanted in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("floor", 0), ("floor", 1.1), ("floor", float("nan")), ("cap", 0.9), ("cap", float("inf")), ("cap", "much"),
        ("window", 0), ("window", 2.5), ("of", "steps"),
    ],
)  # fmt: skip
def test_an_option_out_of_bounds_is_refused(key: str, value: Any) -> None:
    message = refusal({"kind": "gap", key: value})
    assert message.startswith(f"p.yaml: balance.{key}\n"), message


@pytest.mark.parametrize(("kind", "key"), [("samples", "window"), ("tokens", "cap"), ("tokens", "of"), ("gap", "flor")])
def test_a_key_of_another_kind_is_unknown(kind: str, key: str) -> None:
    message = refusal({"kind": kind, key: 1})
    assert message.startswith(f"p.yaml: balance.{key}\n") and "an unknown key" in message, message


def test_every_round_has_it() -> None:
    config = validate_section(PipelineConfig, VALID | {"balance": "gap", "rounds": 2}, "p.yaml")
    assert [one.balance for one in split_rounds(config)] == [GapBalance(kind="gap")] * 2


def test_the_schema_knows_both_forms() -> None:
    schema = PipelineConfig.model_json_schema()
    name, *mappings = schema["properties"]["balance"]["oneOf"]
    assert name["enum"] == ["samples", "tokens", "gap"]
    assert [one["$ref"].rpartition("/")[2] for one in mappings] == ["SamplesBalance", "TokensBalance", "GapBalance"]
    assert all(ref["$ref"].rpartition("/")[2] in schema["$defs"] for ref in mappings)
