"""Quick checks of what a pipeline names, in a fraction of a second: before torch is imported and before a weight is read.

Commands make these checks first, so that a user does not wait for the imports of the engines' packages to hear of a missing
file or a misspelt name. `read_inputs` checks all of this again, and more, so it does not rely on these checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experts.adapter import AdapterInfo, inspect_expert
from experts.model_dir import ModelInfo, inspect_model
from experts.registry import Registry, default_root
from experts.rl.spec import ReinforcedExpert, ReinforceSpec
from experts.teacher_check import check_fits
from opd.config import PipelineConfig, list_distinct_rounds
from opd.config.domains import DomainConfig, RegisteredExperts
from opd.config.teachers import NoTeachers
from opd.environments import find_environment, find_import_name
from opd.prompts.rows import refuse_wrong_start
from opd.run.paths import RunPaths
from opd.settings.user_objects import is_import_name
from opd.verifiers import build_verifier
from pipelines.inputs.base_experts import refuse_other_bases
from pipelines.inputs.own_tokens import reads_own_tokens
from pipelines.inputs.prompts import find_prompts, registered_prompts
from pipelines.inputs.read import inspect_student, names_in_use, refuse_what_is_not_here
from pipelines.routes import find_expert_dir, route_domains
from pipelines.sizing.models import unhashed_expert


def refuse_at_once(config: PipelineConfig) -> None:
    """Make the quick checks of everything that a merge needs, in every round. Raises: OpdError for the first problem."""
    for round_config in list_distinct_rounds(config):
        refuse_what_is_not_here(round_config)
        refuse_wrong_names(round_config)
        refuse_wrong_models(round_config)
        refuse_wrong_prompts(round_config)


def refuse_wrong_names(config: PipelineConfig) -> None:
    """Check that each domain's verifier and environment exist. Raises: ConfigError."""
    for name, domain in config.domains.items():
        _refuse_wrong_names(f"domains.{name}", domain)


def _refuse_wrong_names(key: str, domain: DomainConfig | ReinforcedExpert) -> None:
    environment = domain.environment
    if environment is not None:
        # A user's class is imported; for ours it is enough to look the name up.
        find = find_environment if is_import_name(environment.name) else find_import_name
        find(environment.name, f"{key}.environment.name")
    if domain.eval is not None and not domain.has_episodes:
        build_verifier(domain.eval.verifier)


def refuse_wrong_models(config: PipelineConfig) -> None:
    """Check student and experts by their configurations, tokenizers and headers of weights, and who teaches what.

    Raises: ModelError, RegistryError, ConfigError.
    """
    student = inspect_student(config, hash_weights=False)
    experts = {}
    for name, (info, adapter, domain) in _named_experts(config).items():
        check_fits(student, info, name, own_tokens=reads_own_tokens(config, name))
        experts[name] = unhashed_expert(name, domain, info, adapter)
    refuse_other_bases(config, experts)
    if not isinstance(config.teachers, NoTeachers):
        route_domains(config, experts)


def refuse_wrong_prompts(config: PipelineConfig, domain: str | None = None) -> None:
    """Check the first row of each source of prompts, of one domain or of all. Raises: PromptError, ConfigError."""
    for name in [domain] if domain else config.domains:
        settings = config.domains[name]
        refuse_wrong_start(find_prompts(name, settings, _registered_expert(config, name, settings)))
        if settings.eval is not None and settings.eval.prompts is not None:
            refuse_wrong_start(settings.eval.prompts)


def refuse_wrong_training(spec: ReinforceSpec) -> None:
    """Check a spec of experts by reinforcement: the base, the sources of rewards, and the first row of each file of tasks.

    Raises: ModelError, ConfigError, PromptError.
    """
    if spec.base.model is not None:
        inspect_model(spec.base.model, hash_weights=False)
    for name, expert in spec.experts.items():
        _refuse_wrong_names(f"experts.{name}", expert)
        for source in (expert.prompts, expert.eval.prompts):
            if source is not None:
                refuse_wrong_start(source)


def refuse_wrong_directories(models: Sequence[Path]) -> None:
    """Check models to evaluate, which are model directories or run directories with a model. Raises: ModelError."""
    for path in models:
        inspect_expert(RunPaths(path).model if RunPaths(path).is_run else path, hash_files=False)


def _registered_expert(config: PipelineConfig, name: str, domain: DomainConfig) -> Path | None:
    return None if domain.prompts else registered_prompts(config, name)


def _named_experts(config: PipelineConfig) -> dict[str, tuple[ModelInfo, AdapterInfo | None, str]]:
    """Return name -> model, adapter and domain of each expert; for a registered one they are those of its manifest."""
    inline = {
        name: (*inspect_expert(find_expert_dir(config, expert), expert.base, hash_files=False), expert.domain)
        for name, expert in config.inline_experts.items()
    }
    if not isinstance(config.experts, RegisteredExperts):
        return inline
    registry = Registry(config.registry or default_root())
    manifests = [registry.get(name) for name in names_in_use(config.experts, registry)]
    for manifest in manifests:
        inspect_expert(Path(manifest.model), Path(manifest.info.path) if manifest.adapter else None, hash_files=False)
    return {manifest.name: (manifest.info, manifest.adapter, manifest.domain) for manifest in manifests} | inline
