"""The student of a merge in which it begins to share indexers: its files with another pattern, in the run directory.

Engines, trainer and exams read these files, as they would read any model's. Experts and the card have the student as it was.
"""

from __future__ import annotations

from dataclasses import replace

from experts.model_dir import inspect_model
from opd.config import PipelineConfig
from opd.files import fill_output
from opd.run.paths import RunPaths
from pipelines.inputs.indexers import find_student_pattern
from pipelines.inputs.read import Inputs
from pipelines.shared_indexers import write_shared_model


def share_student_indexers(config: PipelineConfig, inputs: Inputs, paths: RunPaths) -> tuple[PipelineConfig, Inputs]:
    """Return pipeline and inputs with the student that has the pattern of `student.indexers`; its files are written, unless an earlier
    session has done so. Raises: StorageError."""
    if config.student.indexers is None:
        return config, inputs
    pattern, stored = find_student_pattern(config, config.student.indexers)
    if pattern == stored:
        return config, inputs
    if not paths.student.is_dir():
        with fill_output(paths.student) as temporary:
            write_shared_model(config.student.model, temporary, pattern)
    student = config.student.model_copy(update={"model": paths.student.absolute()})
    return config.model_copy(update={"student": student}), replace(inputs, student=inspect_model(paths.student))
