"""Find roles that would crawl: they compute in bfloat16 on cores that cannot."""

from __future__ import annotations

from opd.config import PipelineConfig
from opd.machine.processor import slow_bf16_warnings


def find_slow_types(config: PipelineConfig) -> list[str]:
    """A warning if a role on this machine's cores computes in bfloat16 and they cannot; empty if there is none."""
    gpus, teachers = config.cluster, config.teachers
    bf16_keys = {
        "rollout.dtype": not gpus.rollout_gpus and config.rollout.dtype == "bfloat16",
        "teachers.dtype": not gpus.teacher_gpus and not teachers.elsewhere and teachers.dtype == "bfloat16",
        "trainer.dtype": not gpus.trainer_gpus and config.trainer.dtype == "bfloat16",
    }
    return slow_bf16_warnings([key for key, slow in bf16_keys.items() if slow])
