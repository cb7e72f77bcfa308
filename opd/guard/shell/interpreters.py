"""Handlers (`walk.Handler`) of programs that run code: shells, other languages, and what takes a script as its argument.

A call gets the tag `unseen` if it runs code that we cannot see, because nobody knows the text before it runs.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from itertools import pairwise

from opd.guard.facts import Streams
from opd.guard.shell.branches import run_in_subprocess
from opd.guard.shell.fields import UNKNOWN, is_fully_known, show_field
from opd.guard.shell.nodes import CompoundCommand, UnreadableCommand
from opd.guard.shell.parser import parse
from opd.guard.shell.walk import Handler, ProgramRun, Walker

_CODE_LETTERS = {"python": "c", "perl": "eE", "ruby": "e", "node": "ep", "php": "r"}
"""Language -> letters of the options whose value is code. `-c` may also be the last of several letters, as in `-uc`."""
_LONG_CODE_OPTIONS = {"--eval", "--print", "--run"}
"""Long options whose value, the next argument, is code."""
_JOINED_CODE = {
    "python": re.compile(r"-[^\WcmWX]*c(.+)", re.DOTALL),
    "perl": re.compile(r"-[^\WeEIMmFDdCxi]*[eE](.+)", re.DOTALL),
    "ruby": re.compile(r"-[^\WeIrWxFEKCTi]*e(.+)", re.DOTALL),
    "node": re.compile(r"--(?:eval|print)=(.+)", re.DOTALL),
    "php": re.compile(r"-[^\WrdczfBRFE]*r(.+)|--run=(.+)", re.DOTALL),
}
"""Language -> an argument that holds an option and its code at once, such as `-cprint(1)`. Before the letter of the option only
letters may stand whose options have no value."""
_MODULE_OPTION = re.compile(r"-[^\WcmWX]*m")
"""`-m`, by which Python runs a module, perhaps behind letters of other options."""
_OPTIONS_WITH_VALUE = {"-W", "-X", "-r", "-I", "--require"}
"""Options whose value is the next argument and no code, in those languages for which the option is not one of code."""


def handle_shell(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `bash` and its like: the script behind `-c`, that of a file, or that on the standard input; before it a file of settings."""
    letters, operands = _parse_shell_options(run.argv[1:])
    for name, file in pairwise(run.argv):
        if name in ("--rcfile", "--init-file") and (text := walker.session.written_text_of(file)):
            walker.walk_text(text)
    if "c" in letters:
        return _walk_inline_script(walker, run, operands)
    if operands and "s" not in letters:
        return _walk_script_file(walker, run, operands)
    walker.note_call(run)
    streams = run.streams
    if streams.stdin is not None and is_fully_known(streams.stdin):
        return walker.walk_text(streams.stdin, Streams(), walker.make_decoding_tags(streams.sources))
    if streams.has_stdin:
        walker.tag_last_call("unseen")
    return None


def _parse_shell_options(argv: list[str]) -> tuple[str, list[str]]:
    """Return the letters of a shell's options, and the arguments behind the options. An argument that is not known is passed over if a
    `-c` comes after it, for it may be an option or nothing; else it may be the file to run, and counts as an argument."""
    letters, unknown, index = "", list[str](), 0
    while index < len(argv):
        arg = show_field(argv[index])
        index += 1
        if arg in ("-", "--"):
            break
        if not is_fully_known(argv[index - 1]) and "c" not in letters:
            unknown.append(argv[index - 1])
        elif arg.startswith("--"):
            index += arg in ("--rcfile", "--init-file")
        elif arg.startswith(("-", "+")):
            letters += arg[1:] if arg[0] == "-" else ""
            index += sum(letter in "oO" for letter in arg)  # each of these has a value, as in `-o pipefail`
        else:
            index -= 1
            break
    return letters, argv[index:] if "c" in letters else unknown + argv[index:]


def _walk_inline_script(walker: Walker, run: ProgramRun, operands: list[str]) -> str | None:
    """Walk `bash -c SCRIPT NAME ARGUMENT ...`, where `$0` is the name."""
    walker.note_call(run.with_argv(run.argv[:1]))
    if not operands or not is_fully_known(operands[0]):
        walker.tag_last_call("unseen")
        return None
    text = show_field(operands[0])
    if len(operands) > 1:
        text = text.replace("$0", show_field(operands[1])).replace("${0}", show_field(operands[1]))
    inside = partial(walker.walk_text, text, run.streams, walker.make_decoding_tags(run.streams.sources))
    return walker.run_with_arguments(operands[2:], inside)


def _walk_script_file(walker: Walker, run: ProgramRun, operands: list[str]) -> str | None:
    """Walk `bash FILE ARGUMENT ...`, if the episode wrote the file."""
    walker.note_call(run)
    path = walker.session.resolve_path(operands[0])
    text = walker.session.written_text(path)
    if text is not None:
        return walker.walk_file(text, run.with_argv(run.argv[run.argv.index(operands[0]) :]))
    if walker.session.wrote_some(path) or not is_fully_known(operands[0]):
        walker.tag_last_call("unseen")
    return None


def handle_eval(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `eval`: its arguments, joined by blanks, are a script."""
    walker.note_call(run.with_argv(run.argv[:1]))
    text = " ".join(run.argv[1:])
    if not is_fully_known(text):
        walker.tag_last_call("unseen")
        return None
    return walker.walk_text(show_field(text), run.streams, walker.make_decoding_tags(run.streams.sources))


def handle_source(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `source FILE`, if the episode wrote the file or it is a process substitution."""
    walker.note_call(run)
    if len(run.argv) < 2:
        return None
    path = walker.session.resolve_path(run.argv[1])
    if text := walker.session.written_text(path):
        return walker.walk_text(text, run.streams, walker.make_decoding_tags(walker.process_sources.get(path, ())))
    if walker.session.wrote_some(path) or not is_fully_known(path):
        walker.tag_last_call("unseen")
    return None


def make_language_handler(language: str) -> Handler:
    """Return the handler of a language other than the shell's. It walks code in the arguments, else a module, else a file, else the
    standard input; of a module or file only what the episode wrote."""

    def handler(walker: Walker, run: ProgramRun) -> str | None:
        texts, arguments, runs_module = _find_inline_code(language, run.argv[1:])
        operands = [arg for arg in arguments if not arg.startswith("-")]
        walker.note_call(run)
        if texts:
            for text in texts:
                if not is_fully_known(text):
                    walker.tag_last_call("unseen")
                # A name in place of what is not known, so that the code still parses.
                walker.walk_code(language, show_field(text.replace(UNKNOWN, "unknown_value")), run)
            return None
        if runs_module:
            name = next((value for option, value in pairwise(map(show_field, run.argv)) if option == "-m"), "")
            if module_file := walker.session.written_module(name):
                walker.walk_code(language, module_file[1], run)
            return None
        if operands and operands[0] != "-":
            path = walker.session.resolve_path(operands[0])
            if written := walker.session.written_text(path):
                walker.walk_code(language, written, run)
            elif path.startswith("/dev/fd/"):
                walker.tag_last_call("unseen")
        elif run.streams.has_stdin:
            if run.streams.stdin is None or not is_fully_known(run.streams.stdin):
                walker.tag_last_call("unseen")
            else:
                walker.walk_code(language, show_field(run.streams.stdin), run)
        return None

    return handler


def _find_inline_code(language: str, argv: list[str]) -> tuple[list[str], list[str], bool]:
    """Return the code that stands in the arguments, the other arguments, and True if they name a module to run (`python -m`). Code ends
    the options, and so does the first argument that is no option."""
    texts: list[str] = []
    arguments: list[str] = []
    index = 0
    while index < len(argv):
        arg = show_field(argv[index])
        index += 1
        if language == "python" and _MODULE_OPTION.match(arg):
            return [], argv, True
        if joined := _JOINED_CODE[language].fullmatch(arg):
            return [next(filter(None, joined.groups()))], [*arguments, *argv[index:]], False
        if arg in _LONG_CODE_OPTIONS or (re.fullmatch(r"-[A-Za-z0-9]+", arg) and arg[-1] in _CODE_LETTERS[language]):
            texts += argv[index : index + 1]
            index += 1
        elif arg in _OPTIONS_WITH_VALUE:
            index += 1
        else:
            arguments.append(argv[index - 1])
        if texts or not arg.startswith("-"):
            return texts, [*arguments, *argv[index:]], False
    return texts, arguments, False


def handle_awk(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `awk`, whose code we take to be the first argument with a brace in it."""
    walker.note_call(run)
    programs = [arg for arg in run.argv[1:] if "{" in show_field(arg)]
    for text in programs[:1]:
        walker.walk_code("awk", show_field(text), run)
    return None


def handle_trap(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `trap SCRIPT SIGNAL`, as if the signal came at once."""
    walker.note_call(run.with_argv(run.argv[:1]))
    if len(run.argv) > 2 and is_fully_known(run.argv[1]) and show_field(run.argv[1]) not in ("-", ""):
        run_in_subprocess(walker.session, partial(walker.walk_text, show_field(run.argv[1])))
    return ""


def handle_alias(walker: Walker, run: ProgramRun) -> str | None:
    """Walk `alias NAME=TEXT`: the session gets a function of that name that runs the text with its arguments behind it."""
    walker.note_call(run)
    for arg in run.argv[1:]:
        name, equals, text = arg.partition("=")
        if equals and is_fully_known(text):
            with suppress(UnreadableCommand):
                walker.session.functions[show_field(name)] = CompoundCommand((parse(f'{show_field(text)} "$@"'),))
    return ""


def handle_make(walker: Walker, run: ProgramRun) -> str | None:
    """Walk all recipes of the file that `make` reads, if the episode wrote it: which of them run, we do not work out."""
    walker.note_call(run)
    files = [after for name, after in pairwise(run.argv) if name in ("-f", "--file", "--makefile")]
    joined = [arg for arg in run.argv if arg.startswith(("--file=", "--makefile=", "-f"))]
    files += [arg.partition("=")[2] or arg[2:] for arg in joined]
    file = next(filter(None, files), "")
    if file == "-":
        text = run.streams.stdin
    else:  # without `-f`, make takes the first of these three that is there
        texts = map(walker.session.written_text_of, [file] if file else ("GNUmakefile", "makefile", "Makefile"))
        text = next((text for text in texts if text is not None), None)
    if text is None and (file == "-" or (file and walker.session.resolve_path(file).startswith("/dev/fd/"))):
        walker.tag_last_call("unseen")
    for line in (text or "").split("\n"):
        if line.startswith("\t"):
            # Each line of a recipe has a shell of its own.
            script = line.strip().lstrip("@-+").replace("$$", "$")
            with suppress(UnreadableCommand):  # variables and functions of make are no shell
                run_in_subprocess(walker.session, partial(walker.walk_text, script))
    return None
