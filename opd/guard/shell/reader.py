"""Reads the words of a shell script: quotes, escapes, parameter expansions, substitutions and heredocs.

The grammar on top of words is in `parser`. Methods named `read_` and `skip_` move the position on, `peek` and `find_` do not.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from opd.guard.shell.nodes import (
    Arithmetic,
    Literal,
    Part,
    Process,
    Redirect,
    Script,
    Substitution,
    UnreadableCommand,
    Variable,
    Word,
)

MAX_CHARACTERS = 1 << 16
"""The most characters of a script."""
MAX_INDEX = 1024
"""The most characters of an index in brackets."""
MAX_DEPTH = 24
"""The most scripts inside of each other, by substitutions."""
BLANK = " \t"
ENDS_WORD = frozenset(" \t\n;&|()<>")
"""Characters that end a word if they are not quoted."""
SPECIAL = "@*#?-$!0123456789"
"""Variables with a name of one character that is no letter."""
ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
"""Letter of an escape such as `\\n` -> the character that it stands for."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPERATOR = re.compile(r":?[-=?+]|##?|%%?|//?|:|\^\^?|,,?|@")
_ANSI_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{1,4}|U[0-9A-Fa-f]{1,8}|0?[0-7]{1,3}|.)", re.DOTALL)


def unescape(text: str) -> str:
    """Return the text with the escapes of `$'...'`, `printf` and `echo -e` resolved."""

    def replace_escape(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xuU" and len(code) > 1:
            return chr(min(int(code[1:], 16), 0x10FFFF))  # chr() raises for a larger number
        if code[0] in "01234567":
            return chr(int(code, 8) & 0xFF)  # as bash does, which makes one byte of it
        return ANSI.get(code, code if code in "\\'\"?" else "\\" + code)  # an escape that does not exist stays as it is

    return _ANSI_ESCAPE.sub(replace_escape, text)


class Heredoc(NamedTuple):
    """A heredoc whose first line was read; its body comes after the next line end."""

    redirects: list[Redirect]
    """Redirections of its command, to which it is added."""
    mark: str
    """The line that ends the body."""
    cuts_tabs: bool
    """True for `<<-`: tabs at the beginning of a line are left out."""
    quoted: bool
    """True if the mark is quoted, so that nothing in the body is expanded."""
    fd: str
    """Number of the descriptor, if it is not the standard input."""


class Reader:
    """A position in a text, and what can be read from there. `parser.Parser` adds the grammar."""

    def __init__(self, text: str, depth: int = 0) -> None:
        if len(text) > MAX_CHARACTERS or depth > MAX_DEPTH:
            raise UnreadableCommand("too long or too deeply nested")
        self.text = text
        self.at = 0
        """The position: index of the next character."""
        self.depth = depth
        """Number of scripts and commands that are open around the position."""
        self.heredocs: list[Heredoc] = []
        """Heredocs whose bodies are still to come."""

    def parse_script(self, closing: str) -> Script:
        """Parse a script up to a closing operator, and skip that operator. `parser.Parser` implements it."""
        raise NotImplementedError

    def make_inner_reader(self, text: str) -> Reader:
        """Return a reader of the same kind for a text inside of this one."""
        return type(self)(text, self.depth + 1)

    def peek(self, count: int = 1) -> str:
        """Return the next characters; fewer at the end of the text."""
        return self.text[self.at : self.at + count]

    def skip_blanks(self) -> None:
        """Move on to the next word, operator or line end: over blanks, comments, and line ends behind a backslash."""
        text = self.text
        while self.at < len(text):
            if text[self.at] in BLANK:
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif text[self.at] == "#" and (self.at == 0 or text[self.at - 1] in ENDS_WORD):
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def peek_past_blanks(self) -> str:
        """Skip blanks, and return the next character; nothing at the end."""
        self.skip_blanks()
        return self.peek()

    def read_word(self) -> Word:
        """Read the word that begins here; not empty. Raises: UnreadableCommand."""
        parts: list[Part] = []
        start = self.at
        while self.at < len(self.text):
            char = self.peek()
            if char in "<>" and self.peek(2) in ("<(", ">(") and not parts:
                self.at += 2
                parts.append(Process(self.parse_script(")")))
            elif char == "(" and parts and self._read_extended_glob(parts):
                continue
            elif char in ENDS_WORD:
                break
            else:
                self._read_part(char, parts)
        if self.at == start:
            raise UnreadableCommand(f"a word is missing before {self.text[self.at : self.at + 10]!r}")
        return tuple(parts) or (Literal("", True),)

    def _read_extended_glob(self, parts: list[Part]) -> bool:
        """Read an extended glob of which the first character is already in `parts`, if one stands here: `@(a|b)` and `+(a|b)` become
        `{a,b}`, any other becomes `*`. Return True if there was one."""
        last, end = parts[-1], self.find_parenthesis_end(self.at)
        if not isinstance(last, Literal) or last.quoted or last.text[-1:] not in tuple("@?*+!") or end < 0:
            return False
        body = self.text[self.at + 1 : end].replace("|", ",")
        replacement = ("{" + body + "}" if "," in body else body) if last.text[-1] in "@+" else "*"
        parts[-1] = Literal(last.text[:-1] + replacement)
        self.at = end + 1
        return True

    def find_parenthesis_end(self, start: int) -> int:
        """Return the index of the parenthesis that closes the one at `start`; -1 if there is none, or if more than a pattern stands
        between them."""
        end = self.text.find(")", start)
        return -1 if set(self.text[start + 1 : end]) & set("( \t\n;&$`'\"") else end

    def _read_part(self, char: str, parts: list[Part]) -> None:
        """Read what begins with `char` at the position: a quoted text, an expansion, or characters up to the next of these. Add it to
        `parts`. Raises: UnreadableCommand for a quote or an expansion that is not closed."""
        if char == "'":
            end = self._find_unquoted("'", self.at + 1)
            parts.append(Literal(self.text[self.at + 1 : end], True))
            self.at = end + 1
        elif char == '"':
            self.at += 1
            parts.append(Literal("", True))  # `""` is an empty argument, and not none
            self._read_double_quotes(parts, '"')
            self.at += 1
        elif char == "\\":
            if self.peek(2) != "\\\n":
                parts.append(Literal(self.text[self.at + 1 : self.at + 2], True))
            self.at += 2
        elif char == "$" and self.peek(2) == "$'":
            self._read_ansi_quotes(parts)
        elif char == "$" and self.peek(2) == '$"':
            self.at += 1
        elif char in "$`":
            self._read_dollar(parts, False)
        else:
            start = self.at
            while self.at < len(self.text) and self.peek() not in ENDS_WORD and self.peek() not in "'\"\\$`":
                self.at += 1
            parts.append(Literal(self.text[start : self.at]))

    def _read_ansi_quotes(self, parts: list[Part]) -> None:
        """Read `$'...'`, a quoted text with escapes."""
        start = self.at = self.at + 2
        while self.peek() not in ("'", ""):
            self.at += 2 if self.peek() == "\\" else 1
        if not self.peek():
            raise self._make_unclosed_error("a quote", "'")
        parts.append(Literal(unescape(self.text[start : self.at]), True))
        self.at += 1

    def _read_double_quotes(self, parts: list[Part], closing: str) -> None:
        """Read what stands in double quotes, up to the quote `closing`, which stays; with an empty `closing` up to the end of the text."""
        start = self.at
        while self.peek() != closing:
            char = self.peek()
            if not char:
                self.at = start
                raise self._make_unclosed_error("a quote", closing)
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                if following != "\n":
                    parts.append(Literal(following if following in '$`"\\' else "\\" + following, True))
                self.at += 2
            elif char in "$`":
                self._read_dollar(parts, True)
            else:
                start = self.at
                while self.peek() not in ("\\", "$", "`", closing, ""):
                    self.at += 1
                parts.append(Literal(self.text[start : self.at], True))

    def parse_expansions(self, text: str) -> Word:
        """Parse a text inside of this one in the way of a heredoc: expansions work, quotes are characters."""
        parts: list[Part] = []
        self.make_inner_reader(text)._read_double_quotes(parts, "")
        return tuple(parts)

    def parse_index(self, text: str) -> Word:
        """Parse an index without its brackets if something in it is expanded, else return nothing."""
        return self.parse_expansions(text) if set(text) & {"$", "`"} else ()

    def _read_dollar(self, parts: list[Part], quoted: bool) -> None:
        """Read an expansion that begins with `$` or a backtick; a `$` before anything else is a character."""
        if self.peek() == "`":
            end = self.at + 1
            while self.text[end : end + 1] != "`":
                if end >= len(self.text):
                    raise self._make_unclosed_error("a backtick", "`")
                end += 2 if self.text[end] == "\\" else 1
            body = re.sub(r"\\([$`\\])", r"\1", self.text[self.at + 1 : end])
            self.at = end + 1
            parts.append(Substitution(self.make_inner_reader(body).parse_script(""), quoted))
        elif self.peek(3) == "$((" and (end := self.find_arithmetic_end(self.at + 1)) > 0:
            parts.append(Arithmetic(self.parse_expansions(self.text[self.at + 3 : end])))
            self.at = end + 2
        elif self.peek(2) == "$[" and (end := self.find_bracket_end(self.text, self.at + 1)) > 0:
            parts.append(Arithmetic(self.parse_expansions(self.text[self.at + 2 : end])))
            self.at = end + 1
        elif self.peek(2) == "$(":
            self.at += 2
            if self.depth >= MAX_DEPTH:
                raise UnreadableCommand("too deeply nested")
            self.depth += 1
            parts.append(Substitution(self.parse_script(")"), quoted))
            self.depth -= 1
        elif self.peek(2) == "${":
            self._read_parameter(parts, quoted)
        elif match := _NAME.match(self.text, self.at + 1):
            parts.append(Variable(match[0], quoted=quoted))
            self.at = match.end()
        elif (name := self.text[self.at + 1 : self.at + 2]) and name in SPECIAL:
            parts.append(Variable(name, quoted=quoted))
            self.at += 2
        else:
            parts.append(Literal("$", True))
            self.at += 1

    def find_arithmetic_end(self, start: int) -> int:
        """Return the index of the `))` that closes the `((` at `start`; -1 if there is none, so that this is a subshell in another one."""
        depth = 0
        for index in range(start, len(self.text)):
            depth += {"(": 1, ")": -1}.get(self.text[index], 0)
            if depth == 1 and self.text[index] == ")":
                return index if self.text[index + 1 : index + 2] == ")" else -1
        return -1

    def _read_parameter(self, parts: list[Part], quoted: bool) -> None:
        """Read `${...}`. Raises: UnreadableCommand for an operator that we do not know."""
        start, end = self.at + 2, self._find_closing_brace(self.at + 2)
        body, prefix = self.text[start:end], ""
        self.at = end + 1
        if len(body) > 1 and body[0] in "#!" and (body[1].isalnum() or body[1] in "_@*"):
            prefix, body = {"#": "length", "!": "indirect"}[body[0]], body[1:]
        match = _NAME.match(body)
        name = match[0] if match else body[:1]
        suffix = body[len(name) :]
        index: Word = ()
        if suffix.startswith("[") and (end := self.find_bracket_end(suffix, 0)) > 0:
            index = self.parse_index(suffix[1:end])
            name, suffix = name + suffix[: end + 1], suffix[end + 1 :]
        operator = _OPERATOR.match(suffix)
        if suffix and not operator:
            raise UnreadableCommand(f"an expansion that we do not know: ${{{body}}}")
        operand = self.make_inner_reader(suffix[operator.end() :]).read_operand() if operator else ()
        parts.append(Variable(name, prefix or (operator[0] if operator else ""), operand, quoted, index))

    @staticmethod
    def find_bracket_end(text: str, start: int) -> int:
        """Return the index of the bracket that closes the one at `start`; -1 if there is none within `MAX_INDEX` characters, where it
        would hardly be that of an index."""
        depth = 0
        for at in range(start, min(len(text), start + MAX_INDEX)):
            depth += {"[": 1, "]": -1}.get(text[at], 0)
            if depth == 0:
                return at
        return -1

    def read_operand(self) -> Word:
        """Read the whole text as one word, blanks in it included."""
        parts: list[Part] = []
        while self.at < len(self.text):
            if self.peek() in ENDS_WORD:
                parts.append(Literal(self.peek()))
                self.at += 1
            else:
                self._read_part(self.peek(), parts)
        return tuple(parts)

    def _find_closing_brace(self, start: int) -> int:
        """Return the index of the brace that closes the `${` before `start`. Raises: UnreadableCommand if there is none."""
        depth, index = 1, start
        while index < len(self.text):
            char = self.text[index]
            if char == "\\":
                index += 1
            elif char == "'" and depth == 1 and (end := self.text.find("'", index + 1)) > 0:
                index = end
            elif char in "{}":
                depth += 1 if char == "{" else -1
                if depth == 0:
                    return index
            index += 1
        raise self._make_unclosed_error("a brace", "}")

    def _find_unquoted(self, char: str, start: int) -> int:
        end = self.text.find(char, start)
        if end < 0:
            raise self._make_unclosed_error("a quote", char)
        return end

    def _make_unclosed_error(self, construct: str, mark: str) -> UnreadableCommand:
        """Return the error for a construct that is not closed, with what bash prints about the missing `mark`."""
        line = self.text.count("\n", 0, self.at) + 1
        return UnreadableCommand(
            f"{construct} is not closed", f"bash: -c: line {line}: unexpected EOF while looking for matching `{mark}'"
        )

    def read_heredocs(self) -> None:
        """Read the bodies of `heredocs`, which begin at the position, and add each to the redirections of its command."""
        for redirects, mark, cuts_tabs, quoted, fd in self.heredocs:
            lines = []
            while True:
                if self.at >= len(self.text):
                    break  # the shell takes what is there, with a warning
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = end + 1
                line = line.lstrip("\t") if cuts_tabs else line
                if line == mark:
                    break
                lines.append(line + "\n")
            self.at = min(self.at, len(self.text))
            body = "".join(lines)
            word: Word = (Literal(body, True),) if quoted else self.parse_expansions(body)
            redirects.append(Redirect("<<", word, fd=fd))
        self.heredocs.clear()
