"""Chat templates of models. A template is a program, so it is first tried in a process of its own with limits; when it is
rendered here, its various errors become one kind."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from opd.errors import ModelError
from opd.interfaces import Tokenizer
from opd.prompts.line import Messages

CPU_S, BYTES, CHARACTERS = 2, 1 << 30, 1 << 20
"""Limits of a template for a few short messages: CPU seconds, bytes of memory of the process, and characters of output."""
WALL_S = 60
"""Deadline of the whole trial, in case the machine is so busy that it gets no CPU time."""
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": "it"}}}
_USER, _SAID = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It."}
_CHATS = [
    [_USER],
    [{"role": "system", "content": "Be short."}, _USER],
    [_USER, _SAID, _USER, _SAID, _USER],
    [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, {"role": "tool", "content": "7"}],
]
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": {}}}


def apply_template(tokenizer: Tokenizer, messages: Messages, *, add_generation_prompt: bool, **variables: Any) -> str:
    """Return the text that the tokenizer's chat template makes of messages.

    Raises: jinja2's TemplateError, ValueError or TypeError if the template refuses the messages, or fails.
    """
    from jinja2 import TemplateRuntimeError

    try:
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
        )
    except (ArithmeticError, LookupError, AttributeError, RuntimeError, MemoryError) as error:
        if isinstance(error, TemplateRuntimeError):
            raise
        raise TemplateRuntimeError(f"the chat template fails: {type(error).__name__}: {error!s:.200}") from None
    return text


def refuse_runaway_template(tokenizer: Any, model: object) -> None:
    """Try a model's chat template, if it has one, in a process with limits. Raises: ModelError if it goes beyond them."""
    template = getattr(tokenizer, "chat_template", None)
    variables = {key: str(value) for key, value in tokenizer.special_tokens_map.items()} if template else {}
    for source in template.values() if isinstance(template, dict) else [template]:
        fault = _find_fault(str(source), json.dumps(variables)) if source else ""
        if fault:
            raise ModelError.at(
                f"the chat template of {model}",
                found=f"{fault}, for a few short messages",
                wanted="a template that renders them at once",
                fix="correct chat_template.jinja, or chat_template in tokenizer_config.json, of that directory; or delete it and "
                "give prompts as text",
            )


@lru_cache(maxsize=16)
def _find_fault(template: str, variables: str) -> str:
    """Return which limit a template exceeds; empty if none. `variables`: the special tokens by name, as JSON."""
    request = {"template": template, "variables": json.loads(variables), "chats": _CHATS, "tools": [_TOOL]}
    limits = {"cpu_s": CPU_S, "bytes": BYTES, "characters": CHARACTERS}
    # -P and not -I, because jinja2 may be on PYTHONPATH or in the user's own site-packages.
    command = [sys.executable, "-P", str(Path(__file__).with_name("template_child.py"))]
    too_long = f"it takes more than {CPU_S} s"
    try:
        process = subprocess.run(
            command, input=json.dumps(request | limits), capture_output=True, text=True, timeout=WALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return too_long
    # The code is negative if the system killed Python at the time limit; else Python ended, as for lack of memory.
    if process.returncode:
        return (
            too_long if process.returncode < 0 else f"it ends Python: {(process.stderr.splitlines() or ['?'])[-1]:.200}"
        )
    return process.stdout.strip()
