"""What of a prompt's tokens a run decides when it begins: the day that a chat template writes into every prompt, as that of Llama 3.2
does, and whether plain text begins as the tokenizer has it.

On another day the same prompt would have other tokens: a resume would train on other prompts, and the exams before and after
a merge would ask different questions. So a run takes the day on which it begins, records it as
`student.template_date`, and renders everything with it: training prompts, exams, baselines, and `opd evaluate` of the run.
`student.add_special_tokens` is recorded likewise: earlier releases had no such key, and put nothing in front.
"""

from __future__ import annotations

from datetime import date
from typing import Any

from opd.config import PipelineConfig

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


def as_recorded(config: PipelineConfig, begun: PipelineConfig) -> PipelineConfig:
    """Take day and begin of prompts from the run that the pipeline goes on with, whose own is `begun`, unless the pipeline says
    them."""
    own, student = begun.student, config.student
    update = {
        "template_date": student.template_date or own.template_date,
        "add_special_tokens": own.puts_in_front if student.add_special_tokens is None else student.add_special_tokens,
    }
    return config.model_copy(update={"student": student.model_copy(update=update)})
