"""The generated part of docs/commands.md: every command of `opd`, from the command line's own definition.

Names, help texts and defaults are typer's; the types are those of the functions behind the commands, because how typer spells a
type changes from release to release.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from cli import app

PLACEHOLDERS = {Path: "PATH", int: "N", float: "NUMBER", str: "TEXT"}
SHELL_OPTIONS = ("install_completion", "show_completion")
"""Options of `opd` itself that typer adds; they have no function behind them."""

A_PIPELINE = "A pipeline file, or the name of a shipped one."
"""Meaning of an argument that the page explains once, at its top, as it does `--set`."""

Command = Any
"""A command or a group of typer, whose class lies elsewhere in each release."""


def commands() -> Iterator[tuple[str, Command]]:
    """Every command with its full name, groups before what is in them."""
    yield from _below("opd", typer.main.get_command(app))


def _below(name: str, command: Command) -> Iterator[tuple[str, Command]]:
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from _below(f"{name} {word}", inner)


def command_reference() -> str:
    """A section for each command."""
    return "\n".join(_section(name, command) for name, command in commands())


def _section(name: str, command: Command) -> str:
    types = _types(command)
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [
        param for param in command.params if param.param_type_name == "option" and not getattr(param, "hidden", 0)
    ]
    inner = getattr(command, "commands", {})
    usage = [name, *(_argument(param, types) for param in arguments), *(_required(param, types) for param in options)]
    usage += ["[OPTIONS]"] * any(not param.required for param in options) + ["COMMAND"] * bool(inner)
    lines = [
        f"{'###' if name.count(' ') == 2 else '##'} `{name}`",
        "",
        *_paragraphs(command.help),
        f"    {' '.join(word for word in usage if word)}",
        "",
    ]
    if inner:
        links = (f"[`{name} {word}`](#{anchor(f'{name} {word}')})" for word in inner)
        lines += [", ".join(links) + ".", ""]
    rows = [(f"`{_argument(p, types)}`", _meaning(p)) for p in arguments if _meaning(p) != A_PIPELINE]
    rows += [(f"`{_spelt(param, types)}`", _meaning(param)) for param in options if "--set" not in param.opts]
    lines += [_table(rows), ""] if rows else []
    return "\n".join(lines)


def anchor(heading: str) -> str:
    """The anchor of a heading, as code hosts and the site make it."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def _sentences(text: str | None) -> str:
    """A help text as one paragraph."""
    return " ".join(inspect.cleandoc(text or "").split())


def _paragraphs(text: str | None) -> list[str]:
    """Lines of a text of several paragraphs; those that are commands, also behind `Example:`, become code."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        remark, _, typed = _sentences(paragraph).rpartition("Example: ")
        code = typed.startswith("opd ")
        if code and lines and lines[-2].startswith("    "):
            lines.pop()
        lines += [remark.strip(), ""] if remark.strip() else []
        lines += [f"    {typed}" if code else typed, ""] if typed else []
    return lines


def _types(command: Command) -> Mapping[str, Any]:
    """Name of a parameter -> its type, without `None` and without what typer reads in it."""
    function: Callable[..., Any] | None = command.callback
    hints = {} if function is None else get_type_hints(inspect.unwrap(function), include_extras=True)
    return {name: _plain(hint) for name, hint in hints.items()}


def _plain(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    inner = [one for one in get_args(hint) if one is not type(None)]
    return _plain(inner[0]) if inner else hint


def _placeholder(param: Any, types: Mapping[str, Any]) -> str:
    """Return what stands for the value: the metavar if the command gives one."""
    return param.metavar or PLACEHOLDERS.get(types.get(param.name, str), "TEXT")


def _argument(param: Any, types: Mapping[str, Any]) -> str:
    name = (param.metavar or param.name.upper()).removesuffix("...")
    many = "..." if param.nargs == -1 else ""
    return f"{name}{many}" if param.required else f"[{name}{many}]"


def _spelt(param: Any, types: Mapping[str, Any]) -> str:
    """An option as it is written, with a placeholder for its value."""
    names = ", ".join((*param.opts, *param.secondary_opts))
    return names if param.is_flag or param.name in SHELL_OPTIONS else f"{names} {_placeholder(param, types)}"


def _required(param: Any, types: Mapping[str, Any]) -> str:
    return f"{param.opts[0]} {_placeholder(param, types)}" if param.required else ""


def _meaning(param: Any) -> str:
    """The help text, with the default where there is one to tell and the text does not."""
    text = _sentences(getattr(param, "help", None))
    default = param.default
    tells = isinstance(default, int | float | str) and default not in ("", False) and "Default" not in text
    parts = [text, f"Default: `{default}`." if tells and not param.required else "", _variable(param)]
    return " ".join(part for part in parts if part)


def _variable(param: Any) -> str:
    return f"Else the environment variable `{param.envvar}`." if param.envvar else ""


def _table(rows: list[tuple[str, str]]) -> str:
    lines = [("Argument", "Meaning"), ("---", "---"), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
