"""Assign teachers to domains: those of `domains.*.teachers`, else the one expert whose `domain` it is.

If the target lies beyond the experts, or on the way to them, the start student is a teacher too, unless the trainer itself scores
with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experts.adapter import AdapterInfo
from experts.model_dir import ModelInfo
from opd.config import PipelineConfig, domain_extrapolation, trainer_has_start
from opd.config.domains import ExpertConfig
from opd.config.objectives import OBJECTIVES, find_objective_section
from opd.config.teachers import FlightTeachers, OpenAITeachers, Teachers, TextTeachers, TrainerTeachers
from opd.errors import ConfigError
from opd.records.types import Teacher, WeightedTeacher
from opd.settings.suggestions import did_you_mean

START = "start student"
"""Name of the start student as a teacher. It has a space, which no expert's name can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExpert:
    """An expert of this merge, from the registry or from the pipeline itself."""

    teacher: Teacher
    domain: str
    """The domain that it was trained for, also in the name that it has without efforts. The pipeline may let it serve other domains
    too."""
    info: ModelInfo
    """The model; for an adapter, its base."""
    adapter: AdapterInfo | None = None
    """The files of a LoRA adapter; None for a full model."""
    prompts: Path | None
    """File or directory of prompts with which it was registered."""


def route_domains(
    config: PipelineConfig, experts: Mapping[str, RoutedExpert]
) -> tuple[dict[str, tuple[WeightedTeacher, ...]], list[str]]:
    """Return the teachers of each domain, heaviest first, with weights that add up to 1; and notices for the user.

    Raises: ConfigError for a domain without a teacher, a name that is no expert, an expert that serves no domain, or
    several teachers under an objective that cannot mix them.
    """
    routes: dict[str, tuple[WeightedTeacher, ...]] = {}
    notices: list[str] = []
    for domain in config.domains:
        shares = _expert_weights(config, domain, experts)
        _refuse_unmixable(config, domain, shares)
        total = sum(shares.values())
        if abs(total - 1) > 1e-6:
            shown = ", ".join(f"{name} {weight / total:.3g}" for name, weight in shares.items())
            notices.append(f"domains.{domain}.teachers: weights add up to {total:g}, taken as {shown}")
        ordered = sorted(shares, key=lambda name: (-shares[name], name))
        routes[domain] = tuple(
            WeightedTeacher(teacher=experts[name].teacher, weight=shares[name] / total) for name in ordered
        )
    _refuse_idle(config, experts, {a.teacher.name for assigned in routes.values() for a in assigned})
    if len(config.engines) > 1 or config.own_objectives:
        for domain, assigned in routes.items():
            _refuse_unfit_engines(config, domain, assigned)
        _refuse_several_sizes(config, routes)
    return routes, notices


def find_expert_dir(config: PipelineConfig, expert: ExpertConfig) -> Path:
    """Return the directory of an expert that the pipeline itself describes; the student's for one that has none."""
    return expert.own_dir or config.student.model


def engines_by_teacher(config: PipelineConfig, assigned: Sequence[WeightedTeacher]) -> dict[str, Teachers]:
    """Return teacher's name -> engine, for the teachers of a domain. The start student has the engine of the heaviest expert."""
    engines = {a.teacher.name: config.engine_of(a.teacher.name) for a in assigned if a.teacher.name != START}
    return engines | {START: next(iter(engines.values()))}


def domain_payload(config: PipelineConfig, assigned: Sequence[WeightedTeacher]) -> str:
    """Return the payload of a domain's teachers, which is the same for all of them."""
    return next(iter(engines_by_teacher(config, assigned).values())).payload


def text_routes(
    config: PipelineConfig, routes: Mapping[str, tuple[WeightedTeacher, ...]]
) -> dict[str, tuple[str, TextTeachers]]:
    """Return domain -> name and engine of its expert, for domains whose expert only writes text."""
    found = {}
    for domain, assigned in routes.items():
        section = config.engine_of(assigned[0].teacher.name)
        if isinstance(section, TextTeachers):
            found[domain] = (assigned[0].teacher.name, section)
    return found


def preferred_domains(config: PipelineConfig, routes: Mapping[str, tuple[WeightedTeacher, ...]]) -> set[str]:
    """Return the domains that a discriminator rewards: those of text-only experts, with `objective.reward.preference`."""
    if config.objective.reward is None or config.objective.reward.preference is None:
        return set()
    return {domain for domain in text_routes(config, routes) if config.domains[domain].reward is not False}


def scoring_routes(
    config: PipelineConfig, routes: Mapping[str, tuple[WeightedTeacher, ...]], start: Teacher
) -> dict[str, tuple[WeightedTeacher, ...]]:
    """Return the teachers of each domain, with their weights.

    They are its experts and, where `extrapolate` is not 1, the start student, unless the trainer asks it.

    The target is prod_k expert_k^(lambda w_k) * start^(1 - lambda), normalised; lambda is the domain's `extrapolate`.
    """
    scoring = dict(routes)
    for domain, assigned in routes.items():
        factor = domain_extrapolation(config, domain)
        if factor != 1:
            experts = tuple(
                replace(weighted_teacher, weight=factor * weighted_teacher.weight) for weighted_teacher in assigned
            )
            itself = () if trainer_has_start(config) else (WeightedTeacher(teacher=start, weight=1 - factor),)
            scoring[domain] = (*experts, *itself)
    return scoring


def start_student_weights(config: PipelineConfig) -> dict[str, float]:
    """Return domain -> weight of the start student, for domains where the trainer scores with it instead of a teacher."""
    if not trainer_has_start(config):
        return {}
    factors = {domain: domain_extrapolation(config, domain) for domain in config.domains}
    return {domain: 1 - factor for domain, factor in factors.items() if factor != 1}


def base_teacher_weights(
    config: PipelineConfig, scoring: Mapping[str, tuple[WeightedTeacher, ...]]
) -> dict[str, dict[str, float]]:
    """Return name -> domain -> weight of the teachers with which the trainer's ranks score on the student's base, `START` among them.

    `scoring` is the result of `scoring_routes`.
    """
    weights: dict[str, dict[str, float]] = {}
    for domain, assigned in scoring.items():
        for weighted_teacher in assigned:
            if isinstance(config.engine_of(weighted_teacher.teacher.name), TrainerTeachers):
                weights.setdefault(weighted_teacher.teacher.name, {})[domain] = weighted_teacher.weight
    start = start_student_weights(config)
    return weights | ({START: start} if start else {})


def _expert_weights(config: PipelineConfig, domain: str, experts: Mapping[str, RoutedExpert]) -> dict[str, float]:
    """Return expert -> weight in the pipeline, without experts of weight 0."""
    named = config.domains[domain].teachers
    if named is None:
        return {_own_expert(config, domain, experts): 1.0}
    weights = {named: 1.0} if isinstance(named, str) else dict(named)
    key = f"domains.{domain}.teachers"
    for name in weights:
        if name not in experts:
            raise ConfigError.at(
                key,
                found=name,
                wanted=f"experts of this pipeline: {', '.join(experts)}",
                fix=did_you_mean(name, experts, "add it under `experts`"),
            )
    shares = {name: weight for name, weight in weights.items() if weight > 0}
    if not shares:
        raise ConfigError.at(key, found="weights of 0 only", wanted="at least one above 0", fix="raise one of them")
    return shares


def _refuse_unmixable(config: PipelineConfig, domain: str, shares: Mapping[str, float]) -> None:
    """Refuse teachers with positive weights, among them the start student of an `extrapolate` below 1, under an objective that cannot
    mix them. Raises: ConfigError."""
    objective, factor = config.objective_of(domain), domain_extrapolation(config, domain)
    if objective.OBJECTIVE.mixes or (len(shares) == 1 and factor >= 1):
        return
    mixing = " or ".join(kind for kind in OBJECTIVES if find_objective_section(kind).OBJECTIVE.mixes)
    if len(shares) > 1:
        raise ConfigError.at(
            f"domains.{domain}.teachers",
            found=f"{len(shares)} teachers with objective.kind {objective.kind}",
            wanted=f"one teacher, or objective.kind {mixing}",
            fix="give the domain one teacher or change the objective",
        )
    raise ConfigError.at(
        _name_extrapolation_key(config, domain),
        found=f"{factor:g} with objective.kind {objective.kind}",
        wanted=f"1 or more, or objective.kind {mixing}: the start student is a second teacher",
        fix="raise it or change the objective",
    )


def _name_extrapolation_key(config: PipelineConfig, domain: str) -> str:
    """Return the key of the pipeline that has a domain's `extrapolate`."""
    own = config.domains[domain].extrapolate is not None
    return f"domains.{domain}.extrapolate" if own else "objective.extrapolate"


def _refuse_unfit_engines(config: PipelineConfig, domain: str, assigned: Sequence[WeightedTeacher]) -> None:
    """Refuse a domain whose teachers' engines do not go together, or send what its objective cannot use. Raises: ConfigError."""
    engines = engines_by_teacher(config, assigned)
    sent = {a.teacher.name: engines[a.teacher.name].payload for a in assigned}
    if len(set(sent.values())) > 1:
        raise ConfigError.at(
            f"domains.{domain}.teachers",
            found=", ".join(f"{name} sends {payload}" for name, payload in sent.items()),
            wanted="teachers that send the same payload: one loss mixes them",
            fix="set the payload of an expert's engine to the other's, or give the domain one teacher",
        )
    sections = list(engines.values())
    differ = any(section != sections[0] for section in sections)
    if differ and any(isinstance(section, FlightTeachers) for section in sections):
        raise ConfigError.at(
            f"domains.{domain}.teachers",
            found=f"engines of several kinds: {', '.join(f'{a.teacher.name} {engines[a.teacher.name].engine}' for a in assigned)}",
            wanted="all teachers of the domain behind one address: an `opd teachers serve` answers for whole domains",
            fix="serve them together, or give the domain one teacher",
        )
    objective, payload = config.objective_of(domain), sections[0].payload
    problem = objective.problem_with(payload)
    if problem is not None:
        fitting = [kind for kind in OBJECTIVES if payload in find_objective_section(kind).PAYLOADS]
        own = config.domains[domain].objective is not None
        raise ConfigError.at(
            f"domains.{domain}.objective" if own else f"domains.{domain}",
            found=f"objective {objective.kind} and payload {payload} of {', '.join(sent)}",
            wanted=problem.message(),
            fix=f"set domains.{domain}.objective to {{kind: {' or '.join(fitting)}}}, or another payload of the expert's engine",
        )
    if domain_extrapolation(config, domain) != 1:
        _refuse_extrapolation(config, domain, sections[0])


def _refuse_extrapolation(config: PipelineConfig, domain: str, section: Teachers) -> None:
    """Refuse a target with the start student that cannot be computed from what the domain's engine sends. Raises: ConfigError."""
    problem = config.objective_of(domain).problem_with_extrapolation(section.payload)
    expected = None if problem is None else problem.message()
    if expected is None and isinstance(section, OpenAITeachers) and not trainer_has_start(config):
        expected = "1, another engine, or student.lora: the start student scores every response, and has no server"
    if expected is not None:
        raise ConfigError.at(
            _name_extrapolation_key(config, domain),
            found=f"{domain_extrapolation(config, domain):g} with engine {section.engine} and payload {section.payload}",
            wanted=expected,
            fix=f"set domains.{domain}.extrapolate to 1",
        )


def _refuse_several_sizes(config: PipelineConfig, routes: Mapping[str, Sequence[WeightedTeacher]]) -> None:
    """Refuse an engine of which two domains want different numbers of tokens, and ranks that would score for two payloads.

    Raises: ConfigError.
    """
    sizes: list[tuple[Teachers, str]] = []
    for domain, assigned in routes.items():
        for section in engines_by_teacher(config, assigned).values():
            other = next((name for known, name in sizes if known == section), domain)
            sizes.append((section, domain))
            k, other_k = config.objective_of(domain).top_k, config.objective_of(other).top_k
            if k != other_k:
                raise ConfigError.at(
                    f"domains.{domain}.objective.k",
                    found=f"{k}, and {other_k} in domain {other}, of teachers of one engine ({section.engine})",
                    wanted="the same number in all domains of an engine",
                    fix="set both to the same, or give one of the experts an engine of its own",
                )
    on_base = {
        domain
        for domain, assigned in routes.items()
        if domain in start_student_weights(config)
        or any(isinstance(section, TrainerTeachers) for section in engines_by_teacher(config, assigned).values())
    }
    payloads = {domain_payload(config, routes[domain]): domain for domain in sorted(on_base)}
    if len(payloads) > 1:
        raise ConfigError.at(
            "domains",
            found=", ".join(f"{domain} with payload {payload}" for payload, domain in payloads.items()),
            wanted="one payload in all domains that the trainer's ranks score themselves",
            fix="set the payload of their experts' engines to the same",
        )


def _own_expert(config: PipelineConfig, domain: str, experts: Mapping[str, RoutedExpert]) -> str:
    """Return the expert of a domain; without one that of all efforts of the domain. Raises: ConfigError."""
    names = [name for name, expert in experts.items() if expert.domain == domain]
    names = names or [name for name, expert in experts.items() if expert.domain == config.split_effort(domain)[0]]
    if len(names) == 1:
        return names[0]
    if names:
        raise ConfigError.at(
            f"experts.{names[1]}.domain",
            found=f"{domain}, which {names[0]} has already",
            wanted="one expert a domain, or weights for several",
            fix=f"leave one of the two out, or set domains.{domain}.teachers: {{{names[0]}: 0.5, {names[1]}: 0.5}}",
        )
    served = ", ".join(f"{n} → {e.domain}" for n, e in experts.items()) or "none"
    raise ConfigError.at(
        f"domains.{domain}",
        found=f"no expert (experts: {served})",
        wanted="an expert for each domain",
        fix=f"register one with `opd experts add NAME --model DIR --domain {domain}`, or name one: domains.{domain}.teachers",
    )


def _refuse_idle(config: PipelineConfig, experts: Mapping[str, RoutedExpert], used: set[str]) -> None:
    for name, expert in experts.items():
        if name not in used:
            named = expert.domain in config.domains
            raise ConfigError.at(
                f"experts.{name}" if named else f"experts.{name}.domain",
                found=f"an expert that scores no domain (domains.{expert.domain}.teachers names others)"
                if named
                else expert.domain,
                wanted=f"one of the pipeline's domains: {', '.join(config.domains)}",
                fix=f"name it under domains.{expert.domain}.teachers or leave the expert out"
                if named
                else f"add `{expert.domain}` under `domains` or leave the expert out",
            )
