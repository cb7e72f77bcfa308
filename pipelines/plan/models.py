"""The models of a planned merge: as `opd check` reads them where they are here, else made from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from experts.adapter import AdapterInfo, inspect_adapter, named_base
from experts.json_files import read_model
from experts.registry import Registry, default_root
from opd.config import PipelineConfig
from opd.config.domains import ExpertConfig, RegisteredExperts
from opd.config.teachers import NoTeachers
from opd.errors import ConfigError
from opd.models.lora import ADAPTER_CONFIG, LoraConfig, LoraSize
from opd.prompts.balance import round_counts, samples_by_weight
from pipelines.inputs.base_experts import refuse_other_bases
from pipelines.routes import START, RoutedExpert, route_domains, scoring_routes
from pipelines.sizing.models import (
    MergeModels,
    has_weights,
    locate_file,
    model_facts,
    read_shape,
    refuse_past_context,
    unhashed_expert,
)
from pipelines.sizing.shape import Shape


class _Adapter(LoraConfig):
    target_modules: list[str] | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models of a merge."""

    merge: MergeModels
    """The facts from which memory is estimated, as `opd check` has them, but without prompts."""
    student: Shape
    scorers: Mapping[str, Shape]
    """Name of each teacher -> its shape; that of an adapter is the shape of its base."""
    samples: Mapping[str, int]
    """Domain -> responses of a step."""
    notes: tuple[str, ...]
    """Sentences for people about models that had to be guessed."""

    def rows_by_scorer(self) -> dict[str, int]:
        """Return the rows that each teacher scores in a step, by its name."""
        rows = dict.fromkeys(self.scorers, 0)
        for domain, assigned in self.merge.scoring.items():
            for weighted_teacher in assigned:
                rows[weighted_teacher.teacher.name] += self.samples[domain]
        return rows

    @property
    def target_rows(self) -> int:
        """Target rows of a step: one for each response and each teacher that scores it."""
        return sum(self.rows_by_scorer().values())


def read_models(config: PipelineConfig) -> Models:
    """Read configs of student and experts. Raises: OpdError for a config that is missing or has no formulas."""
    shape = read_shape(config.student.model)
    student = model_facts(config.student.model, shape)
    refuse_past_context(config, student)
    shapes, experts, notes = {START: shape}, dict[str, RoutedExpert](), list[str]()
    for name, expert, expert_shape in _expert_shapes(config, shape, notes):
        experts[name], shapes[name] = expert, expert_shape
    refuse_other_bases(config, experts)
    routes = {} if isinstance(config.teachers, NoTeachers) else route_domains(config, experts)[0]
    start = unhashed_expert(START, "", student)
    scoring = scoring_routes(config, routes, start.teacher)
    everyone = experts | {START: start}
    names = [weighted_teacher.teacher.name for assigned in scoring.values() for weighted_teacher in assigned]
    scorers = {name: everyone[name] for name in dict.fromkeys(names)}
    lora = config.student.lora
    if lora is not None:
        trained, pushed = shape.lora_numbers(lora.r, None if isinstance(lora.targets, str) else lora.targets)
    merge = MergeModels(
        student=student,
        scorers=scorers,
        scoring=scoring,
        lora=None if lora is None else LoraSize(trained=trained, pushed=pushed),
        bodies={expert.info.path: shapes[name].body for name, expert in everyone.items()},
    )
    samples, scorer_shapes = _samples_by_domain(config), {name: shapes[name] for name in scorers}
    return Models(merge=merge, student=shape, scorers=scorer_shapes, samples=samples, notes=tuple(notes))


def has_all_weights(config: PipelineConfig) -> bool:
    """Return True if student, experts and their bases are all here with their weights. Raises: OpdError for a bad registry or adapter."""
    directories = [config.student.model]
    if isinstance(config.experts, RegisteredExperts):
        registry = Registry(config.registry or default_root())
        names = registry.names() if config.experts.use == "all" else config.experts.use
        if not set(names) <= set(registry.names()):
            return False
        directories += [Path(registry.get(name).info.path) for name in names]
    else:
        for expert in config.experts.values():
            model = expert.own_dir
            if model is None:
                continue
            is_adapter = (model / ADAPTER_CONFIG).is_file()
            base = expert.base or (named_base(model) if is_adapter else None)
            directories += [model, base] if base else [model]
    return all(map(has_weights, directories))


def _samples_by_domain(config: PipelineConfig) -> dict[str, int]:
    """Return the responses of each domain in an ordinary step, as `opd merge` deals them out."""
    total = config.trainer.samples_per_step // config.rollout.n
    prompts = round_counts(samples_by_weight(total, config.domain_weights), total, draw=0.5)
    return {name: config.rollout.n * count for name, count in prompts.items()}


def _expert_shapes(
    config: PipelineConfig, student: Shape, notes: list[str]
) -> Iterator[tuple[str, RoutedExpert, Shape]]:
    """Yield name, expert and shape of each expert. Experts that are not registered yet are planned as full models of the student's
    shape, and `notes` gets a sentence about them. Raises: OpdError."""
    for name, expert_config in config.inline_experts.items():
        if expert_config.own_dir is None:
            yield name, unhashed_expert(name, expert_config.domain, model_facts(config.student.model, student)), student
        else:
            yield (name, *_inline_model(name, expert_config.own_dir, expert_config))
    if not isinstance(config.experts, RegisteredExperts):
        return
    registry = Registry(config.registry or default_root())
    registered_names = registry.names()
    missing = []
    for name in registered_names if config.experts.use == "all" else config.experts.use:
        if name in registered_names:
            manifest = registry.get(name)
            expert = unhashed_expert(name, manifest.domain, manifest.info, manifest.adapter)
            yield name, expert, read_shape(Path(manifest.info.path))
        else:
            missing.append(name)
            yield name, unhashed_expert(name, name, model_facts(Path(f"expert {name}"), student)), student
    if missing:
        notes.append(f"not registered yet, planned as full models of the student's shape: {', '.join(missing)}")


def _inline_model(name: str, model: Path, expert_config: ExpertConfig) -> tuple[RoutedExpert, Shape]:
    """Return an expert of the pipeline itself, in `model`: a full model, or an adapter with the shape of its base. Raises: OpdError."""
    file = locate_file(model, ADAPTER_CONFIG)
    if not file.is_file():
        shape = read_shape(model)
        return unhashed_expert(name, expert_config.domain, model_facts(model, shape)), shape
    stated_base = expert_config.base or named_base(file.parent)
    if stated_base is None:
        raise ConfigError.at(
            f"experts.{name}.base",
            found="nothing, for a LoRA adapter that names no directory here",
            wanted="the adapter's base model, for whose shape the plan asks",
            fix=f"set experts.{name}.base to its directory",
        )
    # Adapters that name one directory in several ways share it.
    base = expert_config.base or stated_base.resolve()
    shape = read_shape(base)
    if has_weights(model) and has_weights(base):
        adapter = inspect_adapter(model, base, hash_files=False)
    else:
        adapter = _adapter_by_config(model, base, read_model(_Adapter, file), shape)
    return unhashed_expert(name, expert_config.domain, model_facts(base, shape), adapter), shape


def _adapter_by_config(path: Path, base: Path, lora: _Adapter, shape: Shape) -> AdapterInfo:
    """Return an adapter from its config alone, for weights that are not here."""
    targets = lora.target_modules if isinstance(lora.target_modules, list) else None
    return AdapterInfo(
        path=str(path),
        base=str(base),
        rank=lora.r,
        alpha=lora.lora_alpha,
        target_modules=tuple(targets or ()),
        parameters=shape.lora_numbers(lora.r, targets)[0],
        files={},
    )
