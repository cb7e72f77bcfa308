"""Schedules: they decide at which time and with which weights the student writes a step's responses. One file per schedule,
behind one dictionary."""

from opd.schedules.one_step_off import OneStepOff
from opd.schedules.sync import SyncSchedule

SCHEDULES: dict[str, type[SyncSchedule] | type[OneStepOff]] = {"sync": SyncSchedule, "one_step_off": OneStepOff}
"""`schedule.mode` -> class of the schedule."""
