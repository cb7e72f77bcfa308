"""A pipeline file is refused with the key, what was found and what is wanted, or read exactly as written."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from opd.config import PipelineConfig, load_pipeline, split_rounds
from opd.config.domains import RegisteredExperts
from opd.config.objectives import OBJECTIVES, find_objective_section
from opd.errors import ConfigError
from opd.settings.yaml_files import (
    MAX_YAML_DEPTH,
    MAX_YAML_NODES,
    apply_overrides,
    load_yaml,
    parse_yaml,
    validate_section,
)

ROOT = Path(__file__).parents[4]
SHIPPED = sorted((ROOT / "pipelines").glob("*.yaml"))

VALID: dict[str, Any] = {
    "name": "two",
    "student": {"model": "base"},
    "experts": {"math": {"model": "m", "domain": "math"}, "code": {"model": "c", "domain": "code"}},
    "domains": {"math": {"prompts": "math.jsonl", "eval": {"prompts": "e.jsonl"}}, "code": {"prompts": "code.jsonl"}},
    "trainer": {"steps": 3, "samples_per_step": 4},
}


ALONE: dict[str, Any] = VALID | {
    "experts": {},
    "domains": {"math": VALID["domains"]["math"]},
    "teachers": {"engine": "none"},
    "objective": {"kind": "none", "reward": {}},
}
"""A pipeline without teachers."""


def changed(path: str, value: Any) -> dict[str, Any]:
    """VALID with one key set; `path` is dotted."""
    data = copy.deepcopy(VALID)
    *parents, last = path.split(".")
    node = data
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value
    return data


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        validate_section(PipelineConfig, data, "p.yaml")
    message = str(error.value)
    assert all(f"\n  {part}" in message for part in ("found:  ", "wanted: ", "fix:    ")), message
    return message


def test_a_minimal_pipeline_gets_the_defaults() -> None:
    config = validate_section(PipelineConfig, VALID, "p.yaml")
    assert config.rollout.temperature == 1.0
    assert config.domains["math"].eval is not None
    assert config.domains["math"].eval.verifier == "exact_match"
    assert config.domains["code"].eval is None
    assert config.cluster.address == "local"


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("studnt", "student"),
        ("trainer.step", "steps"),
        ("trainer.samples_per_steps", "samples_per_step"),
        ("rollout.temprature", "temperature"),
        ("experts.math.domian", "domain"),
        ("domains.math.prompt", "prompts"),
        ("domains.math.eval.verifer", "verifier"),
        ("objective.chunks", "chunk"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(path: str, nearest: str) -> None:
    message = refusal(changed(path, 1))
    assert message.startswith(f"p.yaml: {path}\n")
    assert f"did you mean `{nearest}`?" in message


def test_a_key_like_no_other_is_refused_with_all_known_ones() -> None:
    message = refusal(changed("checkpoint.zzz", 1))
    assert "checkpoint.zzz" in message
    assert "one of: every, keep" in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("trainer.steps", "many", "'many'"),
        ("trainer.steps", 0, "0"),
        ("trainer.steps", 1.5, "1.5"),
        ("trainer.lr", -1, "-1"),
        ("rollout.dtype", "float8", "'float8'"),
        ("rollout.temperature", 0, "0"),
        ("rollout.temperature", 0.005, "0.005"),
        ("domains.math.weight", -2, "-2"),
        ("domains.math.weight", "heavy", "'heavy'"),
        ("experts.math", "m", "'m'"),
        ("experts.math.model", 7, "7"),
        ("name", "../up", "'../up'"),
        ("name", "a/b", "'a/b'"),
        ("experts.math.domain", "a/b", "'a/b'"),
        ("student", ["base"], "['base']"),
        ("experts", {}, "{}"),
        ("domains", {}, "{}"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_itself(path: str, value: Any, found: str) -> None:
    message = refusal(changed(path, value))
    assert message.startswith(f"p.yaml: {path}"), message
    assert f"found:  {found}" in message


@pytest.mark.parametrize("path", ["name", "student", "experts", "domains", "trainer", "trainer.steps"])
def test_a_missing_key_is_named(path: str) -> None:
    data = copy.deepcopy(VALID)
    *parents, last = path.split(".")
    node = data
    for key in parents:
        node = node[key]
    del node[last]
    message = refusal(data)
    assert message.startswith(f"p.yaml: {path}\n")
    assert "found:  nothing" in message


@pytest.mark.parametrize(
    ("samples", "n", "words"),
    [
        (10, 4, ["trainer.samples_per_step", "10", "a multiple of rollout.n, 4", "for instance 8"]),
        (3, 4, ["trainer.samples_per_step", "3", "for instance 4"]),
        (4, 4, ["trainer.samples_per_step", "4", "rollout.n (4) samples for each of the 2 domains"]),
    ],
)
def test_a_step_has_all_responses_to_each_of_its_prompts(samples: int, n: int, words: list[str]) -> None:
    data = changed("trainer.samples_per_step", samples)
    message = refusal(data | {"rollout": {"n": n}})
    assert all(word in message for word in words), message
    found = validate_section(PipelineConfig, changed("trainer.samples_per_step", 8) | {"rollout": {"n": 4}}, "p")
    assert (
        found.rollout.n,
        validate_section(PipelineConfig, changed("trainer.samples_per_step", 8), "p").rollout.n,
    ) == (4, 1)


def test_too_few_samples_for_the_domains() -> None:
    message = refusal(changed("trainer.samples_per_step", 1))
    assert "each of the 2 domains" in message
    assert "trainer.samples_per_step" in message
    assert "found:  1" in message
    assert validate_section(PipelineConfig, changed("trainer.samples_per_step", 2), "p").trainer.samples_per_step == 2


# Objectives


@pytest.mark.parametrize(
    ("objective", "key", "found"),
    [
        ({"kind": "jsd", "beta": -0.1}, "beta", "-0.1"),
        ({"kind": "jsd", "beta": 1.1}, "beta", "1.1"),
        ({"kind": "jsd", "beta": float("nan")}, "beta", "nan"),
        ({"kind": "adaptive_kl", "bound": 0}, "bound", "0"),
        ({"kind": "adaptive_kl", "bound": 1.1}, "bound", "1.1"),
        ({"kind": "adaptive_kl", "bound": float("nan")}, "bound", "nan"),
        ({"kind": "skew", "alpha": 0}, "alpha", "0"),
        ({"kind": "skew", "alpha": 1}, "alpha", "1"),
        ({"kind": "skew", "alpha": -3}, "alpha", "-3"),
        ({"kind": "top_k", "k": 0}, "k", "0"),
        ({"kind": "top_k", "k": 1.5}, "k", "1.5"),
        ({"kind": "top_k", "tail": "none"}, "tail", "'none'"),
        ({"kind": "sampled", "ratio_clip": 0}, "ratio_clip", "0"),
        ({"kind": "sampled", "advantage_clip": -1}, "advantage_clip", "-1"),
        ({"kind": "sampled", "baseline": "mean"}, "baseline", "'mean'"),
        ({"kind": "sampled", "normalize": "sequence_mean"}, "normalize", "'sequence_mean'"),
        ({"chunk": 0}, "chunk", "0"),
        ({"kind": "forward_kl", "chunk": -1}, "chunk", "-1"),
        ({"normalize": "sum"}, "normalize", "'sum'"),
        ({"kind": "reverse_kl", "beta": 0.5}, "beta", "an unknown key"),
        ({"kind": "jsd", "alpha": 0.5}, "alpha", "an unknown key"),
    ],
    ids=str,
)
def test_an_option_that_an_objective_cannot_take_is_refused(objective: Any, key: str, found: str) -> None:
    message = refusal(changed("objective", objective))
    assert message.startswith(f"p.yaml: objective.{key}\n"), message
    assert f"found:  {found}" in message


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"objective": {"extrapolate": 0.0}}, ["objective.extrapolate", "found:  0"]),
        ({"objective": {"extrapolate": float("inf")}}, ["objective.extrapolate"]),
        ({"domains": {"math": {"extrapolate": -0.9}}}, ["domains.math.extrapolate", "found:  -0.9"]),
        (
            {"objective": {"kind": "top_k", "extrapolate": 1.25}, "teachers": {"payload": "top_k"}},
            ["objective.extrapolate", "found:  1.25 with teachers.payload top_k", "hidden_states"],
        ),
        (
            {
                "objective": {"kind": "sampled", "advantage_clip": 5},
                "teachers": {"payload": "sampled_logprobs"},
                "domains": {"math": {"extrapolate": 1.5}},
            },
            ["domains.math.extrapolate", "found:  1.5 with objective.advantage_clip", "hidden_states"],
        ),
        (
            {
                "objective": {"kind": "sampled", "extrapolate": 1.25},
                "teachers": {
                    "engine": "openai",
                    "payload": "sampled_logprobs",
                    "servers": {"math": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}},
                },
            },
            ["objective.extrapolate", "found:  1.25 with teachers.engine openai", "has no server"],
        ),
        (
            {"objective": {"extrapolate": 1.25}, "rounds": 2},
            ["objective.extrapolate", "found:  1.25 with round 2, which has no `experts`"],
        ),
        (
            {"rounds": [{}, {"experts": {"m": {"model": "m", "domain": "math"}}}, {"objective": {"extrapolate": 2}}]},
            ["objective.extrapolate", "found:  2 with round 3"],
        ),
    ],
    ids=str,
)
def test_a_target_beyond_the_experts_that_cannot_be_computed_is_refused(keys: Any, words: list[str]) -> None:
    message = refusal(one_domain(keys))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "keys",
    [
        {"objective": {"kind": "jsd", "extrapolate": 1.25}},
        {"objective": {"kind": "top_k", "extrapolate": 1}, "teachers": {"payload": "top_k"}},
        {"objective": {"kind": "sampled", "extrapolate": 1.25}, "teachers": {"payload": "sampled_logprobs"}},
        {"objective": {"kind": "sampled", "extrapolate": 1.25, "advantage_clip": 5}},
        {
            "objective": {"kind": "sampled", "extrapolate": 1.25},
            "student": {"model": "s", "lora": {}},
            "teachers": {
                "engine": "openai",
                "payload": "sampled_logprobs",
                "servers": {"math": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}},
            },
        },
        {
            "objective": {"extrapolate": 1.25},
            "rounds": [{}, {"experts": {"m": {"model": "m2", "domain": "math"}}}],
        },
        {"objective": {"extrapolate": 1.25}, "rounds": [{}, {"objective": {"extrapolate": 1}}]},
    ],
    ids=str,
)
def test_a_target_beyond_the_experts_that_can_be_computed_is_taken(keys: Any) -> None:
    validate_section(PipelineConfig, one_domain(keys), "p.yaml")


def one_domain(keys: dict[str, Any]) -> dict[str, Any]:
    """VALID with one expert and one domain, and these sections."""
    experts = {"math": VALID["experts"]["math"]}
    domain = {"math": VALID["domains"]["math"] | keys.get("domains", {}).get("math", {})}
    return VALID | {"experts": experts} | keys | {"domains": domain}


@pytest.mark.parametrize("kind", ["kl", "", None, 3, ["jsd"]])
def test_an_unknown_objective_is_refused_with_the_known_ones(kind: Any) -> None:
    message = refusal(changed("objective", {"kind": kind}))
    assert message.startswith("p.yaml: objective")
    assert "reverse_kl, forward_kl, adaptive_kl, jsd, skew, sampled, top_k" in message


@pytest.mark.parametrize("value", [0, -1, -0.5, float("nan"), float("inf"), "much"])
def test_a_loss_weight_that_is_no_weight_is_refused(value: Any) -> None:
    message = refusal(changed("domains.math.loss_weight", value))
    assert message.startswith("p.yaml: domains.math.loss_weight\n")
    assert f"found:  {value!r}" in message


FITTING = {
    (kind, "hidden_states") for kind in ("reverse_kl", "forward_kl", "adaptive_kl", "jsd", "skew", "sampled")
} | {("sampled", "sampled_logprobs"), ("top_k", "top_k")}  # fmt: skip


@pytest.mark.parametrize("payload", ["hidden_states", "sampled_logprobs", "top_k"])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "adaptive_kl", "jsd", "skew", "sampled", "top_k"])
def test_a_payload_that_does_not_hold_what_the_objective_needs_is_refused(kind: str, payload: str) -> None:
    data = changed("objective", {"kind": kind}) | {"teachers": {"payload": payload}}
    if (kind, payload) in FITTING:
        assert validate_section(PipelineConfig, data, "p.yaml").objective.kind == kind
        return
    message = refusal(data)
    assert message.startswith("p.yaml: objective.kind\n")
    assert f"{kind} with teachers.payload {payload}" in message
    assert "needs teachers.payload " in message


def test_the_default_objective_decides_at_each_token() -> None:
    config = validate_section(PipelineConfig, VALID, "p.yaml")
    assert (config.objective.kind, config.teachers.payload) == ("adaptive_kl", "hidden_states")
    assert (config.objective.normalize, config.domains["math"].loss_weight) == ("token_mean", 1.0)
    assert validate_section(PipelineConfig, changed("objective.chunk", 7), "p.yaml").objective.kind == "adaptive_kl"


# Teachers elsewhere

TLS = {"engine": "flight", "address": "grpc+tls://teachers.example:8815", "tls_root_certs": "ca.pem"}


@pytest.mark.parametrize(
    "teachers",
    [
        TLS,
        TLS | {"token_file": "token", "payload": "hidden_states"},
        TLS | {"address": "grpc+tls://[2001:db8::1]:8815"},
        *({"engine": "flight", "address": f"grpc://{host}:8815"} for host in ("127.0.0.1", "[::1]", "localhost")),
    ],
)
def test_teachers_elsewhere(teachers: dict[str, Any]) -> None:
    assert (
        validate_section(PipelineConfig, changed("teachers", teachers), "p.yaml").teachers.address
        == teachers["address"]
    )


@pytest.mark.parametrize(
    ("teachers", "key", "words"),
    [
        ({"engine": "flight"}, "address", ["found:  nothing", "grpc+tls://HOST:PORT"]),
        (TLS | {"address": "teachers.example:8815"}, "address", ["found:  teachers.example:8815"]),
        (TLS | {"address": "https://teachers.example:8815"}, "address", ["grpc+tls://HOST:PORT"]),
        (TLS | {"address": "grpc+tls://teachers.example"}, "address", ["grpc+tls://HOST:PORT"]),
        (TLS | {"address": "grpc+tls://teachers.example:0"}, "address", ["grpc+tls://HOST:PORT"]),
        (
            {"engine": "flight", "address": "grpc://teachers.example:8815"},
            "address",
            ["wanted: grpc+tls:// for a host"],
        ),
        ({"engine": "flight", "address": "grpc://127.0.0.1.example:1"}, "address", ["wanted: grpc+tls:// for a host"]),
        ({"engine": "flight", "address": "grpc+tls://h:1"}, "tls_root_certs", ["found:  nothing", "a PEM file"]),
        (TLS | {"address": "grpc://localhost:1"}, "tls_root_certs", ["found:  ca.pem", "grpc:// has no certificates"]),
        ({"address": "grpc://localhost:1"}, "address", ["teachers.engine flight"]),
        ({"token_file": "t"}, "token_file", ["found:  t", "teachers.engine flight"]),
    ],
)
def test_an_address_that_does_not_fit_is_refused(teachers: dict[str, Any], key: str, words: list[str]) -> None:
    message = refusal(changed("teachers", teachers))
    assert message.startswith(f"p.yaml: teachers.{key}\n")
    assert all(word in message for word in words), message


# Experts: from the registry or written out


@pytest.mark.parametrize("use", ["all", ["math"], ["math", "code"]])
def test_experts_from_the_registry(use: Any) -> None:
    config = validate_section(PipelineConfig, changed("experts", {"use": use}), "p.yaml")
    assert isinstance(config.experts, RegisteredExperts)
    assert config.experts.use == use


def test_experts_written_out() -> None:
    config = validate_section(PipelineConfig, VALID, "p.yaml")
    assert isinstance(config.experts, dict)
    assert config.experts["math"].model == Path("m")


@pytest.mark.parametrize("use", [[], "some", ["a/b"], ["../x"], 3])
def test_a_wrong_use_is_refused(use: Any) -> None:
    assert "experts.use" in refusal(changed("experts", {"use": use}))


def test_use_beside_written_out_experts_is_refused() -> None:
    assert "experts.math" in refusal(changed("experts", {"use": "all", "math": {"model": "m", "domain": "math"}}))


@pytest.mark.parametrize("name", ["a/b", "..", "../x", "", "x y"])
def test_an_expert_name_is_no_path(name: str) -> None:
    message = refusal(changed("experts", {name: {"model": "m", "domain": "math"}}))
    assert message.startswith("p.yaml: experts")
    assert repr(name) in message


def test_a_config_is_frozen() -> None:
    config = validate_section(PipelineConfig, VALID, "p.yaml")
    with pytest.raises(ValidationError, match="frozen"):
        config.name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        config.trainer.steps = 5


# Files


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "p.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("name: a\nname: b\n", "key `name` is given twice"),
        ("trainer:\n  lr: 1\n  steps: 2\n  lr: 3\n", "key `lr` is given twice"),
        ("name: [a\n", "line 2"),
        ("name: a\n\tb: c\n", "line 2"),
        ("name: {{ name }}\n", "line 1"),
        ("name: 2024-99-99\n", "month"),
        ("- a\n- b\n", "list"),
        ("just words\n", "str"),
        ("", "nothing"),
        ("name: !!python/object/apply:os.system [echo]\n", "python/object"),
        (b"name: \xff\xfe\n", "utf-8"),
        ("name: !!bool x\n", "line 1, column 7\n  found:  'x' is no bool"),
        ("name: {!!bool x: 1}\n", "'x' is no bool"),
        ("name: a\nseed: !!int ''\n", "line 2, column 7\n  found:  '' is no int"),
        ("name: !!int x\n", "'x' is no int"),
        ("name: !!float ''\n", "'' is no float"),
        ("name: !!timestamp x\n", "'x' is no timestamp"),
    ],
)
def test_a_file_that_is_not_one_mapping_is_refused(text: str | bytes, word: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_yaml(path)
    assert str(error.value).startswith(str(path))
    assert word in str(error.value)


def test_defaults_of_an_anchor_can_be_merged_and_replaced(tmp_path: Path) -> None:
    """Whichever of the mappings is read first; a key that is written twice beside a merge is refused all the same."""
    text = "late: {in: &b {<<: *a, y: 3}}\n"
    text = "one: &a {x: 1, y: 2}\nnear: {<<: *a, y: 5}\n" + text + "last: {<<: *b, x: 4}\n"
    found = load_yaml(write(tmp_path, text))
    assert (found["near"], found["late"]["in"], found["last"]) == ({"x": 1, "y": 5}, {"x": 1, "y": 3}, {"x": 4, "y": 3})
    with pytest.raises(ConfigError, match="`y` is given twice"):
        load_yaml(write(tmp_path, "one: &a {x: 1}\ntwo: {<<: *a, y: 1, y: 2}\n"))


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml\n  found:  no such file"):
        load_pipeline(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_pipeline(tmp_path)


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    assert load_yaml(write(tmp_path, b"\xef\xbb\xbfname: a\r\nseed: 1\r\n")) == {"name": "a", "seed": 1}


def test_a_value_of_set_that_its_tag_does_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError, match="--set seed=!!bool x\n  found:  'x' is no bool"):
        apply_overrides({}, ["seed=!!bool x"])


# Evaluation


@pytest.mark.parametrize(
    "verifier",
    [
        "last_line",
        "numeric",
        {"kind": "exact_match"},
        {"kind": "numeric", "tolerance": 0.5},
        {"kind": "regex", "pattern": "a(b)"},
        {"kind": "multiple_choice", "choices": "AB"},
        {"kind": "python", "function": "my.judges:judge"},
    ],
    ids=str,
)
def test_a_verifier_is_a_name_or_a_kind_with_options(verifier: Any) -> None:
    config = validate_section(PipelineConfig, changed("domains.math.eval.verifier", verifier), "p.yaml")
    again = validate_section(PipelineConfig, config.model_dump(), "p.yaml")  # as a run directory keeps it
    assert again == config and config.domains["math"].eval is not None
    read = config.domains["math"].eval.verifier
    assert (read if isinstance(read, str) else read.model_dump(exclude_unset=True)) == verifier


@pytest.mark.parametrize(
    ("verifier", "key", "words"),
    [
        ("exact_mach", "", ["found:  exact_mach", "did you mean `exact_match`?", "reasoning_gym, regex, python"]),
        ({"kind": "nummeric"}, "", ["found:  nummeric", "did you mean `numeric`?"]),
        ({"tolerance": 1}, "", ["found:  no `kind`", "one of: exact_match"]),
        ("regex", "", ["found:  regex", "{kind: regex, pattern: ...}"]),
        ("python", "", ["found:  python", "{kind: python, function: module:function}"]),
        (3, "", ["found:  3"]),
        ({"kind": "regex"}, ".pattern", ["found:  nothing"]),
        ({"kind": "regex", "pattern": "a(b"}, "", ["found:  'a(b'", "missing )"]),
        ({"kind": "numeric", "tolerance": -1}, ".tolerance", ["found:  -1"]),
        ({"kind": "numeric", "tolerence": 1}, ".tolerence", ["did you mean `tolerance`?"]),
        ({"kind": "exact_match", "tolerance": 1}, ".tolerance", ["an unknown key"]),
        ({"kind": "multiple_choice", "choices": "a"}, ".choices", ["found:  'a'"]),
        ({"kind": "python", "function": "judge"}, ".function", ["found:  'judge'"]),
        ({"kind": "python", "function": "a b:c"}, ".function", ["found:  'a b:c'"]),
    ],
    ids=str,
)
def test_a_verifier_that_is_none_is_refused(verifier: Any, key: str, words: list[str]) -> None:
    message = refusal(changed("domains.math.eval.verifier", verifier))
    assert message.startswith(f"p.yaml: domains.math.eval.verifier{key}\n"), message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("exam", "found"),
    [
        ({}, "neither"),
        ({"prompts": "e.jsonl", "holdout": 0.1}, "both"),
        ({"holdout": 0}, "0"),
        ({"holdout": 1}, "1"),
        ({"holdout": float("nan")}, "nan"),
    ],
    ids=str,
)
def test_questions_have_one_source(exam: Any, found: str) -> None:
    message = refusal(changed("domains.math.eval", exam))
    assert message.startswith("p.yaml: domains.math.eval")
    assert f"found:  {found}\n" in message


def test_a_share_is_held_out_of_the_domains_own_prompts() -> None:
    data = changed("domains.math.eval", {"holdout": 0.1})
    validate_section(PipelineConfig, data, "p.yaml")
    del data["domains"]["math"]["prompts"]
    assert refusal(data).startswith("p.yaml: domains.math\n  found:  no `prompts`")
    data["experts"] = {"use": ["math"]}  # those that the expert was registered with will do: `read_inputs` looks
    validate_section(PipelineConfig, data, "p.yaml")


@pytest.mark.parametrize(
    ("settings", "key", "found"),
    [
        ({"samples": 0}, "samples", "0"),
        ({"n": 0}, "n", "0"),
        ({"n": 8}, "temperature", "0"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"n": 8, "temperature": 0.7, "pass_at": [1, 16]}, "pass_at", "[1, 16]"),
        ({"pass_at": [2]}, "pass_at", "[2]"),
        ({"pass_at": [0]}, "pass_at.0", "0"),
        ({"lm_eval": "gsm8k"}, "lm_eval", "'gsm8k'"),
        ({"lm_eval": {"tasks": ["a"], "model": "openai"}}, "lm_eval.model", "'openai'"),
        ({"lm_eval": [""]}, "lm_eval.tasks.0", "''"),
    ],
    ids=str,
)
def test_an_evaluation_that_measures_nothing_is_refused(settings: Any, key: str, found: str) -> None:
    message = refusal(changed("evaluate", settings))
    assert message.startswith(f"p.yaml: evaluate.{key}\n"), message
    assert f"found:  {found}\n" in message, message


def test_answers_and_public_tasks() -> None:
    settings = {"n": 8, "temperature": 0.7, "pass_at": [1, 8], "lm_eval": ["gsm8k", "my/task.yaml"]}
    config = validate_section(PipelineConfig, changed("evaluate", settings), "p.yaml").evaluate
    assert (config.n, config.temperature, config.pass_at) == (8, 0.7, [1, 8])
    assert (config.lm_eval.tasks, config.lm_eval.model) == (["gsm8k", "my/task.yaml"], "hf")
    assert validate_section(PipelineConfig, VALID, "p.yaml").evaluate.pass_at == [1]


# --set


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("trainer.steps=10", 10),
        ("trainer.lr=1.0e-5", 1e-5),
        ("trainer.gradient_checkpointing=true", True),
        ("evaluate.max_new_tokens=null", None),
        ("experts.use=[a, b]", ["a", "b"]),
        ("name=a=b", "a=b"),
        ("name=", None),
    ],
)
def test_an_override_is_read_as_yaml(item: str, value: Any) -> None:
    data: Any = apply_overrides({}, [item])
    for key in item.partition("=")[0].split("."):
        data = data[key]
    assert data == value
    assert type(data) is type(value)


def test_overrides_reach_deep_keys_and_leave_the_callers_data(tmp_path: Path) -> None:
    before = copy.deepcopy(VALID)
    data = apply_overrides(
        VALID, ["experts.math.model=other", "domains.math.eval.verifier=last_line", "rollout.workers=2", "seed=1"]
    )
    assert before == VALID
    config = validate_section(PipelineConfig, data, "p.yaml")
    assert isinstance(config.experts, dict)
    assert config.experts["math"].model == Path("other")
    assert config.experts["code"].model == Path("c")
    assert config.domains["math"].eval is not None
    assert config.domains["math"].eval.verifier == "last_line"
    assert (config.rollout.workers, config.seed) == (2, 1)


def test_the_last_override_of_a_key_wins() -> None:
    assert apply_overrides({}, ["a.b=1", "a.b=2", "a.c=3"]) == {"a": {"b": 2, "c": 3}}


@pytest.mark.parametrize("item", ["trainer.steps", "=1", "trainer.=1", ".steps=1", "name.first=x", "a=[1", "a={{b}}"])
def test_a_bad_override_is_refused_and_quoted(item: str) -> None:
    with pytest.raises(ConfigError) as error:
        apply_overrides(VALID, [item])
    assert str(error.value).startswith(f"--set {item}\n")


def test_an_override_of_an_unknown_key_is_refused_with_the_nearest() -> None:
    assert "did you mean `steps`?" in refusal(apply_overrides(VALID, ["trainer.stepz=1"]))


# What ships


def test_something_ships() -> None:
    assert "quickstart.yaml" in [p.name for p in SHIPPED]
    assert any(len(load_pipeline(p).domains) >= 10 for p in SHIPPED)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_shipped_pipeline_is_valid(path: Path) -> None:
    config = load_pipeline(path)
    assert len(config.domains) >= 2
    assert config.trainer.samples_per_step >= len(config.domains)
    assert config.name == path.stem


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_a_resolved_pipeline_reads_back_as_itself(path: Path) -> None:
    config = load_pipeline(path)
    assert validate_section(PipelineConfig, config.model_dump(mode="json"), path) == config


def test_the_schema_documents_its_keys() -> None:
    schema = PipelineConfig.model_json_schema()
    trainer = schema["$defs"]["TrainerConfig"]
    assert trainer["additionalProperties"] is False
    assert set(trainer["required"]) == {"steps", "samples_per_step"}
    assert trainer["properties"]["samples_per_step"]["description"].startswith("Responses in one optimiser step")
    assert {"name", "student", "experts", "domains", "trainer"} == set(schema["required"])
    refs = _refs(schema)
    assert len(refs) > 10
    assert refs <= {f"#/$defs/{name}" for name in schema["$defs"]}


def _refs(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_refs, node))
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(_refs, node.values()))
    return set()


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_pipeline_is_read_without_torch(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    payload = find_objective_section(kind).PAYLOADS[0]
    teachers = {"engine": "text", **SERVER} if payload == "text" else {"payload": payload}
    data = VALID | {"objective": {"kind": kind}, "teachers": teachers}
    file.write_text(yaml.safe_dump(ALONE if kind == "none" else data))
    code = (
        "import sys; from pathlib import Path; from opd.config import load_pipeline; from opd.payloads import answer_class; "
        f"config = load_pipeline(Path({str(file)!r})); assert config.objective.kind == {kind!r}; "
        "answer_class(config.teachers.payload).token_bytes(hidden_size=8, itemsize=4, top_k=2); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# Servers of teachers

SERVER = {"base_url": "http://127.0.0.1:8000/v1", "model": "m"}


def served(**changes: Any) -> dict[str, Any]:
    """VALID with both experts behind servers."""
    teachers = {"engine": "openai", "payload": "sampled_logprobs", "servers": {"math": SERVER, "code": SERVER}}
    return changed("objective", {"kind": "sampled"}) | {"teachers": teachers | changes}


def test_teachers_behind_servers() -> None:
    config = validate_section(PipelineConfig, served(), "p.yaml").teachers
    assert (config.servers["math"].base_url, config.servers["code"].model) == ("http://127.0.0.1:8000/v1", "m")


@pytest.mark.parametrize(
    "url",
    [
        "https://host.example/v1",
        "http://localhost:1/v1",
        "http://[::1]:8000/v1",
        SERVER["base_url"],
    ],
)
def test_https_and_loopback_are_taken(url: str) -> None:
    validate_section(PipelineConfig, served(servers={"math": SERVER | {"base_url": url}, "code": SERVER}), "p.yaml")


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://host.example/v1", "plain http to another machine, host.example"),
        ("http://10.0.0.7:8000/v1", "plain http to another machine, 10.0.0.7"),
        ("http://localhost.example/v1", "plain http to another machine"),
        ("http://0.0.0.0:8000/v1", "plain http to another machine"),
        ("ftp://127.0.0.1/v1", "no http address"),
        ("ftp://me:hunter2@127.0.0.1/v1", "'ftp://127.0.0.1/v1', no http address"),
        ("127.0.0.1:8000/v1", "no http address"),
        ("https://", "no http address"),
        ("http://127.0.0.1:port/v1", "no address"),
        ("https://me:hunter2@host.example/v1", "a user, a query or a fragment"),
        ("https://host.example/v1?key=hunter2", "a user, a query or a fragment"),
    ],
)
def test_other_addresses_are_refused_without_showing_a_password(url: str, found: str) -> None:
    message = refusal(served(servers={"math": SERVER, "code": SERVER | {"base_url": url}}))
    assert message.startswith("p.yaml: teachers.servers.code"), message
    assert found in message and "hunter2" not in message


def test_a_server_sends_no_hidden_states() -> None:
    message = refusal(changed("teachers", {"engine": "openai", "servers": {"math": SERVER, "code": SERVER}}))
    assert message.startswith("p.yaml: teachers.payload\n")
    assert "hidden_states with teachers.engine openai" in message and "engine transformers or vllm" in message


def test_every_expert_has_a_server() -> None:
    message = refusal(served(servers={"math": SERVER}))
    assert message.startswith("p.yaml: teachers.servers.code\n") and "experts math, code" in message
    message = refusal(served(servers={"math": SERVER, "code": SERVER, "maths": SERVER}))
    assert message.startswith("p.yaml: teachers.servers.maths\n") and "a server of no expert" in message
    registered = served(servers={"math": SERVER})
    for use, ok in ((["math"], True), ("all", True), (["math", "code"], False)):
        registered["experts"] = {"use": use}
        if ok:
            validate_section(PipelineConfig, registered, "p.yaml")
        else:
            assert refusal(registered).startswith("p.yaml: teachers.servers.code\n")


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize(("key", "value"), [("servers", {"math": SERVER, "code": SERVER}), ("api_key_env", "KEY")])
def test_servers_that_nobody_asks_are_refused(engine: str, key: str, value: Any) -> None:
    message = refusal(changed("teachers", {"engine": engine, key: value}))
    assert message.startswith(f"p.yaml: teachers.{key}\n") and f"teachers.engine {engine}" in message


IGNORED = {
    ("vllm", "memory"): ("2GiB", "2GiB", ["transformers"]),
    ("transformers", "kv_cache_gib"): (4, "4", ["vllm"]),
    ("transformers", "server_timeout_s"): (5, "5", ["openai", "text"]),
    ("flight", "workers"): (2, "2", ["transformers", "vllm", "openai"]),
    ("flight", "memory"): ("2GiB", "2GiB", ["transformers"]),
    ("vllm", "device_map"): ("auto", "auto", ["transformers"]),
    ("flight", "max_memory"): ({"cpu": "1GiB"}, "{'cpu': '1GiB'}", ["transformers"]),
    ("flight", "gpu_memory"): ("2GiB", "2GiB", ["transformers"]),
    ("vllm", "address"): ("grpc://me:hunter2@localhost:1", "grpc://localhost:1", ["flight"]),
    ("flight", "api_key_env"): ("sk-hunter2", "set", ["openai", "text"]),
}
"""(engine, key that it ignores): a value, what is shown of it, engines that have the key."""


@pytest.mark.parametrize(("engine", "key"), IGNORED)
def test_a_key_that_the_engine_ignores_is_refused_with_those_that_have_it(engine: str, key: str) -> None:
    value, shown, having = IGNORED[engine, key]
    address = {"address": "grpc://localhost:1"} if engine == "flight" else {}
    message = refusal(changed("teachers", address | {"engine": engine, key: value}))
    assert message.startswith(f"p.yaml: teachers.{key}\n  found:  {shown}, with teachers.engine {engine}\n"), message
    assert f"nothing, or teachers.engine {' or '.join(having)}" in message
    assert "hunter2" not in message


def test_a_misspelt_key_is_told_from_one_of_another_engine() -> None:
    message = refusal(changed("teachers", {"engine": "vllm", "kv_cache_gb": 1}))
    assert "teachers.kv_cache_gb\n" in message and "did you mean `kv_cache_gib`?" in message


@pytest.mark.parametrize("engine", ["openia", "", None, 3, ["vllm"]])
def test_an_engine_that_is_none_is_refused_with_those_there_are(engine: Any) -> None:
    message = refusal(changed("teachers", {"engine": engine}))
    assert (
        message.startswith("p.yaml: teachers.engine\n")
        and "transformers, vllm, openai, flight, text, trainer, none" in message
    )


def test_a_section_written_out_for_another_engine_is_taken_where_it_says_nothing() -> None:
    """As the run directories of older releases have it, with every key of every engine."""
    written = validate_section(PipelineConfig, VALID, "p.yaml").teachers.model_dump(mode="json")
    others = {"address": None, "token_file": None, "servers": {}, "api_key_env": None, "kv_cache_gib": 1}
    assert (
        validate_section(PipelineConfig, changed("teachers", written | others), "p.yaml").teachers.model_dump()
        == written
    )
    for memory in ("8GiB", 8 << 30):
        elsewhere = written | {"memory": memory, "engine": "flight", "address": "grpc://localhost:1"}
        kept = validate_section(PipelineConfig, changed("teachers", elsewhere), "p.yaml").teachers
        own = {"memory", "gpu_memory", "workers", "device_map", "max_memory"}
        assert set(kept.model_dump()) == {*written, "address", "tls_root_certs", "token_file"} - own


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        ({"student": {"model": "base"}}, "teachers.engine", "trainer without student.lora"),
        ({"cluster": {"teacher_gpus": 1}}, "cluster.teacher_gpus", "1 with teachers.engine trainer"),
        ({"teachers": {"engine": "trainer", "workers": 2}}, "teachers.workers", "2, with teachers.engine trainer"),
        (
            {
                "objective": {"kind": "sampled", "baseline": "leave_one_out"},
                "teachers": {"engine": "trainer", "payload": "sampled_logprobs"},
            },
            "objective.baseline",
            "a baseline with teachers.engine trainer",
        ),
    ],
)
def test_what_goes_not_with_teachers_on_the_students_base(change: dict[str, Any], where: str, found: str) -> None:
    lora = {"student": {"model": "base", "lora": {}}, "teachers": {"engine": "trainer"}}
    validate_section(PipelineConfig, VALID | lora, "p.yaml")
    likeliest = {"teachers": {"engine": "trainer", "payload": "top_k"}, "objective": {"kind": "top_k"}}
    validate_section(PipelineConfig, VALID | lora | likeliest, "p.yaml")
    message = refusal(VALID | lora | change)
    assert message.startswith(f"p.yaml: {where}\n  found:  {found}"), message


@pytest.mark.parametrize("stage", [1, 2, 0, "two"])
def test_a_stage_under_which_ranks_hold_the_whole_model_is_refused(stage: Any) -> None:
    message = refusal(changed("trainer.zero_stage", stage))
    assert message.startswith("p.yaml: trainer.zero_stage\n") and "which is stage 3" in message
    validate_section(PipelineConfig, changed("trainer.zero_stage", 3), "p.yaml")


# Secrets, and files made to do harm


def test_a_key_in_place_of_its_variables_name_is_not_shown() -> None:
    message = refusal(served(api_key_env="sk-hunter2"))
    assert message.startswith("p.yaml: teachers.api_key_env\n")
    assert "hunter2" not in message and "a variable's name" in message
    validate_section(PipelineConfig, served(api_key_env="_Key2"), "p.yaml")


def test_a_password_in_an_address_is_not_shown() -> None:
    for address in ("grpc://me:hunter2@host.example:1", "grpc+tls://me:hunter2@host.example:1"):
        message = refusal(changed("teachers", {"engine": "flight", "address": address}))
        assert message.startswith("p.yaml: teachers.address\n"), message
        assert "hunter2" not in message and "host.example:1" in message


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    ("section", "key"),
    [("rollout", "temperature"), ("trainer", "lr"), ("sync", "tolerance"), ("cluster", "phase_timeout_s")],
)
def test_numbers_are_finite(section: str, key: str, value: float) -> None:
    message = refusal(changed(section, dict(VALID.get(section, {})) | {key: value}))
    assert message.startswith(f"p.yaml: {section}.{key}\n")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("weight", -1, "above 0"),
        ("weight", "even", "auto"),
        ("teachers", "a/b", "A-Z a-z 0-9 . _ -"),
        ("teachers", {"math": -1}, "at least 0"),
        ("teachers", {}, "entries, at least 1"),
    ],
)
def test_a_value_of_two_kinds_is_judged_by_its_own(key: str, value: Any, wanted: str) -> None:
    data = copy.deepcopy(VALID)
    data["domains"]["math"][key] = value
    message = refusal(data)
    assert re.match(rf"p\.yaml: domains\.math\.{key}(\.math)?\n", message), message
    assert wanted in message


def test_aliases_count_for_what_they_stand_for() -> None:
    assert parse_yaml("a: &a {x: [1, 2, 3]}\nb: *a\n") == {"a": {"x": [1, 2, 3]}, "b": {"x": [1, 2, 3]}}
    nodes = MAX_YAML_NODES // 10
    block = f"a: &a [{'1, ' * nodes}]\n"
    assert len(parse_yaml(block + "".join(f"b{i}: *a\n" for i in range(8)))) == 9
    with pytest.raises(ValueError, match="aliases written out"):
        parse_yaml(block + "".join(f"b{i}: *a\n" for i in range(9)))
    with pytest.raises(ValueError, match="lies in what it names"):
        parse_yaml("a: &a {b: [*a]}\n")


def test_depth_is_bounded() -> None:
    parse_yaml("[" * MAX_YAML_DEPTH + "]" * MAX_YAML_DEPTH)
    with pytest.raises(ValueError, match="nested deeper than 32"):
        parse_yaml("[" * (MAX_YAML_DEPTH + 1) + "]" * (MAX_YAML_DEPTH + 1))
    with pytest.raises(ConfigError, match="nested deeper"):
        apply_overrides({}, ["a=" + "[" * 100_000])


# Rounds


def test_rounds_alike_differ_in_their_seed() -> None:
    config = validate_section(PipelineConfig, changed("rounds", 3) | {"seed": 5}, "p.yaml")
    found = split_rounds(config)
    assert [one.seed for one in found] == [5, 6, 7]
    assert all(one.model_copy(update={"seed": 5, "rounds": 3}) == config for one in found)
    alone = validate_section(PipelineConfig, VALID, "p.yaml")
    assert split_rounds(alone) == [alone]


def test_a_round_says_what_is_other() -> None:
    data = changed("teachers", {"memory": "2GiB", "mask_tokens": {"math": ["x"]}}) | {
        "objective": {"kind": "skew", "alpha": 0.3}
    }
    data["trainer"]["lr"] = 0.5
    other = {
        "experts": {"better": {"model": "b", "domain": "math"}},
        "domains": {"math": {"prompts": "new.jsonl"}},
        "trainer": {"steps": 9},
        "teachers": {"mask_tokens": {}},
    }
    rounds = [{}, other, {"objective": {"kind": "jsd"}, "seed": 11}, {"objective": {"chunk": 7}}]
    config = validate_section(PipelineConfig, data | {"rounds": rounds}, "p.yaml")
    first, second, third, fourth = split_rounds(config)
    assert first == validate_section(PipelineConfig, data, "p.yaml")
    assert (list(second.experts), list(second.domains)) == (["better"], ["math"]), "names are replaced, not added"
    assert second.domains["math"].eval is None
    assert (second.trainer.steps, second.trainer.lr, second.trainer.samples_per_step) == (9, 0.5, 4)
    assert (second.teachers.memory, second.teachers.mask_tokens) == (2 << 30, {})
    assert (third.objective.kind, third.seed, third.experts) == ("jsd", 11, first.experts)
    assert (fourth.objective.kind, fourth.objective.alpha, fourth.objective.chunk) == ("skew", 0.3, 7)  # type: ignore[union-attr]
    assert (second.seed, fourth.seed) == (1, 3)
    kept = config.model_dump(mode="json")
    assert validate_section(PipelineConfig, kept, "p.yaml") == config, "as the run directory keeps it"


def test_a_round_may_have_another_engine() -> None:
    teachers = {"memory": "2GiB", "workers": 3, "dtype": "bfloat16"}
    flight = {"engine": "flight", "address": "grpc://localhost:1"}
    rounds = [
        {},
        {"teachers": flight},
        {"teachers": {"engine": "vllm", "kv_cache_gib": 2}},
        {"teachers": {"workers": 4}},
    ]
    config = validate_section(PipelineConfig, changed("teachers", teachers) | {"rounds": rounds}, "p.yaml")
    first, elsewhere, vllm, more = (one.teachers for one in split_rounds(config))
    assert (first.scoring_workers, elsewhere.scoring_workers, vllm.scoring_workers, more.scoring_workers) == (
        3,
        0,
        3,
        4,
    )
    assert [one.dtype for one in (first, elsewhere, vllm, more)] == ["bfloat16"] * 4
    assert (elsewhere.address, vllm.kv_cache_gib) == ("grpc://localhost:1", 2)  # type: ignore[union-attr]
    assert first.memory == more.memory == 2 << 30  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        (0, ["p.yaml: rounds\n", "found:  0"]),
        ([{}], ["p.yaml: rounds\n", "at least 2"]),
        ([{"seed": 1}, {}], ["p.yaml: rounds.0\n", "found:  seed", "the pipeline as it stands"]),
        ([{}, {"trainr": {}}], ["rounds.1.trainr\n", "did you mean `trainer`?"]),
        ([{}, {}, {"trainer": {"stepz": 1}}], ["rounds.2.trainer.stepz\n", "an unknown key", "did you mean `steps`?"]),
        ([{}, {"trainer": {"steps": 0}}], ["rounds.1.trainer.steps\n", "found:  0"]),
        ([{}, {"student": {"model": "x"}}], ["rounds.1.student\n", "an unknown key"]),
        ([{}, {"experts": {"x": {"model": "m"}}}], ["rounds.1.experts.x.domain\n", "found:  nothing"]),
        ([{}, {"trainer": {"samples_per_step": 1}}], ["rounds.1.trainer.samples_per_step\n", "2 domains"]),
        ([{}, {"objective": {"kind": "top_k"}}], ["rounds.1.objective.kind\n", "top_k with teachers.payload"]),
    ],
)
def test_what_is_wrong_with_a_round_is_named_there(rounds: Any, words: list[str]) -> None:
    message = refusal(changed("rounds", rounds))
    assert all(word in message for word in words), message


# Without teachers


def test_a_pipeline_without_teachers_learns_from_rewards_alone() -> None:
    config = validate_section(PipelineConfig, ALONE, "p.yaml")
    assert (config.experts, config.teachers.payload, config.teachers.scoring_workers) == ({}, "none", 0)
    again = validate_section(PipelineConfig, yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json"))), "p.yaml")
    assert again == config


@pytest.mark.parametrize(
    ("change", "where", "found"),
    [
        ({"experts": VALID["experts"]}, "experts", "experts"),
        ({"domains": {"math": {**VALID["domains"]["math"], "teachers": "math"}}}, "domains.math.teachers", "a teacher"),
        ({"rounds": 2}, "rounds", "several"),
        ({"objective": {"kind": "none"}}, "objective.kind", "none without objective.reward"),
        ({"domains": {"math": {"prompts": "math.jsonl"}}}, "domains.math", "no reward"),
        ({"domains": VALID["domains"]}, "domains.code", "no reward"),
        ({"objective": {"reward": {}}}, "objective.kind", "adaptive_kl with teachers.payload none"),
        ({"teachers": {"payload": "none"}}, "teachers.payload", "none, with teachers.engine transformers"),
        ({"teachers": {}}, "experts", "{}"),
    ],
)
def test_what_a_pipeline_without_teachers_must_not_have(change: dict[str, Any], where: str, found: str) -> None:
    message = refusal(ALONE | change)
    assert message.startswith(f"p.yaml: {where}"), message
    assert f"found:  {found}" in message
