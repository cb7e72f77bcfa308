"""Check that the trainer's ranks can score with a pipeline's experts (`teachers.engine: trainer`): on the student's own base."""

from __future__ import annotations

from collections.abc import Mapping

from opd.config import PipelineConfig
from opd.config.teachers import TrainerTeachers
from opd.errors import ConfigError
from pipelines.routes import RoutedExpert


def refuse_other_bases(config: PipelineConfig, experts: Mapping[str, RoutedExpert], student_digest: str = "") -> None:
    """Refuse an expert that is no adapter of the student's base, if the trainer's ranks are to score with it.

    `student_digest`: the student's digest as a teacher (`Teacher.digest`); empty if weights were not hashed, so that only full
    models are refused. Raises: ConfigError.
    """
    for name, expert in experts.items():
        inline = config.inline_experts.get(name)
        if inline is not None and inline.own_dir is None:
            continue  # the base alone
        if not isinstance(config.engine_of(name), TrainerTeachers):
            continue
        if expert.adapter is None:
            found = f"a full model, {expert.info.path}"
        elif student_digest and expert.teacher.base_digest != student_digest:
            found = (
                f"an adapter of {expert.adapter.base}, whose weights or config are not those of {config.student.model}"
            )
        else:
            continue
        raise ConfigError.at(
            f"experts.{name}",
            found=found,
            wanted="a LoRA adapter of the student: teachers.engine trainer has no other weights than the student's",
            fix="set teachers.engine to transformers; or train a LoRA expert of this base",
        )
