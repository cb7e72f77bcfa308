"""Code that all commands share: exit codes, signals, printing, and common options.

Exit codes: 0 done, 1 a run that failed (or a check that found something), 2 a mistake in the input, 3 a disk that is
full, over quota, read-only or broken (what was finished before is intact), 4 a merge that a monitor paused, 130 Ctrl-C, 143
SIGTERM.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from opd.errors import OpdError, Paused, RunError, StorageError
from opd.machine.signals import postpone_interrupts
from opd.text import escape_control_characters
from pipelines.commands import completion
from pipelines.commands.usage import DEBUG, UsageError, explain_usage_error, move_debug_first, shows_help
from pipelines.doctor.engines import ENGINES
from pipelines.interrupts import Interrupted

PATH_ERRNOS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of a path that leads through a file, that is a directory where a file is wanted or the other way round, or that is too long.
Only a user names such paths, so they are mistakes in the input."""
_PIPELINE: Any = typer.Argument(
    help="A pipeline file, or the name of a shipped one.", autocompletion=completion.complete_pipelines
)
PipelineArgument = Annotated[str, _PIPELINE]
MaybePipelineArgument = Annotated[str | None, _PIPELINE]
ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|MODEL",
        help="A finished merge, or a Hugging Face directory.",
        autocompletion=completion.complete_runs,
    ),
]
RunArgument = Annotated[
    Path, typer.Argument(help="Run directory of a merge, finished or not.", autocompletion=completion.complete_runs)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a pipeline key, e.g. trainer.steps=10.",
        autocompletion=completion.complete_settings,
    ),
]


def check_output_file(file: Path | None) -> Path | None:
    """Return the value of an option that names a file to write, after a check that it can be written: its contents may take hours.

    Raises: BadParameter.
    """
    if file is None:
        return None
    if not file.parent.is_dir():
        raise typer.BadParameter(f"{file}, and there is no directory {file.parent}")
    if file.is_dir():
        raise typer.BadParameter(f"{file}, which is a directory")
    if not os.access(file.parent, os.W_OK):
        raise typer.BadParameter(f"{file}, and nothing may be written to {file.parent}")
    return file


def help_examples(*lines: str) -> str:
    """Return the epilog of a command's help page. A blank line between two examples keeps each on a line of its own."""
    return "\n\n".join(["Examples:", *lines])


class ErrorExplainingGroup(TyperGroup):
    """A group of commands, each of which runs within `explain_errors`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with explain_errors(DEBUG in args):
            return super().make_context(info_name, move_debug_first(args), parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with explain_errors(ctx.params["debug"]):
            try:
                return super().invoke(ctx)
            except typer.BadParameter as error:
                if error.ctx is None:  # a command of ours raised it; the context has the command's name for the message
                    name = ctx.invoked_subcommand
                    error.ctx = typer.Context(self.commands[name], parent=ctx, info_name=name)
                raise


@contextmanager
def explain_errors(debug: bool = False) -> Iterator[None]:
    """Turn errors that a user can act on into a message and an exit code; anything else keeps its traceback.

    With `debug` the traceback of every error comes before its message.
    """
    try:
        with postpone_interrupts(), _print_traceback(debug), _refuse_missing_engines():
            yield
    except UsageError as error:
        if shows_help(error):
            raise
        end_command(f"error: {explain_usage_error(error)}", 2)
    except OpdError as error:
        end_command(f"error: {error}", 2)
    except StorageError as error:
        end_command(f"failed: {error}", 3)
    except Paused as error:
        end_command(f"paused: {error}", 4)
    except RunError as error:
        end_command(f"failed: {error}", 1)
    except Interrupted as stopped:
        end_command(str(stopped), 128 + stopped.number)
    except KeyboardInterrupt as error:
        end_command(f"stopped by {str(error) or 'Ctrl-C'}", 128 + getattr(error, "number", signal.SIGINT))
    except OSError as error:
        from opd.files import STORAGE_ERRNOS

        if error.errno in PATH_ERRNOS and error.filename:
            end_command(f"error: {_make_path_error(error)}", 2)
        if error.errno == errno.EACCES and error.filename and _is_unreadable(Path(error.filename)):
            end_command(f"error: {_make_unreadable_error(error)}", 2)
        if error.errno not in STORAGE_ERRNOS:
            raise
        end_command(
            f"failed: {error.strerror}: {error.filename or 'while writing'}; what was finished before is intact", 3
        )


def _make_path_error(error: OSError) -> OpdError:
    return OpdError.at(
        error.filename,
        found=(error.strerror or str(error)).lower(),
        wanted="a path whose parents are directories, and that is itself what the command reads or writes",
        fix="correct the path in the command or in its file; `--debug` shows where it was used",
    )


def _is_unreadable(file: Path) -> bool:
    """Return True if this user may not read an existing file, or anything in its directory."""
    return not os.access(file.parent, os.X_OK) or (os.path.lexists(file) and not os.access(file, os.R_OK))


def _make_unreadable_error(error: OSError) -> OpdError:
    return OpdError.at(
        error.filename,
        found="a file that you may not read",
        wanted="a file that this user may read",
        fix="ask its owner, or change its rights (chmod)",
    )


@contextmanager
def _print_traceback(debug: bool) -> Iterator[None]:
    try:
        yield
    except (OpdError, RunError, OSError) as error:
        if debug:
            traceback.print_exception(error)
        raise


@contextmanager
def _refuse_missing_engines() -> Iterator[None]:
    """Within, the import of an engine that is not installed becomes an error that says how to install it. Raises: OpdError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ENGINES:
            raise
        raise OpdError.at(
            f"package {error.name}",
            found="not installed: this is `opd` without its engines",
            wanted=", ".join(ENGINES),
            fix="install opd-merge[cpu], or [gpu], as docs/install.md says; `opd doctor` names everything that is missing",
        ) from error


def end_command(message: str, code: int) -> NoReturn:
    """Print the reason on standard error, and leave with this exit code."""
    print_line(message)
    raise typer.Exit(code)


def print_line(line: str, err: bool = True) -> None:
    """Print a line, on standard error unless told otherwise.

    It may hold text of others, so characters that a terminal would obey are printed as escapes.
    """
    typer.echo(escape_control_characters(line), err=err)


def print_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table on standard output; the first column is text, the others are numbers."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(escape(escape_control_characters(cell)) for cell in row))
    # Piped output has no width, so it gets one at which no cell is cut.
    Console(width=None if is_terminal(sys.stdout) else 160).print(table)


def is_terminal(*streams: TextIO | None) -> bool:
    """Return True if each of these standard streams is a terminal; one that the shell closed is None."""
    return all(stream is not None and stream.isatty() for stream in streams)


def split_names(names: str | None) -> list[str] | None:
    """Split comma-separated names; None for nothing."""
    return names.split(",") if names else None


def run_root(run_dir: Path | None, name: str) -> Path:
    """Return the run directory: the one that the user names, else one under `runs/`."""
    return run_dir or Path("runs") / name


def avoid_spinning() -> None:
    """Make waiting threads sleep: threads that spin become 10 times slower as soon as another process wants a core.

    Call this before torch is imported, because OpenMP reads the variable only once.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
