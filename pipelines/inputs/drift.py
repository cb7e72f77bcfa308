"""The settings against compounding drift (docs/drift.md): make the engines' options of them, and check what they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experts.episodes.prefixes import TURN
from opd.config import PipelineConfig
from opd.config.domains import EnvironmentConfig
from opd.errors import ConfigError
from opd.prompts import PromptTable
from opd.records.types import WeightedTeacher
from opd.rollouts.episodes.drift import Curriculum, DriftOptions, TeacherTurns

Routes = Mapping[str, Sequence[WeightedTeacher]]
MOST_OF_A_GPU = 0.45
"""Share of a GPU's memory that each of two engines may take."""


def drift_options(config: PipelineConfig, routes: Routes) -> dict[str, DriftOptions]:
    """Return domain -> options of its training episodes, for domains with settings against drift. The experts were checked."""
    options = {}
    for name, domain in config.domains.items():
        acts = domain.environment
        if acts is not None and (acts.curriculum or acts.teacher_turns or acts.replay):
            options[name] = _drift_options(acts, routes.get(name, ()))
    return options


def _drift_options(acts: EnvironmentConfig, assigned: Sequence[WeightedTeacher]) -> DriftOptions:
    curriculum, turns, written = acts.curriculum, acts.teacher_turns, None
    if turns is not None:
        directory = assigned[0].teacher.model_dir.absolute()  # a worker starts in another directory
        written = TeacherTurns(model_dir=directory, **turns.model_dump())
    return DriftOptions(
        curriculum=None if curriculum is None else Curriculum(**curriculum.model_dump()),
        teacher_turns=written,
        replay=acts.replay,
    )


def check_drift(config: PipelineConfig, routes: Routes, prompts: Mapping[str, PromptTable]) -> None:
    """Refuse teacher turns of an expert that cannot write or has no room on the GPU, and a replay of prompts that are no
    prefixes. Raises: ConfigError."""
    for name, domain in config.domains.items():
        acts = domain.environment
        if acts is not None and acts.teacher_turns is not None:
            _refuse_unable(config, f"domains.{name}.environment.teacher_turns", routes.get(name, ()))
        if acts is not None and acts.replay and TURN not in prompts[name][0].metadata:
            raise ConfigError.at(
                f"domains.{name}.prompts",
                found=f"{prompts[name].rows.label}, whose first row has no metadata.{TURN}",
                wanted="prefixes of episodes, because environment.replay is true",
                fix="make them with `opd environments prefixes`, or leave replay out",
            )


def _refuse_unable(config: PipelineConfig, key: str, assigned: Sequence[WeightedTeacher]) -> None:
    """Refuse teacher turns of a domain whose heaviest expert cannot write them. Raises: ConfigError."""
    if not assigned:
        raise ConfigError.at(key, found="a domain without an expert", wanted="one that writes", fix="leave it out")
    teacher = assigned[0].teacher
    if teacher.adapter_dir is not None:
        raise ConfigError.at(
            key,
            found=f"expert {teacher.name}, a LoRA adapter, which the engine that writes cannot load",
            wanted="an expert that is a whole model",
            fix="merge the adapter into its base, or leave teacher_turns out",
        )
    share = config.rollout.gpu_memory_utilization
    if config.cluster.rollout_gpus and share > MOST_OF_A_GPU:
        raise ConfigError.at(
            "rollout.gpu_memory_utilization",
            found=f"{share:g} with {key}",
            wanted=f"at most {MOST_OF_A_GPU:g}: student and expert each have an engine on the GPU",
            fix="lower it, or leave teacher_turns out",
        )
