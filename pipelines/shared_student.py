"""The student of a merge in which it begins to share indexers: its files with another pattern, in the run directory.

Engines, trainer and exams read these files, as they would read any model's. Experts and the card have the student as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from experts.model_dir import inspect_model
from opd.config import PipelineConfig
from opd.files import fill_output
from pipelines.inputs.indexers import find_student_pattern
from pipelines.inputs.read import Inputs
from pipelines.shared_indexers import write_shared_model


def share_student_indexers(config: PipelineConfig, inputs: Inputs, folder: Path) -> tuple[PipelineConfig, Inputs]:
    """Return pipeline and inputs with the student that has the pattern of `student.indexers`. Its files are written to `folder`, unless
    they are there. Raises: StorageError."""
    if config.student.indexers is None:
        return config, inputs
    pattern, stored = find_student_pattern(config, config.student.indexers)
    if pattern == stored:
        return config, inputs
    if not folder.is_dir():
        with fill_output(folder) as temporary:
            write_shared_model(config.student.model, temporary, pattern)
    student = config.student.model_copy(update={"model": folder.absolute()})
    return config.model_copy(update={"student": student}), replace(inputs, student=inspect_model(folder))


@contextmanager
def open_shared_student(config: PipelineConfig, inputs: Inputs) -> Iterator[tuple[PipelineConfig, Inputs]]:
    """Give what `share_student_indexers` returns within the block, where there is no run directory: the files are temporary."""
    with TemporaryDirectory(prefix="opd-student-") as scratch:
        yield share_student_indexers(config, inputs, Path(scratch) / "student")
