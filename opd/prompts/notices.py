"""Notices about a source of prompts: columns that nothing reads, answers taken from the last turn, and parts of prompts that
the chat template leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from opd.config.prompts import PromptsConfig, as_prompts_config
from opd.prompts.conversation import SYSTEM_ROLES
from opd.prompts.encode import render_prompt
from opd.prompts.line import PromptLine
from opd.prompts.table import ENDED, SYSTEM, TOOLS, VARIABLES, PromptTable
from opd.prompts.untrusted_text import escape_specials, special_texts


def collect_notices(
    source: Path | PromptsConfig,
    prompts: PromptTable,
    tokenizer: Any,
    day: date | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yield sentences for the user about prompts that have been read. `day` and `variables`: see `load_prompts`."""
    rows, label = prompts.rows, prompts.rows.label
    if rows.unread:
        yield f"{label}: columns that are not read: {', '.join(rows.unread)}"
    if rows.num_answered:
        yield (
            f"{label}: in {rows.num_answered:,} of {len(rows):,} conversations the assistant's last turn is the answer, because the "
            "row has no other"
        )
    if (ended := prompts.with_trait(ENDED)).any() and not as_prompts_config(source).chat:
        yield (
            f"{label}: {_format_count(ended)} prompts end with a turn of the assistant, and the student goes on after it; with `chat: true` "
            "that turn is the answer"
        )
    for trait, subject in ((SYSTEM, "the system message"), (TOOLS, "the tools"), (VARIABLES, "chat_template_kwargs")):
        have = prompts.with_trait(trait) & (prompts.lengths > 0)
        if have.any():
            line = rows[int(prompts.indices[np.flatnonzero(have)[0]])]  # the first such prompt stands for all
            if _is_lost(trait, line, tokenizer, day, {**(variables or {}), **line.variables}):
                yield f"{label}: the chat template leaves out {subject} of {_format_count(have)} prompts"


def _format_count(mask: Any) -> str:
    return f"{int(np.count_nonzero(mask)):,}"


def _is_lost(trait: int, line: PromptLine, tokenizer: Any, day: date | None, variables: Mapping[str, Any]) -> bool:
    """Return True if the chat template leaves out what the prompt has of this trait."""
    if trait == VARIABLES:
        return not any(name in str(tokenizer.chat_template) for name in line.chat_template_kwargs)
    text = render_prompt(tokenizer, line.prompt, day, **variables)
    if trait == TOOLS:
        return not any(tool["function"]["name"] in text for tool in line.tools)
    assert not isinstance(line.prompt, str), "a text has no traits"
    # The template got the messages with these texts broken up, so look for the messages in that form.
    specials = special_texts(tokenizer)
    system_texts = [
        escape_specials(message["content"], specials).strip()
        for message in line.prompt
        if message["role"] in SYSTEM_ROLES
    ]
    return not all(part in text for part in system_texts)
