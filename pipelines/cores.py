"""The number of roles of a merge that compute at the same time on one machine's cores."""

from __future__ import annotations

from opd.config import PipelineConfig


def roles_at_once(config: PipelineConfig) -> int:
    """Return 2 if the student writes ahead on cores on which teachers or trainer compute meanwhile; else 1.

    `schedule.overlap` is not counted: on the same cores it is off unless a pipeline asks for it.
    """
    cluster = config.cluster
    engines = [section for section in config.engines if not section.elsewhere]
    teachers = any(section.scoring_workers for section in engines) and not cluster.teacher_gpus
    writes_ahead = config.schedule.mode == "one_step_off" and (teachers or not cluster.trainer_gpus)
    return 2 if writes_ahead and not cluster.rollout_gpus else 1
