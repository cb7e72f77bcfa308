"""A domain's scorers: by default, by name, by weights; and what a pipeline may not say about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experts.model_dir import inspect_model
from opd.config import PipelineConfig, load_pipeline
from opd.config.objectives import OBJECTIVES, find_objective_section
from opd.errors import ConfigError
from opd.records.types import Teacher, WeightedTeacher
from opd.settings.yaml_files import validate_section
from pipelines.inputs.read import read_inputs
from pipelines.routes import START, RoutedExpert, route_domains, scoring_routes, start_student_weights

EXPERTS = {"algebra": "math", "proofs": "math2", "code": "code"}
"""Expert -> its own domain."""


@pytest.fixture(scope="module")
def info(tiny_model_dir: Path) -> Any:
    return inspect_model(tiny_model_dir)


PAYLOADS = {"sampled": "sampled_logprobs", "top_k": "top_k", "aligned_kl": "aligned_states"}


def routed(
    info: Any, domains: dict[str, Any], experts: dict[str, str] = EXPERTS, **objective: Any
) -> tuple[dict[str, list[tuple[str, float]]], list[str]]:
    """Domain -> names and weights, and the notices; `domains` are values of `domains.*.teachers`, None for none."""
    config = validate_section(
        PipelineConfig,
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {name: {"model": name, "domain": domain} for name, domain in experts.items()},
            "domains": {d: {} if teachers is None else {"teachers": teachers} for d, teachers in domains.items()},
            "teachers": {"payload": PAYLOADS.get(objective.get("kind", ""), "hidden_states")},
            "objective": objective,
            "trainer": {"steps": 1, "samples_per_step": 8},
        },
        "p.yaml",
    )  # fmt: skip
    made = {
        name: RoutedExpert(teacher=Teacher(name=name, model_dir=Path(name)), domain=domain, info=info, prompts=None)
        for name, domain in experts.items()
    }
    routes, notices = route_domains(config, made)
    assert all(a.teacher is made[a.teacher.name].teacher for part in routes.values() for a in part)
    return {d: [(a.teacher.name, a.weight) for a in part] for d, part in routes.items()}, notices


def refused(info: Any, domains: dict[str, Any], experts: dict[str, str] = EXPERTS, **objective: Any) -> list[str]:
    """The four lines of the error: where, found, wanted, fix."""
    with pytest.raises(ConfigError) as error:
        routed(info, domains, experts, **objective)
    return [line.strip() for line in str(error.value).splitlines()]


OWN = {"math": None, "math2": None, "code": None}


def test_a_domain_goes_to_the_expert_whose_domain_it_is(info: Any) -> None:
    assert routed(info, OWN) == ({"math": [("algebra", 1.0)], "math2": [("proofs", 1.0)], "code": [("code", 1.0)]}, [])


def test_a_domain_goes_to_the_expert_it_names(info: Any) -> None:
    routes, notices = routed(info, OWN | {"math": "proofs", "math2": "algebra"})
    assert routes == {"math": [("proofs", 1.0)], "math2": [("algebra", 1.0)], "code": [("code", 1.0)]}
    assert notices == []


def test_one_expert_serves_several_domains(info: Any) -> None:
    routes, _ = routed(info, {"math": None, "other": "algebra"}, {"algebra": "math"})
    assert routes == {"math": [("algebra", 1.0)], "other": [("algebra", 1.0)]}


def test_the_heaviest_comes_first_and_names_decide_between_equals(info: Any) -> None:
    for given in ({"algebra": 0.2, "code": 0.3, "proofs": 0.5}, {"proofs": 0.5, "code": 0.3, "algebra": 0.2}):
        routes, notices = routed(info, {"math": given})
        assert routes == {"math": [("proofs", 0.5), ("code", 0.3), ("algebra", 0.2)]}
        assert notices == []
    routes, _ = routed(info, {"math": {"proofs": 0.25, "code": 0.25, "algebra": 0.5}})
    assert [name for name, _ in routes["math"]] == ["algebra", "code", "proofs"]


def test_weights_are_normalised_and_the_user_is_told(info: Any) -> None:
    routes, notices = routed(info, OWN | {"math": {"algebra": 3, "proofs": 1}})
    assert routes["math"] == [("algebra", 0.75), ("proofs", 0.25)]
    assert notices == ["domains.math.teachers: weights add up to 4, taken as algebra 0.75, proofs 0.25"]
    routes, notices = routed(info, OWN | {"math": {"algebra": 0.1, "proofs": 0.1}})
    assert routes["math"] == [("algebra", 0.5), ("proofs", 0.5)]
    assert notices == ["domains.math.teachers: weights add up to 0.2, taken as algebra 0.5, proofs 0.5"]


def test_what_adds_up_to_one_but_for_rounding_is_not_worth_a_notice(info: Any) -> None:
    third = 1 / 3
    routes, notices = routed(info, {"math": {"algebra": third, "proofs": third, "code": third}})
    assert sum(weight for _, weight in routes["math"]) == pytest.approx(1, abs=1e-15)
    assert notices == []


def test_a_teacher_of_weight_0_is_left_out(info: Any) -> None:
    routes, notices = routed(info, OWN | {"math": {"algebra": 1.0, "code": 0}}, kind="jsd")
    assert routes["math"] == [("algebra", 1.0)]
    assert notices == []
    where, found, *_ = refused(info, {"math": {"algebra": 1.0, "code": 0.0}, "math2": None})
    assert (where, found) == ("experts.code.domain", "found:  code"), "weight 0 is no use of an expert"


def test_weights_of_0_only_are_refused(info: Any) -> None:
    assert refused(info, OWN | {"math": {"algebra": 0, "code": 0}}) == [
        "domains.math.teachers",
        "found:  weights of 0 only",
        "wanted: at least one above 0",
        "fix:    raise one of them",
    ]


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf"), "much"])
def test_weights_that_are_none_are_refused_with_their_field(weight: Any, info: Any) -> None:
    assert "domains.math.teachers" in refused(info, OWN | {"math": {"algebra": 1, "proofs": weight}})[0]


def test_no_weights_at_all_are_refused(info: Any) -> None:
    assert "domains.math.teachers" in refused(info, OWN | {"math": {}})[0]


@pytest.mark.parametrize("given", ["algebr", {"code": 0.5, "algebr": 0.5}, {"code": 1, "algebr": 0}])
def test_an_unknown_name_gets_the_nearest(given: Any, info: Any) -> None:
    assert refused(info, OWN | {"math": given}) == [
        "domains.math.teachers",
        "found:  algebr",
        "wanted: experts of this pipeline: algebra, proofs, code",
        "fix:    did you mean `algebra`?",
    ]


def test_an_unknown_name_like_no_other_can_be_added(info: Any) -> None:
    assert refused(info, OWN | {"math": "zzz"})[3] == "fix:    add it under `experts`"


@pytest.mark.parametrize("kind", sorted({*OBJECTIVES} - {"none", "sft"}))
def test_only_sums_over_teachers_mix(kind: str, info: Any) -> None:
    domains = OWN | {"math": {"algebra": 0.5, "proofs": 0.5}}
    if find_objective_section(kind).OBJECTIVE.mixes:
        assert routed(info, domains, kind=kind)[0]["math"] == [("algebra", 0.5), ("proofs", 0.5)]
    else:
        assert refused(info, domains, kind=kind) == [
            "domains.math.teachers",
            f"found:  2 teachers with objective.kind {kind}",
            "wanted: one teacher, or objective.kind reverse_kl or adaptive_kl or sampled",
            "fix:    give the domain one teacher or change the objective",
        ]
        assert routed(info, OWN | {"math": {"algebra": 2}}, kind=kind)[0]["math"] == [("algebra", 1.0)]


def test_an_expert_that_scores_nothing_is_refused(info: Any) -> None:
    assert refused(info, OWN | {"math": "proofs"}) == [
        "experts.algebra",
        "found:  an expert that scores no domain (domains.math.teachers names others)",
        "wanted: one of the pipeline's domains: math, math2, code",
        "fix:    name it under domains.math.teachers or leave the expert out",
    ]
    assert refused(info, {"math": None, "code": None}) == [
        "experts.proofs.domain",
        "found:  math2",
        "wanted: one of the pipeline's domains: math, code",
        "fix:    add `math2` under `domains` or leave the expert out",
    ]


def test_a_domain_without_an_expert_is_refused(info: Any) -> None:
    assert refused(info, OWN | {"poems": None}) == [
        "domains.poems",
        "found:  no expert (experts: algebra → math, proofs → math2, code → code)",
        "wanted: an expert for each domain",
        "fix:    register one with `opd experts add NAME --model DIR --domain poems`, or name one: domains.poems.teachers",
    ]


def test_two_experts_of_one_domain_need_weights(info: Any) -> None:
    both = {"algebra": "math", "proofs": "math"}
    where, found, _, fix = refused(info, {"math": None}, both)
    assert (where, found) == ("experts.proofs.domain", "found:  math, which algebra has already")
    assert fix.endswith("set domains.math.teachers: {algebra: 0.5, proofs: 0.5}")
    # The way out works as it is written.
    routes, _ = routed(info, {"math": {"algebra": 0.5, "proofs": 0.5}}, both)
    assert routes == {"math": [("algebra", 0.5), ("proofs", 0.5)]}


# As the rest of a merge sees it


def test_the_student_is_measured_against_the_heaviest(world: Any) -> None:
    world.data["domains"]["reverse"]["teachers"] = {"rev": 1, "up": 3}
    inputs = read_inputs(load_pipeline(world.write()))
    assert [(a.teacher.name, a.weight) for a in inputs.routes["reverse"]] == [("up", 0.75), ("rev", 0.25)]
    assert {d: t.name for d, t in inputs.teachers.items()} == {"reverse": "up", "upper": "up"}
    assert set(inputs.experts) == {"rev", "up"}
    assert inputs.warnings == ("domains.reverse.teachers: weights add up to 4, taken as rev 0.25, up 0.75",)


# Beyond the experts


def scored(world: Any) -> dict[str, list[tuple[str, float]]]:
    inputs = read_inputs(load_pipeline(world.write()))
    return {d: [(a.teacher.name, round(a.weight, 9)) for a in part] for d, part in inputs.scoring.items()}


def test_the_start_student_scores_where_the_target_lies_beyond_the_experts(world: Any) -> None:
    inputs = read_inputs(load_pipeline(world.write()))
    assert inputs.scoring == inputs.routes and inputs.scorers == inputs.experts
    world.data["objective"] = {"extrapolate": 1.25}
    world.data["domains"]["reverse"]["teachers"] = {"rev": 0.75, "up": 0.25}
    start = ("start student", -0.25)
    assert scored(world) == {
        "reverse": [("rev", 0.9375), ("up", 0.3125), start],
        "upper": [("up", 1.25), start],
    }
    inputs = read_inputs(load_pipeline(world.write()))
    assert set(inputs.experts) == {"rev", "up"} and set(inputs.scorers) == {"rev", "up", "start student"}
    assert {d: [a.weight for a in part] for d, part in inputs.routes.items()} == {"reverse": [0.75, 0.25], "upper": [1]}
    (itself,) = (a.teacher for a in inputs.scoring["upper"] if a.weight < 0)
    assert itself.model_dir.samefile(world.root / "base") and itself.digest


def test_a_domain_has_its_own_factor(world: Any) -> None:
    world.data["objective"] = {"extrapolate": 1.5}
    world.data["domains"]["reverse"]["extrapolate"] = 1
    assert scored(world) == {"reverse": [("rev", 1)], "upper": [("up", 1.5), ("start student", -0.5)]}
    del world.data["objective"]
    world.data["domains"]["upper"]["extrapolate"] = 2
    assert scored(world) == {"reverse": [("rev", 1)], "upper": [("up", 2), ("start student", -1)]}


def test_a_lora_student_is_asked_by_the_trainer_and_not_by_a_teacher(world: Any) -> None:
    world.data["objective"] = {"extrapolate": 1.25}
    world.data["domains"]["reverse"]["extrapolate"] = 1
    world.data["student"]["lora"] = {"r": 4}
    assert scored(world) == {"reverse": [("rev", 1)], "upper": [("up", 1.25)]}
    config = load_pipeline(world.write())
    assert start_student_weights(config) == {"upper": -0.25}
    assert set(read_inputs(config).scorers) == {"rev", "up"}
    # A baseline is known before anything is trained.
    world.data["objective"] |= {"kind": "sampled", "baseline": "leave_one_out"}
    world.data["teachers"] = {"payload": "sampled_logprobs"}
    assert scored(world)["upper"] == [("up", 1.25), ("start student", -0.25)]
    assert start_student_weights(load_pipeline(world.write())) == {}


def with_efforts(**more: Any) -> PipelineConfig:
    data = {
        "name": "n",
        "student": {"model": "base"},
        "experts": {
            "quick": {"model": "a", "domain": "math", "effort": "low"},
            "whole": {"model": "b", "domain": "math"},
        },
        "domains": {"math": {}},
        "efforts": {"low": {}, "max": {}},
        "trainer": {"steps": 1, "samples_per_step": 8},
    }
    return validate_section(PipelineConfig, data | more, "p.yaml")


def test_an_expert_without_an_effort_teaches_those_that_have_none_of_their_own(info: Any) -> None:
    config = with_efforts()
    made = {
        name: RoutedExpert(teacher=Teacher(name=name, model_dir=Path(name)), domain=e.domain, info=info, prompts=None)
        for name, e in config.inline_experts.items()
    }
    routes, _ = route_domains(config, made)
    assert {d: a[0].teacher.name for d, a in routes.items()} == {"math-low": "quick", "math-max": "whole"}


def test_a_target_on_the_way_to_an_expert_has_the_start_student_as_a_second_teacher(info: Any) -> None:
    config = with_efforts(objective={"extrapolate": 0.25})
    expert, start = (Teacher(name=name, model_dir=Path(name)) for name in ("whole", START))
    scoring = scoring_routes(config, {"math-max": (WeightedTeacher(teacher=expert, weight=1.0),)}, start)
    assert [(a.teacher.name, a.weight) for a in scoring["math-max"]] == [("whole", 0.25), (START, 0.75)]


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_an_objective_that_cannot_mix_has_no_target_on_the_way(info: Any, kind: str) -> None:
    lines = refused(info, {"code": None}, {"code": "code"}, kind=kind, extrapolate=0.5)
    assert "objective.extrapolate" in lines[0] and f"0.5 with objective.kind {kind}" in lines[1]
    assert "reverse_kl" in lines[2]
    assert routed(info, {"code": None}, {"code": "code"}, kind=kind, extrapolate=1.5)[0]
