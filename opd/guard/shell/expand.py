"""Words to fields: variables, parameter operators, substitutions, splitting, braces and the tilde."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from opd.guard.session import GuardSession
from opd.guard.shell.arrays import ALL_ITEMS, select_item
from opd.guard.shell.fields import (
    ANY_CHARACTER,
    BRACES_TO_TEXT,
    BREAK,
    KNOWN_TO_TEXT,
    MAX_FIELDS,
    STAR,
    TO_MARKS,
    UNKNOWN,
    UNSET,
    expand_braces,
    glob_regex,
    is_fully_known,
    show_field,
)
from opd.guard.shell.nodes import Arithmetic, Literal, Part, Script, Substitution, Variable, Word
from opd.guard.shell.work import ITEM, TRIES_PER_UNIT, WorkBudget

KEPT_APART = ("@", "[@]")
"""Ends of names whose items stay apart, also in quotes."""
MAX_VALUE = 1 << 16
"""Characters of a field; what is longer is cut, so that no expansion can grow without bound."""
MAX_TRIES = 1 << 22
"""Characters that a pattern may be tried on to cut or to replace something; where it takes more, the result is not known."""

INHERITED_PREFIXES = (
    "HOME", "USER", "PATH", "SHELL", "TMP", "TEMP", "LANG", "LC_", "TERM", "EDITOR", "HOSTNAME", "RANDOM", "BASH", "SECONDS", "UID",
    "XDG_", "VIRTUAL_ENV", "CONDA", "PYTHON", "GO", "CARGO", "RUST", "JAVA", "NVM", "NODE", "NPM", "GITHUB_", "RUNNER_", "CI", "LD_",
)  # fmt: skip
"""Beginnings of names that a shell has from its environment, so that they are hardly empty."""
PROGRAMS_BY_NAME = {
    "PYTHON": "python", "CC": "cc", "CXX": "c++", "MAKE": "make", "NODE": "node", "NPM": "npm", "CARGO": "cargo", "JAVA": "java",
    "PERL": "perl", "RUBY": "ruby", "SHELL": "/bin/bash", "EDITOR": "vi", "PAGER": "less",
}  # fmt: skip
"""Variables whose names say which program they hold, if the episode did not set them."""
_NUMBER = re.compile(r"[0-9]{1,9}")
_SLICE = re.compile(r"\s*(-?[0-9]{1,9})\s*(?::\s*(-?[0-9]{1,9})?\s*)?")
"""Offset and length of `${x:1:2}`; what has to be worked out is none."""


class Expander:
    """Expands words in a session's state. `run` gives the output of a substitution, or None where it is not known."""

    def __init__(
        self, session: GuardSession, run_substitution: Callable[[Script], str | None], work: WorkBudget
    ) -> None:
        self.session = session
        self._run_substitution = run_substitution
        self._work = work

    def expand_to_fields(self, word: Word) -> list[str]:
        """Return the arguments that a word becomes. Raises: UnreadableCommand if that is too much."""
        text = self._expand_text(word, split=True)
        if text.startswith("~"):
            text = self._expand_home(text)
        fields = [
            field.translate(BRACES_TO_TEXT)
            for piece in text.split(BREAK)
            for field in expand_braces(piece, self._work.spend)
        ]
        if all(field == "" for field in fields) and not any(_keeps_empty(part) for part in word):
            return []
        return [f for f in fields if f or _keeps_empty_word(word)][:MAX_FIELDS]

    def expand_to_value(self, word: Word) -> str:
        """Return the word as one string without marks of globs: the value of an assignment, the text of a heredoc."""
        text = self._expand_text(word, split=False)
        if text.startswith("~"):
            text = self._expand_home(text)
        return text.translate(KNOWN_TO_TEXT)

    def _expand_home(self, text: str) -> str:
        name, slash, tail = text.partition("/")
        directories = {
            "~": self.session.home,
            "~+": self.session.cwd,
            "~-": self.session.previous_cwd,
            "~root": "/root",
        }
        return directories[name] + slash + tail if name in directories else text

    def _expand_text(self, word: Word, split: bool) -> str:
        text = "".join(self._expand_part(part, split) for part in word)
        self._work.spend(len(text))
        return text[:MAX_VALUE]

    def _expand_part(self, part: Part, split: bool) -> str:
        if isinstance(part, Literal):
            return part.text if part.quoted or not split else part.text.translate(TO_MARKS)
        if isinstance(part, Variable):
            value = self._expand_variable(part)
            apart = part.quoted and split and part.name.endswith(KEPT_APART)
            return value if apart else self._split_fields(value, part.quoted or not split)
        if isinstance(part, Substitution):
            output = self._run_substitution(part.body)
            return UNKNOWN if output is None else self._split_fields(output.rstrip("\n"), part.quoted or not split)
        if isinstance(part, Arithmetic):
            self._expand_text(part.inner, split=False)
            return UNKNOWN
        self._run_substitution(part.body)
        return UNKNOWN

    def _split_fields(self, value: str, as_one_field: bool) -> str:
        if as_one_field:
            return value.replace(BREAK, " ")
        separators = self.session.variables.get("IFS", " \t\n")
        table = dict.fromkeys(map(ord, separators), BREAK)
        return value.translate(table | {ord("*"): STAR, ord("?"): ANY_CHARACTER})

    def _expand_variable(self, part: Variable) -> str:
        if part.index:
            self._expand_text(part.index, split=False)
        value = self._variable_value(part.name)
        if part.operator == "indirect":
            value = None if value is None else self._variable_value(value)
        elif part.operator:
            return self._apply_operator(part, value)
        return _unset_variable_mark(part.name) if value is None else value

    def _variable_value(self, name: str) -> str | None:
        """Return the value of a variable; None if it is not known."""
        session = self.session
        if name.partition("[")[0] not in session.variables:
            session.read_variables.append(name.partition("[")[0])
        if name in ("@", "*"):
            return BREAK.join(session.positional) if session.positional else None
        if _NUMBER.fullmatch(name) and name != "0":
            return session.positional[int(name) - 1] if int(name) <= len(session.positional) else None
        if name in ("PWD", "OLDPWD"):
            return session.cwd if name == "PWD" else session.previous_cwd
        if name == "IFS":
            return session.variables.get(name, " \t\n")
        base, bracket, index = name.partition("[")
        value = session.variables.get(base)
        if value is None:
            return session.home if base == "HOME" else PROGRAMS_BY_NAME.get(base)
        return select_item(value, bracket + index)

    def _apply_operator(self, part: Variable, value: str | None) -> str:
        operator, operand = part.operator, part.operand
        if operator in (":-", "-", ":=", "=") and (value is None or (value == "" and operator[0] == ":")):
            value = self._expand_text(operand, split=False)
            if "=" in operator:
                self.session.variables[part.name] = value
            return value
        if operator in (":+", "+"):
            return self._expand_text(operand, split=False) if value else ""
        if value is None or not is_fully_known(value):
            self._expand_text(operand, split=False)
            return _unset_variable_mark(part.name) if value is None else UNKNOWN
        if operator == "length":
            return str(value.count(BREAK) + 1 if part.name.endswith(ALL_ITEMS) else len(value))
        pattern = self._expand_text(operand, split=True)
        tries = _count_comparisons(value, operator, pattern)
        self._work.spend(tries // TRIES_PER_UNIT + ITEM * value.count(BREAK))
        if tries > MAX_TRIES:
            return UNKNOWN
        every = part.name in ("@", "*") or part.name.endswith(ALL_ITEMS)
        return (
            _apply_to_items(value, operator, pattern, part.name in ("@", "*"))
            if every
            else apply_text_operator(value, operator, pattern)
        )


def _unset_variable_mark(name: str) -> str:
    """Return the mark of a variable that the episode did not set."""
    own = _NUMBER.fullmatch(name) or (name.isidentifier() and not name.startswith(INHERITED_PREFIXES))
    return UNSET if own and name != "0" else UNKNOWN


def _apply_to_items(value: str, operator: str, operand: str, from_one: bool) -> str:
    """Return the items of an array after an operator: some of them, or all, changed one by one."""
    items = value.split(BREAK)
    if operator != ":":
        return BREAK.join(apply_text_operator(element, operator, operand) for element in items)
    slice_match = _SLICE.fullmatch(show_field(operand))
    if slice_match is None or slice_match[1].startswith("-"):
        return value
    start = max(int(slice_match[1]) - from_one, 0)  # `${@:1}` begins at `$1`, `${x[@]:1}` at the second item
    return BREAK.join(items[start:][: int(slice_match[2])] if slice_match[2] else items[start:])


def _count_comparisons(value: str, operator: str, operand: str) -> int:
    """Return an upper bound of the characters that are compared to cut or to replace the operand in the value."""
    if operator not in ("/", "//", "#", "##", "%", "%%"):
        return 0
    return len(value) * len(operand) * (len(value) if operator[0] == "/" and STAR in operand else 1)


def apply_text_operator(value: str, operator: str, operand: str) -> str:
    """Return a known value after one of the operators that cut, replace or change case."""
    if operator in ("^^", ",,", "^", ","):
        return {"^^": value.upper(), ",,": value.lower(), "^": value[:1].upper() + value[1:]}.get(operator, value)
    if operator == ":":
        slice_ = _SLICE.fullmatch(show_field(operand))
        if slice_ is None:
            return UNKNOWN
        tail = value[int(slice_[1]) :]
        return tail[: int(slice_[2])] if slice_[2] else tail
    if operator in ("/", "//"):
        old, _, new = operand.partition("/")
        # The length first: the result may be too long to make.
        remainder, count = _cached_glob_regex(old).subn("", value, count=0 if operator == "//" else 1)
        if not old or len(remainder) + count * len(new) > MAX_VALUE:
            return UNKNOWN if old else value
        return _cached_glob_regex(old).sub(lambda _: show_field(new), value, count=0 if operator == "//" else 1)
    if operator in ("#", "##", "%", "%%"):
        return _cut_match(value, operator, operand)
    return value


def _cut_match(value: str, operator: str, pattern: str) -> str:
    """Return the value without the shortest or longest beginning or end that fits."""
    backwards = operator[0] == "%"
    text = value[::-1] if backwards else value
    match = _cached_glob_regex(pattern, backwards, len(operator) == 1).match(text)
    remainder = text[match.end() :] if match else text
    return remainder[::-1] if backwards else remainder


_cached_glob_regex = lru_cache(maxsize=256)(glob_regex)


def _keeps_empty(part: Part) -> bool:
    return isinstance(part, Literal) and part.quoted


def _keeps_empty_word(word: Word) -> bool:
    return any(_keeps_empty(part) for part in word)
