"""The walk of docs/walk.md shows the commands that docs/walk.sh runs. That they parse is tried with those of all pages."""

from __future__ import annotations

import re
import shlex

from tests.unit.docs.written import ROOT, commands

MOST = 6
"""Commands that a stranger may need to the merged model."""


def commands_of_script() -> list[tuple[str, ...]]:
    """Every `opd ...` and `curl ...` that the script lets a user type."""
    text = (ROOT / "docs/walk.sh").read_text(encoding="utf-8").replace("\\\n", " ").replace("$PORT", "8000")
    typed = re.findall(r"^(?:step )?((?:opd|curl) [^>&\n]+)", text, re.MULTILINE)
    return [tuple(shlex.split(line)) for line in typed]


def test_page_and_script_have_the_same_commands() -> None:
    page = ROOT / "docs/walk.md"
    typed = [one.words for one in commands(page) if one.whole and one.words[0] == "opd"]
    script = commands_of_script()
    assert typed == [words for words in script if words[0] == "opd"]
    (request,) = (words for words in script if words[0] == "curl")
    assert request[-1] in page.read_text(encoding="utf-8"), "the page shows another request"


def test_few_commands_lead_to_the_merged_model() -> None:
    names = [words[1] for words in commands_of_script() if words[0] == "opd"]
    assert names == ["init", "check", "merge", "report", "serve"]
    assert names.index("merge") < MOST
