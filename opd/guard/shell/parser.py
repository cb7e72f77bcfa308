"""The grammar of bash on top of the words: lists, pipelines, compound commands, redirections, functions."""

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
from opd.guard.shell.reader import ENDS_WORD, Reader

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_ITEM = re.compile(r"([A-Za-z_]\w*)\[")
_REDIRECT = re.compile(r"(\d+|\{\w+\})?(<<<|<<-|<<|<&|<>|&>>|&>|>>|>&|>\||<(?!\()|>(?!\())")
_FUNCTION = re.compile(r"(?:function[ \t]+)?([\w.:-]+)[ \t]*\([ \t]*\)\s*|function[ \t]+([\w.:-]+)\s+(?=[{(])")
_RESERVED = re.compile(r"(if|then|elif|else|fi|while|until|for|select|done|do|case|esac|\{|\}|!|\[\[|time|coproc)")
_COPROC_NAME = re.compile(r"[A-Za-z_]\w*[ \t]+(?=[{(])")
_TOKEN = re.compile(r"\s*(\|\||&&|;;|[|&;()<>]|[^\s|&;()<>]+)")
ENDS_CASE = (";;", ";&")
ENDS_LIST = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


def parse(text: str) -> Script:
    """Return the tree of a script. Raises: UnreadableCommand if it is none, or one that we cannot read."""
    reader = Parser(text)
    try:
        return reader.parse_script("")
    except RecursionError:
        raise UnreadableCommand("too deeply nested") from None
    except UnreadableCommand as error:
        raise UnreadableCommand(str(error), error.error_text or _make_bash_error(text, reader.at)) from None


def _make_bash_error(text: str, at: int) -> str:
    """Return the error of bash where it can read no further."""
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
        """Pipelines up to one of the reserved words, a closing parenthesis, `;;` or the end."""
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
        """Skip what ends a command: line ends, `;`, `&`, `&&` and `||`. The first of them, and the last if it is `&&` or `||`."""
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
                when = token if len(token) == 2 else ""
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
        unsure = False
        while (reserved := self._peek_reserved_word()) in ("!", "time", "coproc"):
            unsure = unsure or reserved != "time"
            self.at += len(reserved)
            self.skip_blanks()
            if reserved == "coproc" and (name := _COPROC_NAME.match(self.text, self.at)):
                self.at = name.end()
            if self.peek(2) == "-p":
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
        if self.depth > 40:
            raise UnreadableCommand("too deeply nested")
        self.depth += 1
        try:
            return self._parse_compound() or self._parse_simple_command()
        finally:
            self.depth -= 1

    def _parse_compound(self) -> Command | None:
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
        """Parse the lists of `if`, `while`, `until` and `{`, each up to the word that ends it."""
        follows = {
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
        """`(( ))` as a call of `:`, for the substitutions that are in it."""
        end = self.find_arithmetic_end(self.at)
        if end < 0:
            raise UnreadableCommand("(( is not closed")
        words = self.make_inner_reader(self.text[self.at + 2 : end]).read_expanded_text()
        self.at = end + 2
        return _script_that_expands((Arithmetic(words),)) if any(map(_runs_when_expanded, words)) else ()

    def _parse_for(self, reserved: str) -> Command:
        self.at += len(reserved)
        self.skip_blanks()
        if self.peek(2) == "((":
            head = self._parse_arithmetic()
            self._skip_separators()
            return CompoundCommand(
                (head, *self._parse_bodies(self._expect_reserved_word("do"))), "loop", self._parse_redirects()
            )
        name = self._read_plain_word()
        self.skip_blanks()
        words: list[Word] = [(Variable("@", quoted=True),)]
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
        word = self._peek_reserved_word()
        if word == "{":
            return word
        if word != reserved:
            raise UnreadableCommand(f"{reserved} is missing before {self.peek(10)!r}")
        return reserved

    def _read_plain_word(self) -> str:
        return "".join(part.text for part in self.read_word() if isinstance(part, Literal))

    def _parse_case(self) -> Command:
        self.at += len("case")
        self.skip_blanks()
        bodies: list[Script] = [_script_that_expands(self.read_word())]
        chain: Script = ()
        falls, every = False, False
        self._skip_separators()
        if self._read_plain_word() != "in":
            raise UnreadableCommand("case without in")
        while True:
            self._skip_separators()
            if self._peek_reserved_word() == "esac":
                self.at += len("esac")
                return CompoundCommand(tuple(bodies if every else [*bodies, ()]), "case", self._parse_redirects())
            star, patterns = self._parse_patterns()
            every = star or every
            body = patterns + self._parse_list(frozenset({"esac"}))
            # After `;&` the next body runs as well, so each body also counts together with those that fall into it.
            chain = (*chain, *body) if falls else body
            bodies += [chain, body] if falls else [body]
            falls = self.peek(2) == ";&" or self.peek(3) == ";;&"
            while self.peek() in (";", "&"):
                self.at += 1

    def _parse_patterns(self) -> tuple[bool, Script]:
        """Parse the patterns of a branch. Return True if one of them is `*`, and a script of what is expanded in them."""
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
        """`[[ ... ]]` as a call of `[[`: what is compared are its operands."""
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
        redirects: list[Redirect] = []
        self.skip_blanks()
        while self._parse_redirect(redirects):
            self.skip_blanks()
        return redirects

    def _parse_redirect(self, redirects: list[Redirect]) -> bool:
        """Read a redirection, if there is one here."""
        match = _REDIRECT.match(self.text, self.at)
        if not match:
            return False
        self.at = match.end()
        self.skip_blanks()
        operator = match[2]
        if operator not in ("<<", "<<-"):
            own = "0" if operator[0] == "<" else "1"
            fd = "" if match[1] in (None, own) else match[1]
            redirects.append(Redirect(operator, self.read_word(), match[1] in (None, "1"), fd))
            return True
        start = self.at
        mark = self.read_word()
        raw = self.text[start : self.at]
        plain = "".join(part.text for part in mark if isinstance(part, Literal))
        fd = "" if match[1] in (None, "0") else match[1]
        self.heredocs.append((redirects, plain, operator == "<<-", any(c in raw for c in "'\"\\"), fd))
        return True

    def _parse_simple_command(self) -> Command:
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
        """Read the assignment that stands here, if there is one."""
        match, bracket = _ASSIGNMENT.match(self.text, self.at), ""
        index: Word = ()
        if match is None and (item := _ITEM.match(self.text, self.at)):
            end = self.find_bracket_end(self.text, item.end() - 1)
            match = _ASSIGNMENT.match(item[1] + self.text[end + 1 : end + 3]) if end > 0 else None
            bracket = self.text[item.end() - 1 : end + 1]
            index = (
                self.make_inner_reader(bracket[1:-1]).read_expanded_text()
                if match and set(bracket) & {"$", "`"}
                else ()
            )
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
    """Return True if a script runs when a part is expanded."""
    if isinstance(part, Arithmetic):
        return any(map(_runs_when_expanded, part.inner))
    if isinstance(part, Variable):
        return any(map(_runs_when_expanded, (*part.operand, *part.index)))
    return not isinstance(part, Literal)


def _script_that_expands(word: Word) -> Script:
    """Return a script that expands a word and does nothing else."""
    return (List((Pipeline((Simple((), ((Literal(":"),), word)),)),)),)
