"""The YAML of `opd experts train` with a method of reinforcement: one base, and the source of rewards of each expert.

An expert by reinforcement is made by a merge without teachers. So everything but base and experts is a section of a pipeline,
with the same name; `experts.rl.recipe` has the defaults. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from experts.spec import ExpertsSpec, FromBase
from opd.config.agents import AgentConfig
from opd.config.domains import DomainEvalConfig, EnvironmentConfig
from opd.config.guard import GuardConfig
from opd.config.prompts import Prompts
from opd.errors import ConfigError
from opd.settings.strict import Name, Strict, UserPath
from opd.settings.suggestions import did_you_mean
from opd.settings.yaml_files import apply_overrides, load_yaml, validate_section

Method = Literal["ppo", "grpo", "rloo"]
METHODS: tuple[str, ...] = get_args(Method)
SFT_METHODS = ("full", "lora")


class Sections(Strict):
    """Sections of the pipeline, with the keys that differ from the recipe's."""

    rollout: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    """`steps` has no default."""
    reward: dict[str, Any] = {}
    """Keys of `objective.reward`, such as those of its `baseline`."""
    schedule: dict[str, Any] = {}
    sync: dict[str, Any] = {}
    monitors: dict[str, Any] = {}
    checkpoint: dict[str, Any] = {}
    evaluate: dict[str, Any] = {}
    logging: dict[str, Any] = {}
    cluster: dict[str, Any] = {}


class ReinforcedExpert(Sections):
    """One expert, and where its rewards come from: an environment, else the verifier of its `eval`."""

    domain: Name
    prompts: Prompts
    """The tasks; completions are not read."""
    environment: EnvironmentConfig | None = None
    """The key of a pipeline's domain; it gives the reward."""
    agent: AgentConfig | None = None
    """Instead of `environment`: your program is the agent and gives the reward."""
    eval: DomainEvalConfig
    """Held-out tasks; without environment and agent its verifier gives the reward."""
    guard: bool | dict[str, Any] | None = None
    """`false`, or the keys of the spec's `guard` that differ here."""
    kl_to_base: float | None = Field(None, ge=0, allow_inf_nan=False)
    """For this expert; default: the spec's."""

    @property
    def has_episodes(self) -> bool:
        """True if its rewards come from episodes; the same as `DomainConfig.has_episodes`."""
        return self.environment is not None or self.agent is not None


class ReinforceSpec(FromBase, Sections):
    """One base and the experts that learn from rewards, one after the other."""

    runs: UserPath = Path("runs")
    """Each expert's run directory is RUNS/NAME-METHOD."""
    method: Method
    """`ppo`: one response a prompt and a critic; `grpo`, `rloo`: several responses a prompt."""
    kl_to_base: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight of the exact KL(expert || base) beside the reward; 0: none."""
    guard: GuardConfig | None = None
    """Check tool calls before they run; default: none is checked."""
    experts: dict[Name, ReinforcedExpert] = Field(..., min_length=1)

    @model_validator(mode="after")
    def _steps_are_given(self) -> ReinforceSpec:
        for name, expert in self.experts.items():
            if "steps" not in {**self.trainer, **expert.trainer}:
                key = f"experts.{name}.trainer.steps"
                raise PydanticCustomError("steps", "a number of steps", {"where": key, "found": "nothing"})
        return self

    def merge_sections(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the sections of one expert: the spec's sections, in which the expert's own keys replace the spec's."""
        expert = self.experts[name]
        return {key: merge_mappings(getattr(self, key), getattr(expert, key)) for key in Sections.model_fields}


def merge_mappings(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with values replaced by those of `overrides`. Mappings are merged key by key, unless their `kind` differs."""
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            of_one_kind = value.get("kind", old.get("kind")) == old.get("kind")
            value = merge_mappings(old, value) if of_one_kind else value
        merged[key] = value
    return merged


def load_training(path: Path, overrides: list[str] | None = None) -> ExpertsSpec | ReinforceSpec:
    """Read, override and check a spec of any method. Raises: ConfigError."""
    data = apply_overrides(load_yaml(path), overrides or [])
    method = data.get("method", SFT_METHODS[0])
    if method not in (*SFT_METHODS, *METHODS):
        raise ConfigError.at(
            f"{path}: method",
            found=f"{method!r:.60}",
            wanted=f"one of: {', '.join((*SFT_METHODS, *METHODS))}",
            fix=did_you_mean(str(method), (*SFT_METHODS, *METHODS), "correct it, here or in --method"),
        )
    return (
        validate_section(ReinforceSpec, data, path) if method in METHODS else validate_section(ExpertsSpec, data, path)
    )
