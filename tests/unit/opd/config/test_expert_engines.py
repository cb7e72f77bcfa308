"""An expert with an engine of its own, and a domain with an objective of its own: what a pipeline may say, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from opd.config import PipelineConfig, is_overlapped, split_rounds
from opd.config.teachers import OpenAITeachers, TransformersTeachers, VLLMTeachers
from opd.errors import ConfigError
from opd.settings.yaml_files import parse_yaml, validate_section

SERVER = {"base_url": "http://127.0.0.1:8000/v1", "model": "code"}
FAR: dict[str, Any] = {"kind": "openai", "payload": "sampled_logprobs", "servers": {"code": SERVER}}
DATA: dict[str, Any] = {
    "name": "n",
    "student": {"model": "base"},
    "experts": {name: {"model": name, "domain": name} for name in ("math", "code", "law")},
    "domains": {"math": {}, "code": {"objective": {"kind": "sampled"}}, "law": {}},
    "teachers": {"workers": 2, "dtype": "bfloat16"},
    "trainer": {"steps": 3, "samples_per_step": 6},
}


def with_engines(**engines: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(DATA)
    for name, engine in engines.items():
        data["experts"][name]["engine"] = engine
    return data


def read(data: dict[str, Any]) -> PipelineConfig:
    return validate_section(PipelineConfig, data, "p.yaml")


def refused(data: dict[str, Any]) -> list[str]:
    """Return the place, what was found, what is wanted."""
    with pytest.raises(ConfigError) as error:
        read(data)
    where, found, wanted, *_ = str(error.value).splitlines()
    return [where.removeprefix("p.yaml: "), found.removeprefix("  found:  "), wanted.removeprefix("  wanted: ")]


def test_experts_with_equal_engines_share_one() -> None:
    config = read(with_engines(code=FAR, law={"kind": "vllm", "workers": 3}, math={"kind": "vllm", "workers": 3}))
    assert [type(section) for section in config.engines] == [VLLMTeachers, OpenAITeachers]
    assert config.engine_of("law") == config.engine_of("math") != config.engine_of("code")
    plain = read(with_engines(code=FAR))
    assert [type(section) for section in plain.engines] == [TransformersTeachers, OpenAITeachers]
    assert plain.engines[0] is plain.teachers is plain.engine_of("math")
    assert is_overlapped(plain) and not is_overlapped(read(DATA)), "a server scores beside the trainer"


def test_an_own_engine_has_what_holds_for_all_and_its_own_keys() -> None:
    section = read(with_engines(law={"kind": "vllm", "kv_cache_gib": 3})).engine_of("law")
    assert isinstance(section, VLLMTeachers)
    assert (section.dtype, section.kv_cache_gib, section.workers) == ("bfloat16", 3, 1), "workers are an engine's own"


def test_a_pipeline_that_was_written_out_is_read_as_it_was() -> None:
    config = read(with_engines(code=FAR, law={"kind": "transformers", "memory": "2GiB"}))
    again = read(config.model_dump(mode="json"))
    assert again == config and again.engines == config.engines
    assert [part.engines for part in split_rounds(config.model_copy(update={"rounds": 2}))] == [config.engines] * 2


def test_the_registry_s_experts_may_have_engines_too() -> None:
    data = DATA | {"experts": {"use": ["math", "code"], "engines": {"code": FAR}}}
    assert [section.engine for section in read(data).engines] == ["transformers", "openai"]
    everyone = read(DATA | {"experts": {"use": "all", "engines": {"code": FAR}}})
    assert [section.engine for section in everyone.engines] == ["transformers", "openai"]
    data["experts"] = {"use": ["math"], "engines": {"code": FAR}}
    assert refused(data) == ["experts.engines.code", "code", "an expert of `use`: math"]


@pytest.mark.parametrize(
    ("engine", "where", "found", "wanted"),
    [
        ({}, ".kind", "nothing", "one of: transformers, vllm, openai, flight, text, trainer"),
        ({"kind": "none"}, ".kind", "'none'", "one of: transformers"),
        ({"kind": "vllm", "dtype": "float32"}, ".dtype", "float32", "nothing: teachers.dtype holds for every engine"),
        ({"kind": "vllm", "memory": "1GiB"}, ".memory", "1GiB, with experts.law.engine.kind vllm", "kind transformers"),
        ({"kind": "vllm", "worker": 1}, ".worker", "an unknown key", "one of: kind, payload"),
        ({"kind": "openai"}, ".payload", "hidden_states with experts.law.engine.kind openai", "sampled_logprobs or top_k"),
        (FAR, ".servers.law", "nothing", "base_url and model for each of the experts law, and no others"),
        ({"kind": "trainer"}, "teachers.engine", "trainer without student.lora", "student.lora"),
        ({"kind": "transformers", "gpu_memory": "1GiB"}, ".gpu_memory", "bytes with cluster.teacher_gpus 0", "0: on a CPU"),
    ],
)  # fmt: skip
def test_an_engine_that_is_wrong_is_refused(engine: dict[str, Any], where: str, found: str, wanted: str) -> None:
    said = refused(with_engines(law=engine))
    assert said[0] == (where if where.startswith("t") else f"experts.law.engine{where}")
    assert found in said[1] and wanted in said[2], said


@pytest.mark.parametrize(
    ("objective", "where", "wanted"),
    [
        ({"kind": "jsd", "chunk": 64}, ".chunk", "nothing: objective.chunk holds for every domain"),
        ({"kind": "jsd", "compile": True}, ".compile", "nothing"),
        ({"kind": "jsd", "extrapolate": 2.0}, ".extrapolate", "or domains.code.extrapolate"),
        ({"kind": "jsd", "reward": {}}, ".reward", "nothing: objective.reward"),
        ({"kind": "none"}, "", "two divergences"),
    ],
)
def test_what_holds_for_the_whole_merge_is_not_a_domain_s(objective: dict[str, Any], where: str, wanted: str) -> None:
    data = copy.deepcopy(DATA)
    data["domains"]["code"]["objective"] = objective
    said = refused(data)
    assert said[0] == f"domains.code.objective{where}" and wanted in said[2], said


def test_the_pipeline_of_the_page_is_read() -> None:
    page = (Path(__file__).parents[4] / "docs" / "engines.md").read_text(encoding="utf-8")
    config = read(parse_yaml(page.split("```yaml\n")[1].split("```")[0]))
    assert [section.engine for section in config.engines] == ["transformers", "vllm", "openai"]
    assert config.objective_of("law").kind == "sampled" and config.objective_of("math").kind == "adaptive_kl"
