"""The grammar of bash on top of the words that `reader` reads: lists, pipelines, compound commands, redirections, functions.

A method named `_parse_X` reads an X that begins at the position, and moves the position behind it.
"""

from __future__ import annotations

import re

from opd.guard.shell.nodes import (
    Arithmetic,
    Assignment,
    Command,
    CompoundCommand,
    For,
    Function,
    List,
    Literal,
    Part,
    Pipeline,
    Redirect,
    Script,
    Simple,
    UnreadableCommand,
    Variable,
    Word,
)
from opd.guard.shell.reader import ENDS_WORD, Heredoc, Reader

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ITEM = re.compile(r"([A-Za-z_]\w*)\[")
_REDIRECT = re.compile(r"(\d+|\{\w+\})?(<<<|<<-|<<|<&|<>|&>>|&>|>>|>&|>\||<(?!\()|>(?!\())")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([\w.:-]+)[ \t]*\([ \t]*\)\s*|function[ \t]+([\w.:-]+)\s+(?=[{(])")
_RESERVED = re.compile(r"(if|then|elif|else|fi|while|until|for|select|done|do|case|esac|\{|\}|!|\[\[|time|coproc)")
_COPROC_NAME = re.compile(r"[A-Za-z_]\w*[ \t]+(?=[{(])")
_TOKEN = re.compile(r"\s*(\|\||&&|;;|[|&;()<>]|[^\s|&;()<>]+)")
ENDS_CASE = (";;", ";&")
"""Beginnings of the operators that end a branch of a `case`: `;;`, `;&`, `;;&`."""
ENDS_LIST = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
"""Reserved words that can only stand behind a list, and so are an error where no list waits for them."""


MAX_OPEN = 40
"""The most commands and substitutions inside of each other; a function or a loop counts, too."""


def parse(text: str) -> Script:
    """Return the tree of a script. Raises: UnreadableCommand if the text is no script, or one that we cannot read; with it what bash
    would print."""
    reader = Parser(text)
    try:
        return reader.parse_script("")
    except RecursionError:
        raise UnreadableCommand("too deeply nested") from None
    except UnreadableCommand as error:
        raise UnreadableCommand(str(error), error.error_text or _make_bash_error(text, reader.at)) from None


def _make_bash_error(text: str, at: int) -> str:
    """Return what bash prints about a script that it cannot read beyond the index `at`."""
    token = _TOKEN.match(text, at)
    if token is None:
        return f"bash: -c: line {text.count(chr(10)) + 2}: syntax error: unexpected end of file"
    line = text.count("\n", 0, token.start(1))
    prefix = f"bash: -c: line {line + 1}"
    return f"{prefix}: syntax error near unexpected token `{token[1]}'\n{prefix}: `{text.split(chr(10))[line]}'"


class Parser(Reader):
    """Reads a script from left to right, without going back."""

    def parse_script(self, closing: str) -> Script:
        script = self._parse_list(frozenset())
        self.skip_blanks()
        if self.peek(len(closing) or 1) != closing:
            raise UnreadableCommand(f"{closing or 'the end'} is missing before {self.peek(10)!r}")
        self.at += len(closing)
        if self.heredocs and not closing:
            raise UnreadableCommand("a heredoc without a body")
        return script

    def _parse_list(self, ends: frozenset[str]) -> Script:
        """Parse lists up to one of the reserved words `ends`, a closing parenthesis, the end of a branch of `case`, or the end of the
        text. None of these is skipped."""
        lists: list[List] = []
        current: list[Pipeline] = []
        while True:
            separator, when = self._skip_separators()
            if current and not when:
                lists.append(List(tuple(current), separator == "&"))
                current = []
            reserved = self._peek_reserved_word()
            if not self.peek() or self.peek() == ")" or self.peek(2) in ENDS_CASE or reserved in ends:
                return (*lists, List(tuple(current))) if current else tuple(lists)
            if reserved in ENDS_LIST:
                raise UnreadableCommand(f"{reserved} where no such part is open")
            current.append(self._parse_pipeline(when if current else ""))

    def _skip_separators(self) -> tuple[str, str]:
        """Skip what ends a command: line ends, `;`, `&`, `&&` and `||`. Return the first of them, or nothing; and the last of them if
        it is `&&` or `||`, so that the next pipeline depends on it, else nothing."""
        separator = when = ""
        while True:
            self.skip_blanks()
            token = self.peek(2) if self.peek(2) in ("&&", "||") else self.peek()
            if token == "\n":
                self.at += 1
                self.read_heredocs()
            elif (
                token in ("&&", "||")
                or (token == ";" and self.peek(2) not in ENDS_CASE)
                or (token == "&" and self.peek(2) != "&>")
            ):
                self.at += len(token)
                when = token if token in ("&&", "||") else ""
            else:
                return separator, when
            separator = separator or token

    def _peek_reserved_word(self) -> str:
        """Return the reserved word that stands here, or nothing."""
        match = _RESERVED.match(self.text, self.at)
        if not match:
            return ""
        following = self.text[match.end() : match.end() + 1]
        return match[0] if not following or following in ENDS_WORD else ""

    def _parse_pipeline(self, when: str) -> Pipeline:
        """Parse commands with `|` between them, and what may stand in front of them. `when` is the `&&` or `||` before, if any."""
        unsure = False
        while (reserved := self._peek_reserved_word()) in ("!", "time", "coproc"):
            unsure = unsure or reserved != "time"
            self.at += len(reserved)
            self.skip_blanks()
            if reserved == "coproc" and (name := _COPROC_NAME.match(self.text, self.at)):
                self.at = name.end()
            if self.peek(2) == "-p":  # of `time -p`
                self.at += 2
                self.skip_blanks()
        commands = [self._parse_command()]
        while True:
            self.skip_blanks()
            if self.peek() != "|" or self.peek(2) == "||":
                return Pipeline(tuple(commands), when, unsure)
            self.at += 2 if self.peek(2) == "|&" else 1
            while self.peek_past_blanks() == "\n":
                self.at += 1
                self.read_heredocs()
            commands.append(self._parse_command())

    def _parse_command(self) -> Command:
        if self.depth > MAX_OPEN:
            raise UnreadableCommand("too deeply nested")
        self.depth += 1
        try:
            return self._parse_compound() or self._parse_simple_command()
        finally:
            self.depth -= 1

    def _parse_compound(self) -> Command | None:
        """Parse a compound command, a test or a function, with its redirections; return None if none of these stands here."""
        reserved = self._peek_reserved_word()
        if reserved in ("for", "select"):
            return self._parse_for(reserved)
        if reserved == "case":
            return self._parse_case()
        if reserved == "[[":
            return self._parse_test()
        if reserved in ("if", "while", "until", "{"):
            bodies = self._parse_bodies(reserved)
            return CompoundCommand(bodies, {"if": "if", "{": "braces"}.get(reserved, "loop"), self._parse_redirects())  # type: ignore[arg-type]
        if self.peek(2) == "((" and self.find_arithmetic_end(self.at) > 0:
            return CompoundCommand((self._parse_arithmetic(),), "braces", self._parse_redirects())
        if self.peek() == "(":
            self.at += 1
            return CompoundCommand((self.parse_script(")"),), "subshell", self._parse_redirects())
        if match := _FUNCTION.match(self.text, self.at):
            self.at = match.end()
            return Function(match[1] or match[2], self._parse_command())
        return None

    def _parse_bodies(self, reserved: str) -> tuple[Script, ...]:
        """Parse the lists of `if`, `while`, `until` or `{`, up to the word that ends the last. `reserved` is the word that stands here."""
        follows = {  # word in front of a list -> words that may end this list
            "if": {"then"},
            "elif": {"then"},
            "then": {"elif", "else", "fi"},
            "else": {"fi"},
            "while": {"do"},
            "until": {"do"},
            "do": {"done"},
            "{": {"}"},
        }
        bodies = []
        while reserved in follows:
            self.at += len(reserved)
            bodies.append(self._parse_list(frozenset(follows[reserved])))
            reserved = self._peek_reserved_word()
            if not reserved:
                raise UnreadableCommand("a compound command is not closed")
        self.at += len(reserved)
        return tuple(bodies)

    def _parse_arithmetic(self) -> Script:
        """Parse `(( ))` as a call of `:` with what is in it, for that may run scripts; as an empty script if nothing in it does."""
        end = self.find_arithmetic_end(self.at)
        if end < 0:
            raise UnreadableCommand("(( is not closed")
        words = self.parse_expansions(self.text[self.at + 2 : end])
        self.at = end + 2
        return _script_that_expands((Arithmetic(words),)) if any(map(_runs_when_expanded, words)) else ()

    def _parse_for(self, reserved: str) -> Command:
        """Parse `for` or `select`. A `for ((...))` becomes a loop with the arithmetic as its test."""
        self.at += len(reserved)
        self.skip_blanks()
        if self.peek(2) == "((":
            head = self._parse_arithmetic()
            self._skip_separators()
            bodies = (head, *self._parse_bodies(self._expect_reserved_word("do")))
            return CompoundCommand(bodies, "loop", self._parse_redirects())
        name = self._read_plain_word()
        self.skip_blanks()
        words: list[Word] = [(Variable("@", quoted=True),)]  # without `in` it goes over the positional arguments
        if self.peek() == "\n":
            self._skip_separators()
        if self.text.startswith("in", self.at) and self.text[self.at + 2 : self.at + 3] in (" ", "\t", ";", "\n"):
            self.at += 2
            words = []
            while self.peek_past_blanks() not in (";", "\n", "&", ""):
                words.append(self.read_word())
        self._skip_separators()
        body = self._parse_bodies(self._expect_reserved_word("do"))
        return For(name, tuple(words), body[0], self._parse_redirects())

    def _expect_reserved_word(self, reserved: str) -> str:
        """Return the reserved word that stands here, which has to be this one, or a `{`, as bash also allows. Raises:
        UnreadableCommand for any other."""
        word = self._peek_reserved_word()
        if word == "{":
            return word
        if word != reserved:
            raise UnreadableCommand(f"{reserved} is missing before {self.peek(10)!r}")
        return reserved

    def _read_plain_word(self) -> str:
        """Read a word, and return its characters without expansions."""
        return "".join(part.text for part in self.read_word() if isinstance(part, Literal))

    def _parse_case(self) -> Command:
        """Parse a `case`: its first body expands the subject, the others are branches. Unless a pattern `*` fits everything, an empty
        body stands for the case that no branch runs. Raises: UnreadableCommand."""
        self.at += len("case")
        self.skip_blanks()
        bodies: list[Script] = [_script_that_expands(self.read_word())]
        chain: Script = ()
        falls_through, has_default = False, False
        self._skip_separators()
        if self._read_plain_word() != "in":
            raise UnreadableCommand("case without in")
        while True:
            self._skip_separators()
            if self._peek_reserved_word() == "esac":
                self.at += len("esac")
                all_bodies = bodies if has_default else [*bodies, ()]
                return CompoundCommand(tuple(all_bodies), "case", self._parse_redirects())
            has_star, patterns = self._parse_patterns()
            has_default = has_star or has_default
            body = patterns + self._parse_list(frozenset({"esac"}))
            # Behind `;&` the next branch runs as well. `chain` is the run of branches that begins at the first of them.
            chain = (*chain, *body) if falls_through else body
            bodies += [chain, body] if falls_through else [body]
            falls_through = self.peek(2) == ";&" or self.peek(3) == ";;&"
            while self.peek() in (";", "&"):
                self.at += 1

    def _parse_patterns(self) -> tuple[bool, Script]:
        """Parse the patterns of a branch. Return True if one of them is `*`, and a script that does what expanding them runs."""
        expanded: Script = ()
        if self.peek() == "(":
            self.at += 1
        start = self.at
        while self.peek_past_blanks() != ")":
            if self.peek() == "|":
                self.at += 1
            else:
                word = self.read_word()
                expanded += _script_that_expands(word) if any(map(_runs_when_expanded, word)) else ()
        self.at += 1
        return "*" in map(str.strip, self.text[start : self.at - 1].split("|")), expanded

    def _parse_test(self) -> Command:
        """Parse `[[ ... ]]` as a call of a program `[[` whose arguments are the words in it, without operators that end words."""
        self.at += 2
        words: list[Word] = [(Literal("[["),)]
        while True:
            self.skip_blanks()
            if self.peek(2) == "]]":
                self.at += 2
                return Simple((), tuple(words), self._parse_redirects())
            if self.peek() in ("(", ")", "<", ">", "&", "|", "\n"):
                self.at += 1
            else:
                words.append(self.read_word())

    def _parse_redirects(self) -> list[Redirect]:
        """Parse the redirections behind a compound command."""
        redirects: list[Redirect] = []
        self.skip_blanks()
        while self._parse_redirect(redirects):
            self.skip_blanks()
        return redirects

    def _parse_redirect(self, redirects: list[Redirect]) -> bool:
        """Parse a redirection and add it to `redirects`, or a heredoc to `heredocs` until its body comes. Return False if none stands
        here."""
        match = _REDIRECT.match(self.text, self.at)
        if not match:
            return False
        self.at = match.end()
        self.skip_blanks()
        operator = match[2]
        if operator not in ("<<", "<<-"):
            default_fd = "0" if operator[0] == "<" else "1"
            fd = "" if match[1] in (None, default_fd) else match[1]
            redirects.append(Redirect(operator, self.read_word(), match[1] in (None, "1"), fd))
            return True
        start = self.at
        mark = self._read_plain_word()
        quoted = any(c in self.text[start : self.at] for c in "'\"\\")
        fd = "" if match[1] in (None, "0") else match[1]
        self.heredocs.append(Heredoc(redirects, mark, operator == "<<-", quoted, fd))
        return True

    def _parse_simple_command(self) -> Command:
        """Parse assignments, a program with arguments, and redirections. Raises: UnreadableCommand if none of these stands here."""
        assignments: list[Assignment] = []
        words: list[Word] = []
        redirects: list[Redirect] = []
        while True:
            self.skip_blanks()
            if self._parse_redirect(redirects):
                continue
            if not self.peek() or (self.peek() in ENDS_WORD and self.peek(2) not in ("<(", ">(")):
                break
            assignment = None if words else self._parse_assignment()
            if assignment:
                assignments.append(assignment)
            else:
                words.append(self.read_word())
        if not (assignments or words or redirects or self.heredocs):
            raise UnreadableCommand(f"a command is missing before {self.peek(10)!r}")
        return Simple(tuple(assignments), tuple(words), redirects)

    def _parse_assignment(self) -> Assignment | None:
        """Parse an assignment to a variable, an array or an item of one; return None, and skip nothing, if none stands here."""
        match, bracket = _ASSIGNMENT.match(self.text, self.at), ""
        index: Word = ()
        if match is None and (item := _ITEM.match(self.text, self.at)):
            end = self.find_bracket_end(self.text, item.end() - 1)
            match = _ASSIGNMENT.match(item[1] + self.text[end + 1 : end + 3]) if end > 0 else None
            bracket = self.text[item.end() - 1 : end + 1]
            index = self.parse_index(bracket[1:-1]) if match else ()
        if match is None:
            return None
        self.at += len(bracket) + len(match[0])
        value: Word = ()
        items: tuple[Word, ...] | None = None
        if self.peek() == "(":
            self.at += 1
            parts: list[Word] = []
            self._skip_separators()
            while self.peek() != ")":
                parts.append(self.read_word())
                self._skip_separators()
            self.at += 1
            items = tuple(parts)
        elif self.peek() and self.peek() not in ENDS_WORD:
            value = self.read_word()
        return Assignment(match[1] + bracket, value, bool(match[2]), items, index)


def _runs_when_expanded(part: Part) -> bool:
    """Return True if a script runs when this part of a word is expanded."""
    if isinstance(part, Arithmetic):
        return any(map(_runs_when_expanded, part.inner))
    if isinstance(part, Variable):
        return any(map(_runs_when_expanded, (*part.operand, *part.index)))
    return not isinstance(part, Literal)


def _script_that_expands(word: Word) -> Script:
    """Return a script that expands a word and does nothing else."""
    return (List((Pipeline((Simple((), ((Literal(":"),), word)),)),)),)
