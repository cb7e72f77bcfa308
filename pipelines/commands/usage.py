"""Explain mistakes in a command line as every other error: where it is, what was found, what is wanted, and how to fix it."""

from __future__ import annotations

import re
from typing import Any

import typer

from opd.errors import OpdError
from opd.settings.suggestions import did_you_mean
from opd.settings.wording import describe_wanted

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Base class of typer's errors about a command line. It is found this way because newer releases have a copy of click inside, while
older ones import click."""
DEBUG = "--debug"


def shows_help(error: Exception) -> bool:
    """Return True for the error by which typer shows the help page of a command that has no arguments at all."""
    return type(error).__name__ == "NoArgsIsHelpError"


def move_debug_first(args: list[str]) -> list[str]:
    """Return the arguments with `--debug` in front, where it belongs to `opd` itself: people write it at the end."""
    end = args.index("--") if "--" in args else len(args)
    if DEBUG not in args[:end]:
        return args
    return [DEBUG, *(word for word in args[:end] if word != DEBUG), *args[end:]]


def explain_usage_error(error: Any) -> OpdError:
    """Return typer's error in the form of all others: where, what was found, what is wanted, the way out."""
    context, option = error.ctx, getattr(error, "option_name", None)
    # Our name, whatever the program was started as: nobody could type that of `python -m cli`.
    command = " ".join(["opd", *context.command_path.split()[1:]]) if context else "opd"
    help_page = f"`{command} --help` has examples"
    usage = (
        " ".join([command, *context.command.collect_usage_pieces(context)]) if context else "a command of `opd --help`"
    )
    unknown = re.match(r"No such command '(.*?)'\.", error.message)
    if unknown and context:
        return _make_unknown_name_error(command, "command", unknown[1], list(context.command.commands))
    if option and context:
        names = [
            name
            for parameter in context.command.get_params(context)
            for name in parameter.opts
            if name.startswith("--")
        ]
        if option not in names:
            return _make_unknown_name_error(command, "option", option, names)
    if getattr(error, "param", None) is not None:
        return _make_value_error(error, command, usage, help_page)
    if isinstance(error, typer.BadParameter):  # a command of ours raised it, and its text says what goes together
        return OpdError.at(command, found="arguments that do not go together", wanted=error.message, fix=help_page)
    return OpdError.at(command, found=error.message.rstrip("."), wanted=usage, fix=help_page)


def _make_unknown_name_error(command: str, kind: str, name: str, choices: list[str]) -> OpdError:
    fix = did_you_mean(name, choices, f"`{command} --help` shows them all")
    return OpdError.at(f"{command} {name}", found=f"no such {kind}", wanted=f"one of: {', '.join(choices)}", fix=fix)


def _make_value_error(error: Any, command: str, usage: str, help_page: str) -> OpdError:
    """Return the error about the value of an option or argument, or about a required one that is left out."""
    name = next((name for name in error.param.opts if name.startswith("--")), error.param.name.upper())
    requirement = getattr(error.param, "help", None) or usage
    value = "nothing" if type(error).__name__ == "MissingParameter" else error.message.rstrip(".")
    if hasattr(error.__cause__, "errors"):  # newer releases of typer let pydantic read values, and repeat its words
        detail = error.__cause__.errors()[0]
        value, requirement = repr(detail["input"]), f"{describe_wanted(detail)}. {requirement}"
    return OpdError.at(f"{command} {name}", found=value, wanted=requirement, fix=help_page)
