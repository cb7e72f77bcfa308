"""Expands the words of a command to fields: variables and their operators, substitutions, splitting, braces and the tilde."""

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
from opd.guard.shell.reading_budget import ITEM, TRIES_PER_UNIT, WorkBudget

KEPT_APART = ("@", "[@]")
"""Ends of names of variables whose items stay separate fields even in quotes: `"$@"`, `"${x[@]}"`."""
MAX_VALUE = 1 << 16
"""The most characters of an expanded word. The rest is cut off, so that no expansion grows without bound."""
MAX_TRIES = 1 << 22
"""The most comparisons of characters for a pattern that cuts or replaces something. If it may take more, the result is not known."""

INHERITED_PREFIXES = (
    "HOME", "USER", "PATH", "SHELL", "TMP", "TEMP", "LANG", "LC_", "TERM", "EDITOR", "HOSTNAME", "RANDOM", "BASH", "SECONDS", "UID",
    "XDG_", "VIRTUAL_ENV", "CONDA", "PYTHON", "GO", "CARGO", "RUST", "JAVA", "NVM", "NODE", "NPM", "GITHUB_", "RUNNER_", "CI", "LD_",
)  # fmt: skip
"""Beginnings of names of variables that a shell inherits from its environment. Such a variable is unknown text if the episode did not
set it, while any other may also be empty (`UNSET`)."""
PROGRAMS_BY_NAME = {
    "PYTHON": "python", "CC": "cc", "CXX": "c++", "MAKE": "make", "NODE": "node", "NPM": "npm", "CARGO": "cargo", "JAVA": "java",
    "PERL": "perl", "RUBY": "ruby", "SHELL": "/bin/bash", "EDITOR": "vi", "PAGER": "less",
}  # fmt: skip
"""Variable -> the program that it names by custom, if the episode did not set it."""
_NUMBER = re.compile(r"[0-9]{1,9}")
_SLICE = re.compile(r"\s*(-?[0-9]{1,9})\s*(?::\s*(-?[0-9]{1,9})?\s*)?")
"""Offset and length of `${x:1:2}`, if both are plain numbers."""


class Expander:
    """Expands words with the variables of a session. An expansion may also set some of them, such as `${x:=1}`."""

    def __init__(self, session: GuardSession, walk: Callable[[Script], str | None], work: WorkBudget) -> None:
        """`walk` goes through the script of a substitution and returns what it prints, or None if that is not known."""
        self.session = session
        self._walk_substitution = walk
        self._work = work

    def expand_to_fields(self, word: Word) -> list[str]:
        """Return the arguments that a word becomes, which may be none. Raises: UnreadableCommand if it is too much work."""
        pieces = self._expand_home(self._expand_text(word, split=True)).split(BREAK)
        fields = [field for piece in pieces for field in expand_braces(piece, self._work.spend)]
        has_quotes = any(isinstance(part, Literal) and part.quoted for part in word)  # they keep an empty argument
        return [field.translate(BRACES_TO_TEXT) for field in fields if field or has_quotes][:MAX_FIELDS]

    def expand_to_value(self, word: Word) -> str:
        """Return the word as one text without marks of globs and braces: the value of an assignment, the body of a heredoc."""
        return self._expand_home(self._expand_text(word, split=False)).translate(KNOWN_TO_TEXT)

    def _expand_home(self, text: str) -> str:
        """Return the text with a tilde at its beginning replaced by the directory; that of an unknown user stays."""
        session = self.session
        directories = {"~": session.home, "~+": session.cwd, "~-": session.previous_cwd, "~root": "/root"}
        name, slash, tail = text.partition("/")
        return directories.get(name, name) + slash + tail

    def _expand_text(self, word: Word, split: bool) -> str:
        """Return the word with its parts expanded. With `split` white space in values becomes `BREAK`, and unquoted globs and braces
        become marks; else they stay characters."""
        text = "".join(self._expand_part(part, split) for part in word)
        self._work.spend(len(text))
        return text[:MAX_VALUE]

    def _expand_part(self, part: Part, split: bool) -> str:
        if isinstance(part, Literal):
            return part.text if part.quoted or not split else part.text.translate(TO_MARKS)
        if isinstance(part, Variable):
            value = self._expand_variable(part)
            stays_apart = part.quoted and split and part.name.endswith(KEPT_APART)
            return value if stays_apart else self._split_fields(value, part.quoted or not split)
        if isinstance(part, Substitution):
            output = self._walk_substitution(part.body)
            return UNKNOWN if output is None else self._split_fields(output.rstrip("\n"), part.quoted or not split)
        if isinstance(part, Arithmetic):
            self._expand_text(part.inner, split=False)  # for the scripts in it
            return UNKNOWN
        self._walk_substitution(part.body)  # a process substitution that is only a piece of a word
        return UNKNOWN

    def _split_fields(self, value: str, as_one_field: bool) -> str:
        """Return a value as it stands in an unquoted word: with `BREAK` for each separator, and marks for its globs. As one field, the
        items of an array are joined by blanks."""
        if as_one_field:
            return value.replace(BREAK, " ")
        separators = self.session.variables.get("IFS", " \t\n")
        table = dict.fromkeys(map(ord, separators), BREAK)
        return value.translate(table | {ord("*"): STAR, ord("?"): ANY_CHARACTER})

    def _expand_variable(self, part: Variable) -> str:
        """Return the value of a parameter expansion, with the mark for what is not known or not set."""
        if part.index:
            self._expand_text(part.index, split=False)
        value = self._variable_value(part.name)
        if part.operator == "indirect":
            value = None if value is None else self._variable_value(value)
        elif part.operator:
            return self._apply_operator(part, value)
        return _unset_variable_mark(part.name) if value is None else value

    def _variable_value(self, name: str) -> str | None:
        """Return the value of a variable, or the one that a shell has without the episode; None if we know neither. A variable that the
        episode did not set is noted in `read_variables`, since its value may come from the environment."""
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
        """Return the value of `${name<operator><operand>}`; `value` is that of the variable, None if it is not set. The operand is always
        expanded where it may matter, because that may run scripts."""
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
        comparisons = _count_comparisons(value, operator, pattern)
        self._work.spend(comparisons // TRIES_PER_UNIT + ITEM * value.count(BREAK))
        if comparisons > MAX_TRIES:
            return UNKNOWN
        is_positional = part.name in ("@", "*")
        if is_positional or part.name.endswith(ALL_ITEMS):
            return _apply_to_items(value, operator, pattern, from_one=is_positional)
        return apply_text_operator(value, operator, pattern)


def _unset_variable_mark(name: str) -> str:
    """Return the mark of a variable that the episode did not set: UNSET if it may well be empty, else UNKNOWN."""
    may_be_empty = _NUMBER.fullmatch(name) or (name.isidentifier() and not name.startswith(INHERITED_PREFIXES))
    return UNSET if may_be_empty and name != "0" else UNKNOWN


def _apply_to_items(value: str, operator: str, operand: str, from_one: bool) -> str:
    """Return the items of an array after an operator: `:` chooses some of them, any other changes each. With `from_one` the first item
    has the number 1, as that of `$@`."""
    items = value.split(BREAK)
    if operator != ":":
        return BREAK.join(apply_text_operator(element, operator, operand) for element in items)
    slice_match = _SLICE.fullmatch(show_field(operand))
    if slice_match is None or slice_match[1].startswith("-"):
        return value
    start = max(int(slice_match[1]) - from_one, 0)  # `${@:1}` begins at `$1`, `${x[@]:1}` at the second item
    return BREAK.join(items[start:][: int(slice_match[2])] if slice_match[2] else items[start:])


def _count_comparisons(value: str, operator: str, operand: str) -> int:
    """Return an upper bound of the comparisons of characters that an operator makes which cuts or replaces its operand in the value."""
    if operator not in ("/", "//", "#", "##", "%", "%%"):
        return 0
    return len(value) * len(operand) * (len(value) if operator[0] == "/" and STAR in operand else 1)


def apply_text_operator(value: str, operator: str, operand: str) -> str:
    """Return a value after an operator that cuts, replaces or changes case. The result is UNKNOWN where it cannot be worked out; an
    operator that we do not know changes nothing."""
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
        # First we find out how long the result would be, since it may be too long to make.
        remainder, count = _cached_glob_regex(old).subn("", value, count=0 if operator == "//" else 1)
        if not old or len(remainder) + count * len(new) > MAX_VALUE:
            return UNKNOWN if old else value
        return _cached_glob_regex(old).sub(lambda _: show_field(new), value, count=0 if operator == "//" else 1)
    if operator in ("#", "##", "%", "%%"):
        return _cut_match(value, operator, operand)
    return value


def _cut_match(value: str, operator: str, pattern: str) -> str:
    """Return the value without the beginning (`#`) or end (`%`) that fits; a double operator takes the longest, a single one the
    shortest. An end is cut as the beginning of the text from right to left."""
    backwards = operator[0] == "%"
    text = value[::-1] if backwards else value
    match = _cached_glob_regex(pattern, backwards, len(operator) == 1).match(text)
    remainder = text[match.end() :] if match else text
    return remainder[::-1] if backwards else remainder


_cached_glob_regex = lru_cache(maxsize=256)(glob_regex)
