"""`opd prompts show`: show a domain's prompts as the student reads them, and which of them are left out.

This needs the student's tokenizer and the prompts, but no weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from experts.adapter import inspect_expert
from opd.config import PipelineConfig
from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.errors import ConfigError
from opd.prompts import PromptTable, render_prompt
from opd.prompts.teacher_prompts import TeacherPromptSpec, render_teacher_prompt
from opd.settings.suggestions import did_you_mean
from pipelines.inputs.early_checks import refuse_wrong_prompts
from pipelines.inputs.own_tokens import reads_own_tokens
from pipelines.inputs.prompts import (
    example_ids,
    find_prompts,
    read_prompts,
    refuse_unread_variables,
    registered_prompts,
)
from pipelines.inputs.read import load_tokenizer
from pipelines.inputs.teacher_prompts import build_prompt_spec, load_teacher_tokenizers
from pipelines.inputs.template_date import set_template_date
from pipelines.routes import find_expert_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutPrompts:
    """Prompts that are left out for one reason."""

    reason: str
    prompts: PromptTable
    mask: Any
    """Mask, [prompts]: true for the prompts that are left out."""

    def __str__(self) -> str:
        count = int(np.count_nonzero(self.mask))
        names = f": {example_ids(self.prompts, self.mask)}" if count else ""
        return f"  {count:>9,}  {self.reason}{names}"


def show_prompts(config: PipelineConfig, domain: str | None, count: int) -> Iterator[str]:
    """Yield lines about the first `count` prompts of one domain, or of each. Raises: OpdError."""
    if domain is not None and domain not in config.domains:
        raise ConfigError.at(
            "--domain",
            found=domain,
            wanted=f"a domain of the pipeline: {', '.join(config.domains)}",
            fix=did_you_mean(domain, config.domains, "choose one of them"),
        )
    refuse_wrong_prompts(config, domain)
    tokenizer = load_tokenizer(config.student.model, config.student.puts_in_front)
    refuse_unread_variables(config, tokenizer)
    own_tokenizers = {
        name: load_tokenizer(
            Path(inspect_expert(find_expert_dir(config, expert), expert.base, hash_files=False)[0].path)
        )
        for name, expert in config.inline_experts.items()
        if reads_own_tokens(config, name)
    }
    teacher_tokenizers = load_teacher_tokenizers(config, tokenizer, own_tokenizers)
    config = set_template_date(config, tokenizer, *teacher_tokenizers.values())
    for name in [domain] if domain else config.domains:
        settings = config.domains[name]
        training = find_prompts(name, settings, None if settings.prompts else registered_prompts(config, name))
        teachers = tuple(
            build_prompt_spec(config, expert, name, teacher_tokenizers[expert], tokenizer)
            for expert in _find_prompted_experts(config, name, teacher_tokenizers)
        )
        columns = [column for spec in teachers if spec.config for column in spec.config.more_columns]
        training = as_prompts_config(training).with_more_columns(columns) if columns else training
        yield from _shown_source(config, tokenizer, name, training, count, teachers)
        if settings.eval is not None and settings.eval.prompts is not None:
            yield from _shown_source(config, tokenizer, name, settings.eval.prompts, count, exam=True)


def _find_prompted_experts(config: PipelineConfig, domain: str, prompted: Collection[str]) -> list[str]:
    """Return those of the `prompted` experts that teach a domain, as far as the pipeline itself says which they are."""
    served = {name: expert.domain for name, expert in config.inline_experts.items()}
    own = [name for name in served if served[name] == domain]
    own = own or [name for name in served if served[name] == config.split_effort(domain)[0]]
    names = config.domains[domain].teacher_names or own
    return [name for name in names if name in prompted]


def _shown_source(
    config: PipelineConfig,
    tokenizer: Any,
    domain: str,
    source: Path | PromptsConfig,
    count: int,
    teachers: Sequence[TeacherPromptSpec] = (),
    *,
    exam: bool = False,
) -> Iterator[str]:
    student, notices = config.student, list[str]()
    prompts = read_prompts(config, domain, source, tokenizer, notices.append)
    yield f"{domain}, {'exam' if exam else 'training'}: {len(prompts):,} prompts of {prompts.rows.label}"
    yield from (f"  note: {notice}" for notice in notices)
    used, groups = _split_left_out(config, domain, source, prompts, exam=exam)
    yield from (str(part) for part in groups)
    yield f"  {len(used):,} are used, of {_tokens(used)}" if len(used) else "  none is used"
    for index, prompt in enumerate(islice(used, count)):
        line = used.rows[int(used.indices[index])]
        yield ""
        yield f"{prompt.id}: {len(prompt.token_ids)} tokens" + (f", answer {line.answer!r}" if line.answer else "")
        variables = {**config.chat_template_kwargs_of(domain), **line.variables}
        yield f"  text: {render_prompt(tokenizer, prompt.text, student.template_date, **variables)!r}"
        yield f"  ids:  {' '.join(map(str, prompt.token_ids))}"
        for spec in teachers:
            shown = render_teacher_prompt(spec, used.rows, domain, int(used.indices[index]))
            yield f"  {spec.key}: {shown!r}"
    yield ""


def _split_left_out(
    config: PipelineConfig, domain: str, source: Path | PromptsConfig, prompts: PromptTable, *, exam: bool
) -> tuple[PromptTable, list[LeftOutPrompts]]:
    """Return the prompts that are used, and those that are left out for each reason, in the order of a merge's checks."""
    settings = config.domains[domain].eval
    limit = as_prompts_config(source).max_prompt_tokens
    room = config.rollout.max_model_len
    groups: list[LeftOutPrompts] = []

    def leave(reason: str, mask: Any) -> None:
        nonlocal prompts
        groups.append(LeftOutPrompts(reason=reason, prompts=prompts, mask=mask))
        prompts = prompts.select_prompts(~mask)

    if settings is not None and settings.holdout is not None:
        leave(f"held out for the exam (eval.holdout {settings.holdout:g})", prompts.held_out(settings.holdout))
    if limit is not None:
        leave(f"left out, longer than max_prompt_tokens = {limit}", prompts.lengths > limit)
    if exam:
        leave(
            f"not asked, after the first evaluate.samples = {config.evaluate.samples}",
            np.arange(len(prompts)) >= config.evaluate.samples,
        )
    end = "counted as wrong" if exam else "left out"
    leave(f"{end}, no text", prompts.lengths == 0)
    leave(
        f"{end if exam else 'quarantined when they come'}, no room for a response in rollout.max_model_len = {room}",
        prompts.lengths >= room,
    )
    return prompts, groups


def _tokens(prompts: PromptTable) -> str:
    lengths = prompts.lengths
    low, middle, high = (int(x) for x in (lengths.min(), np.median(lengths), lengths.max()))
    return f"{low} to {high} tokens (median {middle}), {int(lengths.sum(dtype=np.int64)):,} in all"
