"""Try, before any compute, whether the verifiers of rewarded domains can judge the training prompts."""

from __future__ import annotations

from collections.abc import Mapping

from opd.config import PipelineConfig
from opd.errors import PromptError
from opd.evaluation.evaluator import DomainExam
from opd.prompts import PromptTable

TRIED = 1000
"""Prompts of a domain that are tried, evenly spread: a file may have a million. Those that are not are tried when they are
judged, and count as failed there."""


def refuse_unrewardable(
    config: PipelineConfig, prompts: Mapping[str, PromptTable], exams: Mapping[str, DomainExam]
) -> None:
    """Raises: PromptError for a rewarded domain with a training prompt that its verifier cannot judge, or must not."""
    if config.objective.reward is None:
        return
    for name, domain in config.domains.items():
        if not domain.is_rewarded or domain.has_episodes:
            continue
        table = prompts[name]
        for index in range(0, len(table), max(1, len(table) // TRIED)):
            prompt = table[index]
            problem = exams[name].verifier.problem(prompt.answer, prompt.metadata)
            if problem:
                raise PromptError.at(
                    f"{table.rows.label}: prompt {prompt.id}",
                    found=problem,
                    wanted=f"what the verifier of domains.{name}.eval needs to reward responses in training",
                    fix=f"add it to the training prompts, or set domains.{name}.reward to false",
                )
