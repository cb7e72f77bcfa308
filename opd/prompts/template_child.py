"""Render a chat template with limits on time, memory and output. It is a script that imports nothing of ours, so it starts fast.

It reads {"template", "variables", "chats", "tools", "cpu_s", "bytes", "characters"} as JSON from standard input. It prints what
is wrong with the template if it goes beyond a limit. Other errors are ignored here; they show where the template is used.
"""

import json
import re
import resource
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _find_fault(request: dict[str, Any]) -> str:
    """Return what is wrong with the template; empty if nothing is."""
    # The environment is the one that transformers makes. Its tag `generation` only marks text, so it is removed below.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form)
    )
    template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", request["template"])
    for chat in request["chats"]:
        for tools in (None, request["tools"]):
            try:
                variables = request["variables"] | {"messages": chat, "tools": tools, "add_generation_prompt": True}
                length = len(environment.from_string(template).render(**variables))
            except RecursionError:
                return "it calls itself without end"
            except MemoryError:
                return f"it takes more than {request['bytes'] >> 20} MiB"
            except (jinja2.TemplateError, ArithmeticError, LookupError, AttributeError, TypeError, ValueError):
                continue
            if length > request["characters"]:
                return f"it writes {length:,} characters"
    return ""


if __name__ == "__main__":
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_AS, (request["bytes"], request["bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(_find_fault(request))
