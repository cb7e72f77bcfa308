"""What `schedule.score_early` does not go with in the other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from opd.config.pipeline import PipelineConfig


def score_early_problem(config: PipelineConfig) -> PydanticCustomError | None:
    """Return why teachers of this pipeline cannot begin before the step is written; None if they can, or do not."""
    size = config.schedule.score_early
    if size is None:
        return None
    if config.teachers.scoring_workers == 0:
        found = f"teachers.engine {config.teachers.engine}"
        wanted = "teachers.engine transformers, vllm or openai: a server of `opd teachers serve` is asked once a step"
    elif config.objective.reward is not None:
        found, wanted = (
            "objective.reward",
            "no objective.reward: a response is scored with its reward, which is judged later",
        )
    elif config.rollout.sleep:
        found, wanted = (
            "rollout.sleep true",
            "rollout.sleep false: the engine writes while teachers score, so neither can sleep",
        )
    else:
        return None
    where = "schedule.score_early"
    return PydanticCustomError(
        "score_early", "{wanted}", {"wanted": wanted, "where": where, "found": f"{size} with {found}"}
    )
