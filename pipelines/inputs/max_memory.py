"""What `teachers.max_memory` leaves where, and whether it has room for the experts, from their headers alone."""

from __future__ import annotations

from collections.abc import Mapping

from opd.config import PipelineConfig
from opd.config.teachers import Teachers, TransformersTeachers
from opd.errors import ConfigError
from opd.settings.strict import DTYPE_BYTES
from pipelines.inputs.routes import RoutedExpert

GIB = 1 << 30


def refuse_no_room(config: PipelineConfig, scorers: Mapping[str, RoutedExpert]) -> None:
    """Refuse a teacher that is larger than all that it may have. Whether its layers fit device by device, a worker finds out.

    Raises: ConfigError.
    """
    teachers = config.teachers
    if not isinstance(teachers, TransformersTeachers) or not teachers.max_memory:
        return
    room, width = sum(teachers.max_memory.values()), DTYPE_BYTES[teachers.dtype]
    for name, expert in scorers.items():
        if expert.info.parameters * width > room:
            named = ", ".join(f"{device} {size / GIB:.3g} GiB" for device, size in teachers.max_memory.items())
            raise ConfigError.at(
                "teachers.max_memory",
                found=f"{named}",
                wanted=f"room for the {expert.info.parameters * width / GIB:.3g} GiB of weights of expert `{name}` in "
                f"{teachers.dtype}",
                fix="raise a size, or name more devices: cpu, or disk, which leaves layers in their files",
            )


def off_gpus(teachers: TransformersTeachers, weights: int) -> int:
    """Bytes of a teacher's weights for which `teachers.max_memory` has no room on GPUs; all of them if it names none."""
    return max(0, weights - sum(size for device, size in teachers.max_memory.items() if isinstance(device, int)))


def in_memory(teachers: Teachers, weights: int) -> int:
    """Bytes of them that `teachers.max_memory` puts into the machine's memory; what is left stays in the files."""
    if not isinstance(teachers, TransformersTeachers):
        return 0
    return min(off_gpus(teachers, weights), teachers.max_memory.get("cpu", 0))
