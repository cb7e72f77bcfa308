"""Settings that a run fixes when it begins, because the tokens of its prompts depend on them.

The first is the day that some chat templates, such as that of Llama 3.2, write into every prompt. On another day the same
prompt would have other tokens: a resume would train on other prompts, and the exams before and after a merge would differ. So a
run records the day on which it begins as `student.template_date`, and uses it for training prompts, exams, baselines, and
`opd evaluate` of the run.

`student.add_special_tokens` is recorded too, because earlier releases had no such key and put nothing in front of prompts. And
so are columns of prompts that are not read, because earlier releases did not read system messages, tools and variables.
Numbers that are `auto` are recorded as they were chosen.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from opd.config import PipelineConfig
from opd.config.domains import DomainConfig
from opd.config.prompts import PromptsConfig, as_prompts_config
from pipelines.sizing.auto import keep_numbers

DATE_CALL = "strftime_now"
"""The function by which a template asks for the date. Templates run in a sandbox and have no other way to it."""


def set_template_date(config: PipelineConfig, tokenizer: Any) -> PipelineConfig:
    """Return the pipeline with the day of its prompts set: its own, else today if the chat template asks for a date."""
    if config.student.template_date or DATE_CALL not in str(tokenizer.chat_template):
        return config
    return with_template_date(config, date.today())


def with_template_date(config: PipelineConfig, day: date | None) -> PipelineConfig:
    """Return the pipeline with this day; None changes nothing."""
    if day is None:
        return config
    return config.model_copy(update={"student": config.student.model_copy(update={"template_date": day})})


def as_recorded(config: PipelineConfig, begun: PipelineConfig) -> PipelineConfig:
    """Return the pipeline of a resume with these settings taken from `begun`, the run's own pipeline, unless it has its own."""
    old, student = begun.student, config.student
    update = {
        "template_date": student.template_date or old.template_date,
        "add_special_tokens": old.puts_in_front if student.add_special_tokens is None else student.add_special_tokens,
    }
    domains = {name: _as_read(domain, begun.domains.get(name, domain)) for name, domain in config.domains.items()}
    config = keep_numbers(config, begun)
    return config.model_copy(update={"student": student.model_copy(update=update), "domains": domains})


def _as_read(domain: DomainConfig, begun: DomainConfig) -> DomainConfig:
    """Return the domain without the columns of prompts that the run's domain does not read."""
    exam, run_exam = domain.eval, begun.eval
    if exam is not None and run_exam is not None:
        exam = exam.model_copy(update={"prompts": _without_unread(exam.prompts, run_exam.prompts)})
    return domain.model_copy(update={"prompts": _without_unread(domain.prompts, begun.prompts), "eval": exam})


def _without_unread(
    prompts: Path | PromptsConfig | None, begun: Path | PromptsConfig | None
) -> Path | PromptsConfig | None:
    if prompts is None or not isinstance(begun, PromptsConfig):
        return prompts
    source = as_prompts_config(prompts)
    unread = [column for column, name in begun.columns.items() if name is None and column not in source.columns]
    return source.without_columns(*unread) if unread else prompts
