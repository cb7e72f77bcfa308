"""An expert that only writes text: what a pipeline may say of it, and what is refused before anybody is asked."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from experts.model_dir import inspect_model
from opd.config import PipelineConfig
from opd.config.teachers import TextTeachers
from opd.errors import ConfigError, OpdError
from opd.settings.yaml_files import validate_section
from pipelines.build import num_workers
from pipelines.inputs.read import read_inputs
from pipelines.inputs.text_teachers import refuse_unfit_texts
from pipelines.placement import list_worker_groups
from pipelines.routes import RoutedExpert, preferred_domains, route_domains, text_routes
from pipelines.sizing.memory import estimate_memory
from pipelines.sizing.models import MergeModels, unhashed_expert
from pipelines.specs import text_spec
from tests.integration.conftest import two_domain_pipeline

WRITER: dict[str, Any] = {"kind": "text", "base_url": "http://127.0.0.1:8000/v1", "model": "far"}
DATA: dict[str, Any] = {
    "name": "n",
    "student": {"model": "base"},
    "experts": {"math": {"model": "math", "domain": "math"}, "law": {"domain": "law", "engine": WRITER}},
    "domains": {"math": {}, "law": {"objective": {"kind": "sft"}}},
    "trainer": {"steps": 3, "samples_per_step": 6},
}


def changed(**changes: Any) -> dict[str, Any]:
    """`experts__law__engine__steps=3` sets that key; `...` deletes it."""
    data = copy.deepcopy(DATA)
    for path, value in changes.items():
        *above, last = path.split("__")
        section = data
        for key in above:
            section = section.setdefault(key, {})
        if value is ...:
            del section[last]
        else:
            section[last] = value
    return data


def read(**changes: Any) -> PipelineConfig:
    return validate_section(PipelineConfig, changed(**changes), "p.yaml")


def routes_of(config: PipelineConfig, model_dir: Path) -> Any:
    info = inspect_model(model_dir)
    names = ["math", "law"] if config.domains["law"].teachers is None else ["math", "law", "other"]
    experts: dict[str, RoutedExpert] = {
        name: unhashed_expert(name, "law" if name == "other" else name, info) for name in names
    }
    return route_domains(config, experts)[0]


def test_an_expert_that_only_writes_text_needs_no_model_and_no_worker(tiny_model_dir: Path) -> None:
    config = read()
    section = config.engine_of("law")
    assert isinstance(section, TextTeachers) and (section.payload, section.scoring_workers) == ("text", 0)
    assert config.inline_experts["law"].own_dir is None
    assert validate_section(PipelineConfig, config.model_dump(mode="json"), "again.yaml") == config
    routes = routes_of(config, tiny_model_dir)
    assert list(text_routes(config, routes)) == ["law"] and not preferred_domains(config, routes)
    spec = text_spec(config, routes, (2,))
    assert spec is not None and spec.domains["law"].teaches_in(10**6) and not spec.domains["law"].compares


def test_a_discriminator_is_one_more_model_of_the_student_s_size(tiny_model_dir: Path) -> None:
    plain, judged = read(), read(objective__reward={"preference": {}})
    assert num_workers(judged) - num_workers(plain) == judged.trainer.ranks
    names = {name for group in list_worker_groups(judged) for name in group.names}
    assert {"discriminator rank 0", "discriminator rank 1"} <= names
    info = inspect_model(tiny_model_dir)
    models = MergeModels(student=info, scorers={}, scoring={})
    parts = {need.part: need.nbytes for need in estimate_memory(judged, models)}
    (discriminator,) = [nbytes for part, nbytes in parts.items() if part.startswith("discriminator")]
    assert discriminator > 16 * info.parameters
    both = read(objective__reward={"preference": {}, "baseline": "critic"})
    assert both.objective.judging_models == ("critic", "discriminator")
    routes = routes_of(judged, tiny_model_dir)
    assert preferred_domains(judged, routes) == {"law"}
    spec = text_spec(judged, routes, (2,))
    assert spec is not None and spec.domains["law"].compares


@pytest.mark.parametrize(
    ("changes", "where", "wanted"),
    [
        ({"experts__law__engine": ...}, "experts.law.model", "a directory, or an engine that only writes text"),
        ({"experts__law__base": "b"}, "experts.law.base", "the expert has no `model`"),
        ({"experts__law__engine__base_url": "http://far.example/v1"}, "experts.law.engine", "https://HOST/v1"),
        ({"experts__law__engine__payload": "top_k"}, "experts.law.engine.payload", "wanted: text"),
        ({"experts__law__engine__max_cost": 3}, "experts.law.engine.max_cost", "experts.law.engine.price as well"),
        ({"experts__law__engine__request": {"stream": True}}, "experts.law.engine.request", "no place of their own"),
        ({"experts__law__engine__api_key_env": "sk-1 2"}, "experts.law.engine.api_key_env", "a variable's name"),
        ({"teachers__payload": "text"}, "teachers.payload", "teachers.engine text"),
    ],
)  # fmt: skip
def test_what_a_pipeline_must_not_say(changes: dict[str, Any], where: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**changes)
    assert where in str(error.value).splitlines()[0] and wanted in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("changes", "where", "found"),
    [
        ({"domains__law__teachers": {"law": 1.0, "other": 1.0}, "experts__other": {"domain": "law", "engine": WRITER},
          "domains__law__objective": {"kind": "reverse_kl"}}, "domains.law.teachers", "2 teachers"),
        ({"domains__law__environment": {"name": "maze"}}, "domains.law", "episodes of several turns"),
        ({"experts__law__prompt": {"system": "x"}}, "experts.law.prompt", "a prompt of its own"),
        ({"teachers__mask_tokens": {"law": ["a"]}}, "teachers.mask_tokens.law", "tokens without loss"),
        ({"experts__law__engine__steps": 0}, "domains.law", "0 steps in which its expert's answers are learned"),
        ({"domains__law__reward": False, "objective__reward": {"preference": {}}}, "objective.reward.preference", "no domain"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_such_an_expert(
    changes: dict[str, Any], where: str, found: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read(**changes)
    # `route_domains` would refuse some of these first, for another reason.
    monkeypatch.setattr("pipelines.routes._refuse_unfit_engines", lambda *args: None)
    if "environment" in str(changes):
        monkeypatch.setattr(type(config.objective), "problem_with", lambda self, payload: None)
    monkeypatch.setattr(type(config.objective_of("law")).OBJECTIVE, "mixes", True)
    with pytest.raises(ConfigError) as error:
        refuse_unfit_texts(config, routes_of(config, tiny_model_dir))
    assert str(error.value).startswith(f"{where}\n") and found in str(error.value), str(error.value)


def test_a_domain_has_the_objective_for_text(tiny_model_dir: Path) -> None:
    config = read(domains__law__objective=...)
    with pytest.raises(ConfigError) as error:
        routes_of(config, tiny_model_dir)
    assert "domains.law" in str(error.value) and "{kind: sft}" in str(error.value)


@pytest.mark.parametrize(
    ("engine", "steps", "said"),
    [
        ({"max_calls": 39}, 20, "39, and up to 40 different prompts"),
        ({"max_calls": 40}, 20, ""),
        ({"max_calls": 26, "steps": 2}, 20, ""),
        ({"max_calls": 3, "steps": 2}, 20, "3, and up to 25 different prompts in 2 steps"),
    ],
)
def test_a_run_that_may_need_more_calls_than_it_may_make_is_refused(
    engine: dict[str, Any], steps: int, said: str, tmp_path: Path, make_model_dir: Any
) -> None:
    data = two_domain_pipeline(tmp_path, make_model_dir)
    data["experts"]["right"] = {"domain": "right-domain", "engine": WRITER | engine}
    data["domains"]["right-domain"]["objective"] = {"kind": "sft"}
    data["trainer"]["steps"] = steps
    config = validate_section(PipelineConfig, data, "p.yaml")
    if said:
        with pytest.raises(OpdError) as error:
            read_inputs(config)
        assert str(error.value).startswith("experts.right.engine.max_calls") and said in str(error.value)
    else:
        inputs = read_inputs(config)
        assert not inputs.routes["right-domain"][0].teacher.has_model
        assert inputs.routes["left-domain"][0].teacher.has_model
