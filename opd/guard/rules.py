"""Stage one: rules in YAML, compared with the program calls that a command would make.

A rule has clauses. A clause fits a call if all of its keys do. A rule hits a call if one of its clauses under `any` fits the call and none
under `unless` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field

from opd.errors import ConfigError
from opd.guard.facts import ProgramCall
from opd.guard.paths import OUTSIDE, PathGlobs, TextGlobs, is_valid_glob
from opd.guard.session import GuardSession
from opd.settings.strict import Name, Strict
from opd.settings.yaml_files import load_yaml, parse_yaml, validate_section

SHIPPED = "shipped"
"""The name of our own rules in `guard.rules`."""
Texts = Mapping[str, Sequence[str]]
"""Key of a clause -> the texts of a call that its patterns are compared with. A key for which a call has no text is left out."""
Test = Callable[[Texts, str], bool]
"""Tests a call by its texts; the second argument is the directory where the session begins."""

TEXTS: dict[str, Callable[[ProgramCall], Sequence[str]]] = {
    "program": lambda call: (call.program,),
    "flags": lambda call: tuple(call.flags),
    "and_flags": lambda call: tuple(call.flags),
    "args": lambda call: call.args,
    "urls": lambda call: call.urls,
    "hosts": lambda call: call.hosts,
    "git": lambda call: (call.git,) if call.git else (),
    "uses": lambda call: call.uses,
    "env": lambda call: call.env,
    "text": lambda call: (call.text,) if call.text else (),
    "sources": lambda call: call.sources,
    "feeds": lambda call: call.feeds,
    "tags": lambda call: tuple(call.tags),
}
"""Key whose patterns are globs over text -> the function that reads the texts to compare them with."""
PATHS: dict[str, Callable[[ProgramCall], Sequence[str]]] = {
    "paths": lambda call: call.reads + call.writes,
    "reads": lambda call: call.reads,
    "writes": lambda call: call.writes,
    "mentions": lambda call: call.mentions,
    "covers": lambda call: call.reads,
}
"""Key whose patterns are globs over paths -> the function that reads the paths to compare them with."""
READERS = TEXTS | PATHS


class Clause(Strict):
    """Conditions on a call. A key fits if any of its patterns does, and all keys that are given have to fit."""

    program: list[str] = []
    """Names of the program, without directory; inline code has its language."""
    flags: list[str] = []
    """Options, such as `-r` or `--all`."""
    and_flags: list[str] = []
    """Further options, one of which it must have beside one of `flags`."""
    args: list[str] = []
    """Arguments that are no options; the strings of inline code."""
    paths: list[str] = []
    """Absolute paths that it reads or writes."""
    reads: list[str] = []
    writes: list[str] = []
    mentions: list[str] = []
    """Absolute paths that stand anywhere in what the call is given, and that are no paths which it is known to read or write. They
    are only looked for where no rule hits."""
    covers: list[str] = []
    """Holds if it reads through a glob that takes in one of these, or something below it, and says nothing of its name."""
    urls: list[str] = []
    hosts: list[str] = []
    hosts_not: list[str] = []
    """Holds if some host fits none of these."""
    git: list[str] = []
    """Sub-commands of git."""
    uses: list[str] = []
    """Dotted names in inline code."""
    env: list[str] = []
    """Variables that it expands or asks for, and that the episode did not set."""
    text: list[str] = []
    """Text that it writes to a file."""
    sources: list[str] = []
    """Programs whose output it gets."""
    sources_not: list[str] = []
    """Holds if some source fits none of these, or there is none."""
    feeds: list[str] = []
    """Lines of the calls that get its output."""
    tags: list[str] = []
    none: list[Literal["args", "urls", "hosts", "flags", "paths", "sources", "feeds", "text"]] = []
    """Parts that it must not have at all."""


class Rule(Strict):
    """One rule with its examples."""

    id: Name
    about: str
    """Reason why such a command is a cheat, for people and for the judge."""
    verdict: Literal["block", "judge"]
    """`block`: a hit is certain and no judge is asked."""
    dummy: Literal["no_file", "no_host", "denied", "not_found", "empty", "unknown_revision"]
    """Answer that the policy reads instead of the command's output."""
    any: list[Clause] = Field(min_length=1)
    unless: list[Clause] = []
    """A call that fits one of these is let pass by this rule."""
    hit: list[str] = Field(min_length=1)
    """Commands that it must hit, run as tests."""
    miss: list[str] = Field(min_length=1)
    """Commands like these that no rule may hit, run as tests."""


class RuleFile(Strict):
    """A file of rules."""

    names: dict[str, list[str]] = {}
    """Lists of patterns; `@name` in a clause stands for one."""
    such_as: list[str] = []
    """Well-known paths of what the rules protect, from `/` or from the working directory. An unexpanded glob such as `.ev*/s*`
    is compared with these."""
    rules: list[Rule] = Field(min_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A rule that hit, and the call that it hit on."""

    rule: Rule
    call: ProgramCall


MAX_NARROWED = 4096
"""The most entries of `RuleSet._narrowed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledClause:
    """A clause in the form in which calls are compared with it."""

    needs: frozenset[str]
    """Keys under which a call must have texts, apart from `program`, which every call has."""
    programs: TextGlobs | None
    """Names of the programs that the clause is about; None: any program."""
    tests: Sequence[Test]
    """One test for each key but `program`."""

    def may_fit(self, keys: frozenset[str], program: str) -> bool:
        """Return True if a call of this program that has texts under these keys may fit."""
        return self.needs <= keys and (self.programs is None or self.programs.matches_text(program))

    def matches_call(self, texts: Texts, begins_at: str) -> bool:
        """Return True if the call with these texts fits; `may_fit` must hold for its keys and its program."""
        for test in self.tests:  # noqa: SIM110 a generator would take longer than the tests
            if not test(texts, begins_at):
                return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRule:
    """A rule in the form in which calls are compared with it."""

    order: tuple[bool, int]
    """False for a rule that blocks, and the number of the rule. If two rules hit, the lower order decides: one that blocks comes before
    one that asks the judge, else the one that is written first."""
    any: Sequence[CompiledClause]
    unless: Sequence[CompiledClause]

    def matches_call(self, texts: Texts, begins_at: str) -> bool:
        """Return True if the rule hits the call with these texts."""
        for clause in self.any:
            if clause.matches_call(texts, begins_at):
                return not any(clause.matches_call(texts, begins_at) for clause in self.unless)
        return False

    def narrow_to_program(self, keys: frozenset[str], program: str) -> CompiledRule:
        """Return the rule without clauses that no call of this program with these keys can fit."""
        return replace(
            self,
            any=[clause for clause in self.any if clause.may_fit(keys, program)],
            unless=[clause for clause in self.unless if clause.may_fit(keys, program)],
        )


def texts_by_key(call: ProgramCall) -> Texts:
    """Return key of clauses -> the texts that a call has under it."""
    return {key: texts for key, read in READERS.items() if (texts := read(call))}


class RuleSet:
    """The rules of one or more files, compiled."""

    def __init__(self, rule_files: Sequence[RuleFile], protected: Sequence[str] = ()) -> None:
        """`protected` are globs of further paths that the rules protect; they join the list `protected` of each file. Raises: ConfigError
        for a rule that cannot be used."""
        self.rules: list[Rule] = []
        self._compiled: list[CompiledRule] = []
        self._narrowed: dict[tuple[frozenset[str], str], list[CompiledRule]] = {}
        """Keys of a call and name of its program -> the rules that may hit such a call, with no other clauses than may fit. Most calls
        lack most keys and most clauses are about other programs, so this saves most comparisons. Programs that no clause names share the
        entry of the empty name."""
        programs: list[str] = []
        for rule_file in rule_files:
            names = dict(rule_file.names)
            names["protected"] = [*names.get("protected", []), *protected]
            for rule in rule_file.rules:
                order = (rule.verdict != "block", len(self.rules))
                compiler = _Compiler(names, [*rule_file.such_as, *protected], rule.id)
                clauses, exceptions = (list(map(compiler.compile_clause, part)) for part in (rule.any, rule.unless))
                self._compiled.append(CompiledRule(order=order, any=clauses, unless=exceptions))
                for clause in (*rule.any, *rule.unless):
                    programs += compiler.expand_patterns(clause.program)
                self.rules.append(rule)
        self._programs = TextGlobs(programs)

    def find_deciding_hit(self, calls: Sequence[ProgramCall], session: GuardSession) -> Hit | None:
        """Return the hit of the rule with the lowest `CompiledRule.order`, on the first call that it hits; None if no rule hits."""
        hits = [
            (compiled.order, call_index)
            for call_index, texts in enumerate(map(texts_by_key, calls))
            for compiled in self._rules_for(frozenset(texts), calls[call_index].program)
            if compiled.matches_call(texts, session.begins_at)
        ]
        if not hits:
            return None
        (_, number), call_index = min(hits)
        return Hit(rule=self.rules[number], call=calls[call_index])

    def _rules_for(self, keys: frozenset[str], program: str) -> list[CompiledRule]:
        """Return the rules that may hit a call of this program that has texts under these keys."""
        program = program.lower() if self._programs.matches_text(program) else ""
        rules = self._narrowed.get((keys, program))
        if rules is None:
            narrowed = [rule.narrow_to_program(keys, program) for rule in self._compiled]
            rules = [rule for rule in narrowed if rule.any]
            # A glob of programs fits any number of names that a policy may think of.
            if len(self._narrowed) < MAX_NARROWED:
                self._narrowed[keys, program] = rules
        return rules


class _Compiler:
    """Compiles the clauses of one rule."""

    def __init__(self, names: Mapping[str, list[str]], such_as: Sequence[str], rule_id: str) -> None:
        """`names` are the lists for which `@name` stands, `such_as` the well-known paths that an unexpanded glob is compared with."""
        self._names = names
        self._such_as = such_as
        self._rule = f"rule {rule_id}"

    def compile_clause(self, clause: Clause) -> CompiledClause:
        """Return the compiled clause. Raises: ConfigError for an `@name` that is not defined, a broken glob, or a clause without keys."""
        tests_by_key: dict[str, Test] = {}
        programs = self.expand_patterns(clause.program)
        for key in TEXTS:
            if key != "program" and (patterns := self.expand_patterns(getattr(clause, key))):
                tests_by_key[key] = _make_text_test(key, TextGlobs(patterns))
        for key in PATHS:
            if patterns := self.expand_patterns(getattr(clause, key)):
                self._refuse_broken(key, patterns)
                globs = PathGlobs(patterns, self._such_as)
                matches = globs.may_expand_into if key == "covers" else globs.matches_path
                tests_by_key[key] = _make_path_test(key, matches)
        tests = [*tests_by_key.values(), *self._make_absence_tests(clause)]
        if not tests and not programs:
            raise ConfigError.at(self._rule, found="a clause without keys", wanted="at least one", fix="add a key")
        program_globs = TextGlobs(programs) if programs else None
        return CompiledClause(needs=frozenset(tests_by_key), programs=program_globs, tests=tests)

    def _make_absence_tests(self, clause: Clause) -> list[Test]:
        """Return the tests that a call may also pass if it has no text under their key, so that the key is not among `needs`."""
        tests = [_make_none_test(key) for key in clause.none]
        for key, unwanted, empty in (("hosts", clause.hosts_not, False), ("sources", clause.sources_not, True)):
            if patterns := self.expand_patterns(unwanted):
                tests.append(_make_other_test(key, TextGlobs(patterns), empty))
        return tests

    def _refuse_broken(self, key: str, patterns: Sequence[str]) -> None:
        """Refuse a glob that no absolute path can fit. Raises: ConfigError."""
        for pattern in patterns:
            # A NUL is the pattern of an empty list; see `expand_patterns`.
            is_absolute = pattern.removeprefix(OUTSIDE).startswith(("/", "**", "{", "\0"))
            if not is_absolute or not is_valid_glob(pattern):
                raise ConfigError.at(
                    f"{self._rule}: {key}",
                    found=repr(pattern),
                    wanted="a glob over absolute paths: it begins with `/` or `**/`, and its braces come in pairs",
                    fix="correct the pattern",
                )

    def expand_patterns(self, patterns: Sequence[str], within: tuple[str, ...] = ()) -> list[str]:
        """Return the patterns, each `@name` replaced by the list of that name. `within` are the names that are being replaced. Raises:
        ConfigError for a name that is not defined or stands in its own list."""
        expansion: list[str] = []
        for pattern in patterns:
            if not pattern.startswith("@"):
                expansion.append(pattern)
            elif pattern[1:] in self._names and pattern not in within:
                # An empty list has to fit nothing. Without any pattern the clause would lose this key, and so fit more. No argument holds
                # a NUL, so a pattern that is one fits none.
                expansion += self.expand_patterns(self._names[pattern[1:]], (*within, pattern)) or ["\0"]
            else:
                wanted = f"one of: {', '.join(sorted(self._names))}"
                raise ConfigError.at(self._rule, found=pattern, wanted=wanted, fix="correct the name")
        return expansion


def _make_text_test(key: str, globs: TextGlobs) -> Test:
    """Return the test that some text under the key fits."""
    return lambda texts, begins_at: globs.matches_any_text(texts[key])


def _make_other_test(key: str, globs: TextGlobs, empty: bool) -> Test:
    """Return the test that some text under the key fits none of the globs. `empty` is its result for a call without texts there."""
    return lambda texts, begins_at: any(not globs.matches_text(text) for text in texts[key]) if key in texts else empty


def _make_none_test(key: str) -> Test:
    """Return the test that a call has no text under the key."""
    return lambda texts, begins_at: key not in texts


def _make_path_test(key: str, matches: Callable[[str, str], bool]) -> Test:
    """Return the test that some path under the key fits, by a method of `PathGlobs`."""
    return lambda texts, begins_at: any(matches(path, begins_at) for path in texts[key])


def shipped_rules() -> RuleFile:
    """Return our own rules, which come with the package."""
    text = files("opd.guard").joinpath("rules.yaml").read_text(encoding="utf-8")
    return validate_section(RuleFile, parse_yaml(text), "the shipped rules")


def read_rules(name: str) -> RuleFile:
    """Return the rules of the file at this path, or our own if the name is `shipped`. Raises: ConfigError if they cannot be used."""
    return shipped_rules() if name == SHIPPED else validate_section(RuleFile, load_yaml(Path(name)), name)
