"""Forms in which models write tool calls, by the names of vLLM's `--tool-call-parser`.

vLLM's own parsers are made for a server that never refuses: half a call is text for them, and nobody learns that it was meant as
a call. They also bring torch, which a check before any compute must not wait for. So the formats of most students are written anew,
stricter; `tests/integration/test_tool_formats.py` compares both on calls that are whole. All others are read by vLLM's parsers,
through `vllm_parsers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from opd.settings.suggestions import find_nearest
from opd.tool_formats.hermes import Hermes
from opd.tool_formats.llama3_json import Llama3Json
from opd.tool_formats.mistral import Mistral
from opd.tool_formats.pythonic import Pythonic
from opd.tool_formats.qwen3_xml import Qwen3Xml
from opd.tool_formats.records import ToolFormat
from opd.tool_formats.thoughts import TAGS
from opd.tool_formats.vllm_parsers import parser_names

AUTO = "auto"
"""Not a format: the one in which the chat template writes calls."""
FALLBACK = "hermes"
"""The format that a student is told whose chat template knows no tools."""
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "pythonic": Pythonic("<|python_tag|>"),
    "llama4_pythonic": Pythonic("<|python_start|>", "<|python_end|>"),
    "qwen3_xml": Qwen3Xml(),
}
ALIASES: Mapping[str, str] = {"qwen3_json": "hermes", "llama4_json": "llama3_json", "qwen3_coder": "qwen3_xml"}
"""Names of vLLM's for the same formats."""


_CALL_MARK = re.compile(r"tool[_▁]?(call|sep)", re.IGNORECASE)
"""In a special token: one of a call, in the formats that vLLM's parsers read."""


def tool_format(name: str) -> ToolFormat | None:
    """Return the format of this name; None for one that only vLLM has."""
    return TOOL_FORMATS.get(ALIASES.get(name, name))


def check_parser_name(name: str) -> str:
    """Return the name of a format as it is. Raises: ValueError that says what is wanted in place of an unknown name."""
    ours = (AUTO, *TOOL_FORMATS, *ALIASES)
    if name in ours or name in (theirs := parser_names()):
        return name
    near = find_nearest(name, [*ours, *theirs])
    more = (
        "a name of vLLM's --tool-call-parser" if theirs else "where vLLM is installed, a name of its --tool-call-parser"
    )
    raise ValueError((f"did you mean `{near}`? " if near else "") + f"one of: {', '.join(ours)}; or {more}")


def forbidden_in_turns(specials: Sequence[str]) -> list[str]:
    """Return those of the texts that a policy must not write itself: all but the marks of calls and thoughts."""
    marks = {mark for form in TOOL_FORMATS.values() for mark in form.marks} | {tag for pair in TAGS for tag in pair}
    return [text for text in specials if text not in marks and not _CALL_MARK.search(text)]
