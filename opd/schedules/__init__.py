"""Schedules decide when, and with which weights, the student writes a step's responses. Each has a file, and one dictionary names them
all."""

from opd.schedules.one_step_off import OneStepOff
from opd.schedules.sync import SyncSchedule

SCHEDULES: dict[str, type[SyncSchedule] | type[OneStepOff]] = {"sync": SyncSchedule, "one_step_off": OneStepOff}
"""Value of `schedule.mode` -> class of the schedule."""
