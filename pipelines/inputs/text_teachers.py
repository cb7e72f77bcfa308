"""Experts that only write text: what does not go with them is refused before one of them is asked."""

from __future__ import annotations

from collections.abc import Mapping

from opd.config import PipelineConfig
from opd.config.teachers import TextTeachers
from opd.errors import ConfigError, PromptError
from opd.prompts import PromptTable, samples_by_weight
from opd.records.types import WeightedTeacher
from pipelines.routes import preferred_domains, text_routes

Routes = Mapping[str, tuple[WeightedTeacher, ...]]


def refuse_unfit_texts(config: PipelineConfig, routes: Routes) -> None:
    """Refuse what does not go with experts that only write text. Raises: ConfigError."""
    reward = config.objective.reward
    if reward is not None and reward.preference is not None and not preferred_domains(config, routes):
        raise ConfigError.at(
            "objective.reward.preference",
            found="no domain whose expert only writes text",
            wanted="an expert with engine {kind: text}, whose domain does not say reward: false",
            fix="remove the section, or give an expert that engine",
        )
    for domain, (expert, section) in text_routes(config, routes).items():
        reason = f"expert `{expert}` of domain {domain} only writes text"
        if len(routes[domain]) > 1:
            raise ConfigError.at(
                f"domains.{domain}.teachers",
                found=f"{len(routes[domain])} teachers, where {reason}",
                wanted="one teacher",
                fix="give the domain one teacher",
            )
        if config.domains[domain].has_episodes:
            raise ConfigError.at(
                f"domains.{domain}",
                found=f"episodes of several turns, where {reason}",
                wanted="domains in which the student answers once",
                fix="give the domain an expert that scores",
            )
        if expert in config.teacher_prompts:
            raise ConfigError.at(
                f"experts.{expert}.prompt",
                found=f"a prompt of its own, where {reason}",
                wanted="the messages of the rows, which are sent as they stand",
                fix="put what the expert should read into the rows",
            )
        if expert in config.teachers.mask_tokens:
            raise ConfigError.at(
                f"teachers.mask_tokens.{expert}",
                found=f"tokens without loss, where {reason}",
                wanted="nothing: what the expert wrote is trained",
                fix="remove it",
            )
        _refuse_idle_domain(config, routes, domain, section)


def _refuse_idle_domain(config: PipelineConfig, routes: Routes, domain: str, section: TextTeachers) -> None:
    """Refuse a domain that nobody teaches after the expert's steps, if there are steps after them. Raises: ConfigError."""
    is_over = section.steps is not None and section.steps < config.trainer.steps
    rewarded = config.objective.reward is not None and config.domains[domain].is_rewarded
    if is_over and not section.steps and not rewarded and domain not in preferred_domains(config, routes):
        raise ConfigError.at(
            f"domains.{domain}",
            found="0 steps in which its expert's answers are learned, and no reward",
            wanted="steps of the engine, or a reward: objective.reward.preference, or the verifier of an eval",
            fix="set one of the two",
        )


def refuse_unaskable(config: PipelineConfig, routes: Routes, prompts: Mapping[str, PromptTable]) -> None:
    """Refuse prompts that an expert's API does not take, and a run that may need more calls than it may make.

    Raises: PromptError, ConfigError.
    """
    per_step = samples_by_weight(config.trainer.samples_per_step // config.rollout.n, config.domain_weights)
    preferred = preferred_domains(config, routes)
    needed: dict[str, int] = {}
    for domain, (expert, section) in text_routes(config, routes).items():
        table = prompts[domain]
        if section.api == "completions" and not isinstance(table[0].text, str):
            raise PromptError.at(
                table.rows.label,
                found=f"messages, and expert `{expert}` with api completions",
                wanted="prompts of plain text for completions",
                fix="set api: chat",
            )
        steps = config.trainer.steps
        if domain not in preferred and section.steps is not None:
            steps = min(steps, section.steps)
        # One more, by which the expert shows that it answers: the steps may not ask for it.
        in_steps = steps * round(per_step[domain] + 0.5) + 1
        needed[expert] = needed.get(expert, 0) + min(len(table), in_steps)
        if section.max_calls is not None and needed[expert] > section.max_calls:
            raise ConfigError.at(
                f"experts.{expert}.engine.max_calls",
                found=f"{section.max_calls}, and up to {needed[expert]} different prompts in {steps} steps",
                wanted="a call for each prompt: a run that stops half way has spent its calls for nothing",
                fix=f"raise it to {needed[expert]}, or give domain {domain} {section.max_calls} prompts, which then come several times",
            )
