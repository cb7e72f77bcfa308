"""GPUs that a pipeline would reserve for nobody: a process computes on one."""

from __future__ import annotations

from opd.config import PipelineConfig
from opd.config.teachers import OpenAITeachers, TransformersTeachers, VLLMTeachers
from opd.errors import ConfigError
from opd.settings.named import is_import_name


def refuse_idle_gpus(config: PipelineConfig) -> None:
    """Refuse more than one GPU for a process. `opd plan` takes such a pipeline, and plans for all of them.

    Raises: ConfigError.
    """
    gpus = config.cluster
    if not is_import_name(config.rollout.engine):  # a user's engine may use what it asks for
        _refuse_gpus("cluster.rollout_gpus", gpus.rollout_gpus, "a rollout engine", _wants_several("rollout"))
    if isinstance(config.teachers, VLLMTeachers):
        _refuse_gpus("cluster.teacher_gpus", gpus.teacher_gpus, "a scoring worker", _wants_several("teachers"))
    elif isinstance(config.teachers, TransformersTeachers) and config.teachers.device_map is None:
        fix = "set it to 1, and teachers.workers for more of them; or teachers.device_map to auto, which divides a teacher's layers"
        _refuse_gpus("cluster.teacher_gpus", gpus.teacher_gpus, "a scoring worker", fix)
    elif isinstance(config.teachers, OpenAITeachers):
        fix = "set it to 0, and teachers.workers for more of them: the teachers compute elsewhere"
        _refuse_gpus("cluster.teacher_gpus", gpus.teacher_gpus, "a scoring worker", fix)
    fix = "set it to 1, and trainer.ranks to the number of GPUs to train on"
    _refuse_gpus("cluster.trainer_gpus", gpus.trainer_gpus, "a trainer rank", fix)


def _wants_several(section: str) -> str:
    return f"set it to 1, and {section}.tensor_parallel_size to the number of GPUs that each engine is to have"


def _refuse_gpus(key: str, gpus: float, owner: str, fix: str) -> None:
    if gpus > 1:
        limit = f"at most 1: {owner} of one process computes on one GPU, and the others would be reserved for nobody"
        raise ConfigError.at(key, found=f"{gpus:g}", wanted=limit, fix=fix)
