"""Begin a few tasks of each environment before any compute: it says at once if a file of prompts is made for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from opd.config import PipelineConfig
from opd.environments import find
from opd.errors import PromptError
from opd.evaluation.evaluator import DomainExam
from opd.prompts import PromptTable
from opd.rollouts.episodes.spec import EpisodeOptions
from opd.rollouts.episodes.threads import Failed, Overdue, OwnThread
from opd.types import Prompt
from pipelines.inputs.environments import episode_options


def refuse_other_tasks(
    config: PipelineConfig, prompts: Mapping[str, PromptTable], exams: Mapping[str, DomainExam]
) -> None:
    """Begin the first task of each domain's prompts and of its exam; if it cannot begin, one in the middle and the last one, for a
    single bad row breaks its own episode alone.

    Raises: PromptError if none of them begins.
    """
    for name, options in episode_options(config).items():
        if not isinstance(options, EpisodeOptions):
            continue
        environment = config.domains[name].environment
        if environment is None or not environment.replay:  # a replay plays no episode in training
            _refuse(prompts[name].rows.label, options, prompts[name])
        if name in exams:
            _refuse(f"domains.{name}.eval", options, exams[name].prompts)


def _refuse(where: str, options: EpisodeOptions, prompts: PromptTable | Sequence[Prompt]) -> None:
    problem = ""
    for index in sorted({0, len(prompts) // 2, len(prompts) - 1}):
        said = asyncio.run(_begin(options, prompts[index]))
        if not said:
            return
        problem = problem or f"prompt {prompts[index].id}: {said}"
    raise PromptError.at(
        where,
        found=problem,
        wanted=f"tasks that {options.environment} can begin: it gets the `metadata` of each row",
        fix="correct the rows (`opd environments tasks` makes them), or the environment's name, or `reset` of your own class",
    )


async def _begin(options: EpisodeOptions, prompt: Prompt) -> str:
    """What keeps an episode from its beginning; empty if nothing does."""
    make = find(options.environment, "environment")
    thread = OwnThread(options.step_timeout_s)
    try:
        environment = await thread.call("the class", lambda: make(**options.options))
        try:
            await thread.call("reset", environment.reset, prompt.metadata, 0)
        finally:
            await thread.call("close", environment.close)
    except (Failed, Overdue) as error:
        return str(error)
    finally:
        thread.end()
    return ""
