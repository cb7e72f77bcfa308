"""When the student writes a step's responses, and with which weights. One file per schedule, behind one dictionary."""

from opd.schedules.one_step_off import OneStepOff
from opd.schedules.sync import Sync

SCHEDULES: dict[str, type[Sync] | type[OneStepOff]] = {"sync": Sync, "one_step_off": OneStepOff}
"""`schedule.mode` -> class of the schedule."""
