"""Forms in which models write tool calls, by the names of vLLM's `--tool-call-parser`.

vLLM's own parsers are made for a server that never refuses: half a call is text for them, and nobody learns that it was meant as
a call. They also bring torch, which a check before any compute must not wait for. So these are written anew, stricter;
`tests/integration/test_tool_formats.py` compares both on calls that are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opd.tool_formats.hermes import Hermes
from opd.tool_formats.llama3_json import Llama3Json
from opd.tool_formats.mistral import Mistral
from opd.tool_formats.pythonic import Pythonic
from opd.tool_formats.qwen3_xml import Qwen3Xml
from opd.tool_formats.records import ToolFormat
from opd.tool_formats.thoughts import TAGS

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


def tool_format(name: str) -> ToolFormat:
    """Return the format of this name."""
    return TOOL_FORMATS[ALIASES.get(name, name)]


def forbidden_in_turns(specials: Sequence[str]) -> list[str]:
    """Return those of the texts that a policy must not write itself: all but the marks of calls and thoughts."""
    marks = {mark for form in TOOL_FORMATS.values() for mark in form.marks} | {tag for pair in TAGS for tag in pair}
    return [text for text in specials if text not in marks]
