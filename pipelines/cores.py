"""How many roles of a merge compute at the same time on one machine's cores."""

from __future__ import annotations

from opd.config import PipelineConfig


def roles_at_once(config: PipelineConfig) -> int:
    """Roles that compute at the same time on this machine's cores. `schedule.overlap` is not counted: on the same cores it is
    off unless a pipeline asks for it."""
    cluster = config.cluster
    beside = not cluster.trainer_gpus or not (cluster.teacher_gpus or config.teachers.elsewhere)
    return 2 if config.schedule.mode == "one_step_off" and not cluster.rollout_gpus and beside else 1
