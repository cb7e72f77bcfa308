"""A merge with several engines, seen engine by engine; and which teachers, payloads and objectives go together in a domain."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from experts.model_dir import inspect_model
from opd.config import PipelineConfig
from opd.errors import ConfigError
from opd.records.types import Teacher, WeightedTeacher
from opd.settings.yaml_files import validate_section
from pipelines.build import num_workers
from pipelines.placement import list_worker_groups
from pipelines.routes import START, RoutedExpert, base_teacher_weights, route_domains, scoring_routes
from pipelines.sizing.memory import estimate_memory, fullest_workers, head_sizes, row_bytes, sends_heads
from pipelines.sizing.models import MergeModels
from pipelines.specs import base_scoring, pool_spec
from pipelines.teacher_groups import TeacherGroup, divide_by_engine

FAR: dict[str, Any] = {
    "kind": "openai",
    "payload": "sampled_logprobs",
    "servers": {"code": {"base_url": "http://127.0.0.1:8000/v1", "model": "code"}},
}
ENGINES: dict[str, Any] = {"code": FAR, "law": {"kind": "vllm", "workers": 2, "tensor_parallel_size": 2}}


def pipeline(engines: dict[str, Any] | None = None, **more: Any) -> PipelineConfig:
    data: dict[str, Any] = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {name: {"model": name, "domain": name} for name in ("math", "code", "law")},
        "domains": {"math": {}, "code": {"objective": {"kind": "sampled"}}, "law": {}},
        "trainer": {"steps": 3, "samples_per_step": 6},
    }
    for name, engine in (ENGINES if engines is None else engines).items():
        data["experts"][name]["engine"] = engine
    for key, value in copy.deepcopy(more).items():
        data[key] = data.get(key, {}) | value
    return validate_section(PipelineConfig, data, "p.yaml")


@pytest.fixture(scope="module")
def experts(tiny_model_dir: Path) -> dict[str, RoutedExpert]:
    info = inspect_model(tiny_model_dir)
    return {
        name: RoutedExpert(
            teacher=Teacher(name=name, model_dir=Path(name), digest=name), domain=name, info=info, prompts=None
        )
        for name in ("math", "code", "law")
    }


def scoring_of(config: PipelineConfig, experts: dict[str, RoutedExpert]) -> dict[str, tuple[WeightedTeacher, ...]]:
    routes, _ = route_domains(config, experts)
    return scoring_routes(config, routes, Teacher(name=START, model_dir=Path("base")))


def models_of(config: PipelineConfig, experts: dict[str, RoutedExpert]) -> MergeModels:
    info = experts["math"].info
    return MergeModels(student=info, scorers=experts, scoring=scoring_of(config, experts))


def refused(config: PipelineConfig, experts: dict[str, RoutedExpert]) -> str:
    with pytest.raises(ConfigError) as error:
        route_domains(config, experts)
    return str(error.value)


def test_a_merge_with_teachers_alike_is_one_group_with_the_very_pipeline(experts: dict[str, RoutedExpert]) -> None:
    config = pipeline({}, domains={"code": {}})
    scoring = scoring_of(config, experts)
    (group,) = divide_by_engine(config, scoring)
    assert group.config is config and group.scoring is scoring
    assert group == TeacherGroup(config=config, scoring=scoring)


def test_one_engine_of_all_experts_is_theirs_and_not_that_of_the_section(experts: dict[str, RoutedExpert]) -> None:
    own = {name: {"kind": "vllm"} for name in ("math", "code", "law")}
    config = pipeline(own, domains={"code": {}})
    (group,) = divide_by_engine(config, scoring_of(config, experts))
    assert (config.teachers.engine, group.config.teachers.engine) == ("transformers", "vllm")


def test_an_average_of_the_student_alone_needs_no_scoring_worker(experts: dict[str, RoutedExpert]) -> None:
    config = pipeline({}, domains={"code": {}})
    average = {name: e.model_copy(update={"model": "student", "ema": 0.9}) for name, e in config.inline_experts.items()}
    config = config.model_copy(update={"experts": average})
    groups = divide_by_engine(config, scoring_of(config, experts))
    started = sum(group.config.teachers.scoring_workers for group in groups)
    assert started == 0 and num_workers(config) == config.rollout.workers + config.trainer.ranks


def test_each_group_has_its_engine_its_teachers_and_its_workers(experts: dict[str, RoutedExpert]) -> None:
    config = pipeline()
    groups = divide_by_engine(config, scoring_of(config, experts))
    assert [(group.config.teachers.engine, list(group.scoring)) for group in groups] == [
        ("transformers", ["math"]), ("openai", ["code"]), ("vllm", ["law"]),
    ]  # fmt: skip
    assert [group.first_worker for group in groups] == [0, 1, 2]
    # Two vLLM workers of two processes each compute beside a worker of transformers; a server's worker takes no core.
    assert [group.other_processes for group in groups] == [4, 5, 1]
    assert [group.config.engines for group in groups] == [[group.config.teachers] for group in groups]
    spec = pool_spec(groups[2].config, 76, first_worker=2, other_processes=1)
    assert (spec.engine, spec.workers, spec.first_worker, spec.scorer.payload) == ("vllm", 2, 2, "hidden_states")
    assert num_workers(config) == 1 + 1 + 1 + 2 + config.trainer.ranks
    names = [
        name for group in list_worker_groups(config) for seat in group.seats for name in (w.name for w in seat.workers)
    ]
    assert sorted(name for name in names if name.startswith("teacher")) == [f"teacher worker {i}" for i in range(4)]


def test_sums_are_over_the_engines(experts: dict[str, RoutedExpert]) -> None:
    config = pipeline()
    models = models_of(config, experts)
    needs = estimate_memory(config, models)
    weights = [need.nbytes for need in needs if need.part == "teachers: weights"]
    alone = [
        need.nbytes
        for name in ("math", "law")
        for need in estimate_memory(
            pipeline({"law": ENGINES["law"]} if name == "law" else {}, domains={"code": {}}),
            models_of(pipeline({}, domains={"code": {}}), experts),
        )
        if need.part == "teachers: weights"
    ]
    assert len(weights) == 2 and weights[1] == alone[-1], "transformers here, vLLM here, nothing for the server"
    assert sends_heads(config) and len(head_sizes(config, models)) == 2, "the server's teacher sends no head"
    assert row_bytes(config, models) == row_bytes(pipeline({}, domains={"code": {}}), models), "the largest payload"
    assert fullest_workers(config, models)["scoring worker"] > weights[1] // 2


def test_start_student_is_asked_where_the_domain_s_expert_is(experts: dict[str, RoutedExpert]) -> None:
    config = pipeline(domains={"law": {"extrapolate": 1.5}})
    groups = divide_by_engine(config, scoring_of(config, experts))
    assert [a.teacher.name for a in groups[2].scoring["law"]] == ["law", START]
    lora = pipeline(student={"model": "base", "lora": {}}, domains={"law": {"extrapolate": 1.5}})
    scoring = scoring_of(lora, experts)
    assert base_teacher_weights(lora, scoring) == {START: {"law": -0.5}}
    made = base_scoring(lora, scoring)
    assert made is not None and made.payload == "hidden_states"


@pytest.mark.parametrize(
    ("engines", "domains", "where", "wanted"),
    [
        ({"code": FAR}, {"code": {}}, "domains.code", "objective.kind adaptive_kl needs teachers.payload hidden_states"),
        (ENGINES, {"math": {"objective": {"kind": "top_k"}}}, "domains.math.objective", "needs teachers.payload top_k"),
        (ENGINES, {"math": {"teachers": {"math": 0.5, "code": 0.5}}}, "domains.math.teachers", "send the same payload"),
        (ENGINES, {"code": {"objective": {"kind": "sampled"}, "extrapolate": 2.0}}, "domains.code.extrapolate", "no server"),
        (
            {n: {"kind": "vllm", "payload": "top_k"} for n in ("code", "law")},
            {"code": {"objective": {"kind": "top_k", "k": 8}}, "law": {"objective": {"kind": "top_k", "k": 4}}},
            "domains.law.objective.k", "the same number in all domains of an engine",
        ),
        (
            {"code": {"kind": "flight", "address": "grpc://127.0.0.1:9"}},
            {"code": {"teachers": {"math": 0.5, "code": 0.5}, "objective": {"kind": "reverse_kl"}}},
            "domains.code.teachers", "all teachers of the domain behind one address",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_anything_is_computed(
    experts: dict[str, RoutedExpert], engines: dict[str, Any], domains: dict[str, Any], where: str, wanted: str
) -> None:
    said = refused(pipeline(engines, domains=domains), experts)
    assert said.splitlines()[0] == where, said
    assert wanted in said and "fix:" in said, said
