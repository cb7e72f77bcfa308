"""Mistakes in the words of a command itself, told like every other error: where, what was found, what is wanted, the way out."""

from __future__ import annotations

import re
from typing import Any

import typer

from opd.errors import OpdError
from opd.near import did_you_mean

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of what typer raises for a command's words. Newer releases bring a copy of click, older ones import it."""
DEBUG = "--debug"


def shows_help(error: Exception) -> bool:
    """True for the error by which typer shows a help page, where a command was given nothing at all."""
    return type(error).__name__ == "NoArgsIsHelpError"


def debug_first(args: list[str]) -> list[str]:
    """The arguments with `--debug` in front, where it belongs to `opd` itself: people write it at the end."""
    end = args.index("--") if "--" in args else len(args)
    if DEBUG not in args[:end]:
        return args
    return [DEBUG, *(word for word in args[:end] if word != DEBUG), *args[end:]]


def explained(error: Any) -> OpdError:
    """The error in our form."""
    context = error.ctx
    command = context.command_path if context else "opd"
    help_page = f"`{command} --help` has examples"
    usage = (
        " ".join([command, *context.command.collect_usage_pieces(context)]) if context else "a command of `opd --help`"
    )
    unknown = re.match(r"No such command '(.*?)'\.", error.message)
    option = getattr(error, "option_name", None)
    if unknown and context:
        names = list(context.command.commands)
        wanted = f"one of: {', '.join(names)}"
        fix = did_you_mean(unknown[1], names, f"`{command} --help` shows them all")
        return OpdError.at(f"{command} {unknown[1]}", found="no such command", wanted=wanted, fix=fix)
    if option and context:
        names = [name for one in context.command.get_params(context) for name in one.opts if name.startswith("--")]
        if option not in names:
            fix = did_you_mean(option, names, f"`{command} --help` explains them")
            wanted = f"one of: {', '.join(names)}"
            return OpdError.at(f"{command} {option}", found="no such option", wanted=wanted, fix=fix)
    parameter = getattr(error, "param", None)
    if parameter is not None:
        missing = type(error).__name__ == "MissingParameter"
        name = next((name for name in parameter.opts if name.startswith("--")), parameter.name.upper())
        found = "nothing" if missing else error.message.rstrip(".")
        return OpdError.at(
            f"{command} {name}", found=found, wanted=getattr(parameter, "help", None) or usage, fix=help_page
        )
    if isinstance(error, typer.BadParameter):  # raised by a command of ours: it says what goes together
        return OpdError.at(command, found="arguments that do not go together", wanted=error.message, fix=help_page)
    return OpdError.at(command, found=error.message.rstrip("."), wanted=usage, fix=help_page)
