"""Reads code in languages for which we have no parser, by regular expressions: its strings, its dotted names, and the commands that it
may start. It errs on the side of too much: a string in a program that starts commands may be one of them."""

from __future__ import annotations

import re

from opd.guard.code import SHOWN_ENVIRONMENT, Code, Started
from opd.guard.shell.reader import unescape

_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_BACKTICKS = re.compile(r"`([^`]*)`|qx[{(/]([^})/]{0,1024})[})/]|%x[{(]([^})]{0,1024})[})]")
_NAME = re.compile(r"[$%@&]?[A-Za-z_][\w]*(?:(?:\.|::|->)[A-Za-z_]\w*)*")
_RUNS = re.compile(
    r"\b(system|exec|execSync|execFileSync|spawnSync|spawn|popen|passthru|shell_exec|IO\.popen|getline)\b"
)
_EVALUATES = re.compile(r"\b(eval|Function|instance_eval|create_function|assert)\b")
_DECODES = re.compile(
    r"\b(atob|base64|base64_decode|decode64|unpack1?|pack|hex2bin|fromCharCode|rot13|str_rot13|strrev)\b"
)
"""Functions that decode a text or put it together from codes of characters."""
_HIDES = re.compile(
    r"\b(?:eval|Function)\b.{0,2000}\b(?:atob|base64|base64_decode|decode64|hex2bin|fromCharCode)\b", re.DOTALL
)
"""Code that evaluates what it decodes."""
_ALL = (
    r"(?:\bprocess\.env\b(?!\s*(?:\?\.|[.\[]))|\bENV\b(?!\s*(?:[\[{]|\.(?:fetch|key|dig|delete|has)))|%ENV"
    r"|\$_(?:ENV|SERVER)\b(?!\s*\[)|\bgetenv\(\s*\)|\bos\.Environ\(\)|\bSystem\.getenv\(\s*\)|\bposix\.environ\b"
    r"|\bDeno\.env\.toObject\b|\benviron\(\)|\bin\s+ENVIRON\b)"
)
_WHOLE = re.compile(_ALL)
"""A name of the whole environment that is not followed by the choice of one variable."""
_SHOWN = re.compile(
    r"\b(?:print\w*|puts|p|pp|echo|say|log|dir|stringify|inspect|dump|var_dump|var_export|json_encode|write|writeFileSync)\b"
    rf"[^;]{{0,200}}?(?<!\.\.\.){_ALL}|\bin\s+ENVIRON\b.{0, 2000}\bprint|\b(?:keys|each|values)\b\W{{0,3}}%ENV.{0, 2000}\b(?:print|say)\b",
    re.DOTALL,
)
"""The whole environment among the arguments of a function that prints, writes or formats, or printed in a loop over it."""
_WRITES = re.compile(
    r"\b(writeFile\w*|appendFile\w*|file_put_contents|unlink\w*|rename\w*|File\.write|fopen|rmSync|copyFile\w*)\b"
)
BACKTICK_RUNS = frozenset({"perl", "ruby", "php"})
"""Languages in which a text in backticks is a command that runs."""


def read_other(language: str, text: str) -> Code:
    """Return what a program in this language may do, which is more than it would do. If it writes any file, each string that may be a
    path counts as written; if it starts any command, each string counts as one."""
    code = Code(texts=[text])
    literals = [unescape(a or b) for a, b in _STRING.findall(text)]
    for literal in literals:
        code.mention(literal, globs="*" in literal)
    code.loads = literals
    code.uses = _NAME.findall(_STRING.sub("''", text))
    if _WHOLE.search(text):
        code.uses.append("whole environment")
        if _SHOWN.search(text) or _WHOLE.fullmatch(text.strip()):
            code.uses.append(SHOWN_ENVIRONMENT)
    if language in BACKTICK_RUNS:
        code.shell += [Started(a or b or c) for a, b, c in _BACKTICKS.findall(text)]
    if _RUNS.search(text):
        code.shell += [Started(literal) for literal in literals if literal.strip()]
    if _WRITES.search(text):
        code.writes += code.mentions
    if _EVALUATES.search(text) and _DECODES.search(text):
        code.tags |= {"decoded", "unseen"}
        if _HIDES.search(text):
            code.tags.add("encoded")
    elif _DECODES.search(text):
        code.tags.add("decodes")
        if code.shell or _RUNS.search(text):
            code.tags |= {"decoded"}
    return code
