"""The models of a planned merge: what `opd check` reads from weights, made from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from experts.adapter import AdapterInfo, named_base
from experts.json_files import read_model
from experts.model_dir import ModelInfo
from experts.registry import Registry, default_root
from opd.config import PipelineConfig
from opd.config.domains import ExpertConfig, RegisteredExperts
from opd.config.teachers import NoTeachers
from opd.errors import ConfigError
from opd.models.lora import ADAPTER_CONFIG, LoraConfig, LoraSize
from opd.prompts.balance import round_counts, samples_by_weight
from opd.records.types import Teacher
from pipelines.inputs.read import Inputs
from pipelines.inputs.routes import START, RoutedExpert, route_domains, scoring_routes
from pipelines.plan.shapes import Shape, locate_file, read_shape


class _Adapter(LoraConfig):
    target_modules: list[str] | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models of a merge."""

    inputs: Inputs
    """What the sum of memory is made of; it has no prompts and no tokenizer."""
    student: Shape
    scorers: Mapping[str, Shape]
    """Name of everyone who scores -> its shape; an adapter's is its base's."""
    samples: Mapping[str, int]
    """Domain -> responses of a step."""
    notes: tuple[str, ...]

    def rows_by_scorer(self) -> dict[str, int]:
        """Name of everyone who scores -> rows of a step."""
        rows = dict.fromkeys(self.scorers, 0)
        for domain, assigned in self.inputs.scoring.items():
            for weighted_teacher in assigned:
                rows[weighted_teacher.teacher.name] += self.samples[domain]
        return rows

    @property
    def opinions(self) -> int:
        """Target rows of a step."""
        return sum(self.rows_by_scorer().values())


def read_models(config: PipelineConfig) -> Models:
    """Read configs of student and experts. Raises: OpdError for a config that is missing or has no formulas."""
    shape = read_shape(config.student.model)
    student = _memory_facts(config.student.model, shape)
    if shape.context is not None and config.rollout.max_model_len > shape.context:
        raise ConfigError.at(
            "rollout.max_model_len",
            found=str(config.rollout.max_model_len),
            wanted=f"at most {shape.context}, the context of {config.student.model}",
            fix=f"set rollout.max_model_len to {shape.context} or less",
        )
    shapes, experts, notes = {START: shape}, dict[str, RoutedExpert](), list[str]()
    for name, expert, own in _expert_shapes(config, shape, notes):
        experts[name], shapes[name] = expert, own
    routes = {} if isinstance(config.teachers, NoTeachers) else route_domains(config, experts)[0]
    start = RoutedExpert(teacher=Teacher(name=START, model_dir=config.student.model), domain="", info=student, prompts=None)
    scoring = scoring_routes(config, routes, start.teacher)
    everyone = experts | {START: start}
    names = [weighted_teacher.teacher.name for assigned in scoring.values() for weighted_teacher in assigned]
    scorers = {name: everyone[name] for name in dict.fromkeys(names)}
    lora = config.student.lora
    if lora is not None:
        trained, pushed = shape.lora_numbers(lora.r, None if isinstance(lora.targets, str) else lora.targets)
    inputs = Inputs(
        student=student,
        scorers=scorers,
        routes=routes,
        scoring=scoring,
        prompts={},
        exams={},
        untrained={},
        tokenizer=None,
        warnings=(),
        lora=None if lora is None else LoraSize(trained=trained, pushed=pushed),
        bodies={expert.info.path: shapes[name].body for name, expert in everyone.items()},
    )
    scorer_shapes = {name: shapes[name] for name in scorers}
    return Models(inputs=inputs, student=shape, scorers=scorer_shapes, samples=_samples_by_domain(config), notes=tuple(notes))


def _samples_by_domain(config: PipelineConfig) -> dict[str, int]:
    """Responses of each domain in an ordinary step, as `opd merge` deals them out."""
    total = config.trainer.samples_per_step // config.rollout.n
    prompts = round_counts(samples_by_weight(total, config.domain_weights), total, draw=0.5)
    return {name: config.rollout.n * count for name, count in prompts.items()}


def _expert_shapes(config: PipelineConfig, student: Shape, notes: list[str]) -> Iterator[tuple[str, RoutedExpert, Shape]]:
    """Name, expert and shape. Raises: OpdError."""
    if not isinstance(config.experts, RegisteredExperts):
        for name, expert_config in config.experts.items():
            yield (name, *_inline_model(name, expert_config))
        return
    registry = Registry(config.registry or default_root())
    registered_names = registry.names()
    missing = []
    for name in registered_names if config.experts.use == "all" else config.experts.use:
        if name in registered_names:
            manifest = registry.get(name)
            shape = read_shape(Path(manifest.info.path))
            adapter = manifest.adapter.path if manifest.adapter else None
            teacher = _make_teacher(name, Path(manifest.info.path), None if adapter is None else Path(adapter))
            expert = RoutedExpert(
                teacher=teacher, domain=manifest.domain, info=manifest.info, adapter=manifest.adapter, prompts=None
            )
            yield name, expert, shape
        else:
            missing.append(name)
            info = _memory_facts(Path(f"expert {name}"), student)
            yield (
                name,
                RoutedExpert(teacher=_make_teacher(name, Path(info.path)), domain=name, info=info, prompts=None),
                student,
            )
    if missing:
        notes.append(f"not registered yet, planned as full models of the student's shape: {', '.join(missing)}")


def _inline_model(name: str, expert_config: ExpertConfig) -> tuple[RoutedExpert, Shape]:
    if not locate_file(expert_config.model, ADAPTER_CONFIG).is_file():
        shape = read_shape(expert_config.model)
        teacher = _make_teacher(name, expert_config.model)
        return RoutedExpert(teacher=teacher, domain=expert_config.domain, info=_memory_facts(expert_config.model, shape), prompts=None), shape
    file = locate_file(expert_config.model, ADAPTER_CONFIG)
    lora = read_model(_Adapter, file)
    named = expert_config.base or named_base(file.parent)
    if named is None:
        raise ConfigError.at(
            f"experts.{name}.base",
            found="nothing, for a LoRA adapter that names no directory here",
            wanted="the adapter's base model, for whose shape the plan asks",
            fix=f"set experts.{name}.base to its directory",
        )
    # Adapters that name one directory in several ways share it.
    base = expert_config.base or named.resolve()
    shape = read_shape(base)
    targets = lora.target_modules if isinstance(lora.target_modules, list) else None
    parameters, _ = shape.lora_numbers(lora.r, targets)
    adapter = AdapterInfo(
        path=str(expert_config.model),
        base=str(base),
        rank=lora.r,
        alpha=lora.lora_alpha,
        target_modules=tuple(targets or ()),
        parameters=parameters,
        files={},
    )
    info = _memory_facts(base, shape)
    teacher = _make_teacher(name, base, expert_config.model)
    return RoutedExpert(teacher=teacher, domain=expert_config.domain, info=info, adapter=adapter, prompts=None), shape


def _make_teacher(name: str, model_dir: Path, adapter: Path | None = None) -> Teacher:
    """A teacher whose weights are known by their place, since nothing is hashed."""
    own = f"{model_dir}:{name}" if adapter else str(model_dir)
    return Teacher(
        name=name, model_dir=model_dir, adapter_dir=adapter, digest=own, base_digest=str(model_dir) if adapter else ""
    )


def _memory_facts(path: Path, shape: Shape) -> ModelInfo:
    """The facts that memory depends on; the rest is empty."""
    return ModelInfo(
        path=str(path),
        architecture=shape.kind,
        model_type=shape.kind,
        dtype="bfloat16",
        parameters=shape.parameters,
        hidden_size=shape.hidden,
        vocab_rows=shape.vocab,
        tied=shape.tied,
        final_logit_softcapping=None,
        context=shape.context,
        vocab_size=shape.vocab,
        vocab_hash="",
        eos_token_ids=(),
        pad_token_id=None,
        bos_token_id=None,
        chat_template_hash=None,
        weight_files={},
    )
