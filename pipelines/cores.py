"""The number of roles of a merge that compute at the same time on one machine's cores."""

from __future__ import annotations

from opd.config import PipelineConfig


def roles_at_once(config: PipelineConfig, *, training: bool = False) -> int:
    """Return the number of roles that compute at the same time on this machine's cores, or with `training` while the trainer
    does.

    `schedule.overlap` is not counted: on the same cores it is off unless a pipeline asks for it.
    """
    cluster, schedule = config.cluster, config.schedule
    teachers = not (cluster.teacher_gpus or config.teachers.elsewhere)
    if schedule.mode == "one_step_off":
        beside = teachers or not cluster.trainer_gpus
    else:
        beside = teachers and schedule.score_early is not None and not training
    return 2 if beside and not cluster.rollout_gpus else 1
