"""The day that a chat template writes into every prompt, as that of Llama 3.2 does.

On another day the same prompt would have other tokens: a resume would train on other prompts, and the exams before and after
a merge would ask different questions. So a run takes the day on which it begins, records it as
`student.template_date`, and renders everything with it: training prompts, exams, baselines, and `opd evaluate` of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig
from opd.settings import validate

DATE_CALL = "strftime_now"
"""The function by which a template asks for the date; it runs in a sandbox and has no other way."""


def dated(config: PipelineConfig, tokenizer: Any) -> PipelineConfig:
    """Set the day of the pipeline's prompts: its own, else today if the tokenizer's chat template asks for a date."""
    if config.student.template_date or DATE_CALL not in str(tokenizer.chat_template):
        return config
    return on_day(config, date.today())


def on_day(config: PipelineConfig, day: date | None) -> PipelineConfig:
    """Set this day in the pipeline; None changes nothing."""
    if day is None:
        return config
    return config.model_copy(update={"student": config.student.model_copy(update={"template_date": day})})


def as_recorded(config: PipelineConfig, recorded: Mapping[str, Any], where: Path) -> PipelineConfig:
    """Set the day of the run that the pipeline goes on with, unless the pipeline has its own.

    `recorded` is the run's own pipeline, as `where` has it. Raises: ConfigError if that is damaged.
    """
    day = validate(PipelineConfig, recorded, where).student.template_date
    return config if config.student.template_date else on_day(config, day)
