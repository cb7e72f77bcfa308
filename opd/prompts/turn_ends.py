"""Find the token with which a model ends its turn."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opd.prompts.chat_templates import apply_template
from opd.prompts.encode import encode_text

_ANSWER = "zq7zq"
"""Answer with which a template is tried; it occurs in no template."""


def find_turn_end(tokenizer: Any, end_ids: Collection[int]) -> int:
    """Return the end token that the chat template writes behind an answer; without one, the tokenizer's own, else the lowest id.

    A model may have several: Gemma ends texts with one token and turns with another. `end_ids`: all of them, at least one.
    """
    from jinja2 import TemplateError

    if tokenizer.chat_template:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = apply_template(tokenizer, chat, add_generation_prompt=False)
        except (TemplateError, ValueError, TypeError):
            text = ""
        behind = encode_text(tokenizer, text.rpartition(_ANSWER)[2])
        if ends := [i for i in behind if i in end_ids]:
            return ends[0]
    return tokenizer.eos_token_id if tokenizer.eos_token_id in end_ids else min(end_ids)
