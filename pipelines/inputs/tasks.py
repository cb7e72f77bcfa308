"""Begin a few tasks of each environment before any compute: it says at once if a file of prompts is made for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from opd.config import PipelineConfig
from opd.config.domains import EnvironmentConfig
from opd.environments import find_environment, place_of
from opd.errors import PromptError
from opd.evaluation.evaluator import DomainExam
from opd.prompts import PromptTable
from opd.records.types import Prompt
from opd.rollouts.episodes.threads import CallFailed, CallOverdue, OwnThread


def refuse_other_tasks(
    config: PipelineConfig, prompts: Mapping[str, PromptTable], exams: Mapping[str, DomainExam]
) -> None:
    """Begin the first task of each domain's prompts and of its exam; if it cannot begin, one in the middle and the last one, for a
    single bad row breaks its own episode alone.

    Raises: PromptError if none of them begins.
    """
    for name, domain in config.domains.items():
        environment = domain.environment
        if environment is None:
            continue
        if not environment.replay:  # a replay plays no episode in training
            _refuse_prompts(prompts[name].rows.label, environment, prompts[name])
        if name in exams:
            _refuse_prompts(f"domains.{name}.eval", environment, exams[name].prompts)


def _refuse_prompts(key: str, environment: EnvironmentConfig, prompts: PromptTable | Sequence[Prompt]) -> None:
    environment_name, problem = place_of(environment.name, key), ""
    for index in sorted({0, len(prompts) // 2, len(prompts) - 1}):
        obstacle = asyncio.run(_explain_bad_task(environment_name, environment, prompts[index]))
        if not obstacle:
            return
        problem = problem or f"prompt {prompts[index].id}: {obstacle}"
    raise PromptError.at(
        key,
        found=problem,
        wanted=f"tasks that {environment_name} can begin: it gets the `metadata` of each row",
        fix="correct the rows (`opd environments tasks` makes them), or the environment's name, or `reset` of your own class",
    )


async def _explain_bad_task(environment_name: str, config: EnvironmentConfig, prompt: Prompt) -> str:
    """Return the obstacle to starting an episode; empty if there is none."""
    make = find_environment(environment_name, "environment")
    thread = OwnThread(config.step_timeout_s)
    try:
        environment = await thread.call("the class", lambda: make(**config.options))
        try:
            await thread.call("reset", environment.reset, prompt.metadata, 0)
        finally:
            await thread.call("close", environment.close)
    except (CallFailed, CallOverdue) as error:
        return str(error)
    finally:
        thread.end_after()
    return ""
