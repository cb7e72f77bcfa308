"""Run an agent's program: a command of the user's, in a directory and a process group of its own, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.machine import orphans
from opd.records.json_fields import parse_json_or_none

INHERITED = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", orphans.VARIABLE)
"""Environment variables that a program gets from ours, besides PATH and those that the pipeline names; none of them holds a secret."""
TASK, RESULT = "OPD_TASK", "OPD_RESULT"
"""Environment variables with the path of the task's file, and with that of the file in which the program may leave its result."""
KEPT_BYTES = 64 << 10
"""Bytes that are kept of the end of each of a program's outputs."""
MAX_RESULT_BYTES = 1 << 20
"""Largest file of a result that is read."""
GRACE_S = 2.0
"""Seconds between the request to end and the kill, and for the last output to arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """The exit status of a program, and what it wrote."""

    code: int | None
    """Exit status, negative for a signal; None if it had to be ended."""
    err: str
    """The end of its standard error."""
    result: Any = None
    """Parsed JSON of the result's file, or else of the last line that it printed; None if that is no JSON."""


async def run_program(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], ended: asyncio.Event, timeout_s: float
) -> ProgramResult:
    """Run a command in the folder that has its task, until it exits, `ended` is set, or `timeout_s` is over.

    Every process in its process group has ended afterwards. Raises: OSError if the command cannot be started.
    """
    async with (
        _open_pipe() as (out, out_stream),
        _open_pipe() as (err, err_stream),
        _start_process(command, folder, environ, out, err) as process,
    ):
        tails = [_Tail(stream) for stream in (out_stream, err_stream)]
        readers = [asyncio.ensure_future(tail.read()) for tail in tails]
        waits = [asyncio.ensure_future(wait) for wait in (process.wait(), ended.wait())]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            # The status is read before the group is ended: a program that has to be ended has none yet.
            code = process.returncode
            await _end_process_group(process)
            await asyncio.wait(readers, timeout=GRACE_S)  # a process outside of the group may hold the pipes open
        finally:
            for task in (*waits, *readers):
                task.cancel()
    return ProgramResult(code=code, err=tails[1].text, result=_read_result(folder / "result.json", tails[0].text))


def program_environment(folder: Path, variables: Mapping[str, str], inherit: Sequence[str]) -> dict[str, str]:
    """Return all environment variables of a program: a few of ours, those that the pipeline names, and the paths of its files."""
    inherited = {name: os.environ[name] for name in (*INHERITED, *inherit) if name in os.environ}
    base = {"HOME": str(folder), "TMPDIR": str(folder), "PATH": search_path()}
    return (
        base
        # A proxy that the pipeline passes on must not get the requests to our endpoint.
        | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        | inherited
        | dict(variables)
        # These come after the pipeline's, which so cannot hide to whom the program belongs and where its files lie.
        | {orphans.OWNER: orphans.driver_mark()}
        | {TASK: str(folder / "task.json"), RESULT: str(folder / "result.json")}
    )


def search_path() -> str:
    """Return our PATH with the directory of the running Python first, as if its virtual environment were activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


@asynccontextmanager
async def _open_pipe() -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """Open a pipe, and yield the file descriptor for the program to write to, and a reader of the other end.

    With asyncio's own pipes, a wait for the program would also wait for every other process that holds the pipe open.
    """
    reading, writing = os.pipe()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(reading, "rb", 0))
    try:
        yield writing, reader
    finally:
        transport.close()


@asynccontextmanager
async def _start_process(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], out: int, err: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a process whose standard input is the task's file. Its group is killed at the end of the context, also if that is cancelled. The
    descriptors `out` and `err` are closed here."""
    try:
        with (folder / "task.json").open("rb") as task:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=folder, env=dict(environ), stdin=task, stdout=out, stderr=err, start_new_session=True
            )
    finally:
        # The program has its own copies of them. As long as ours are open, too, the readers would see no end.
        os.close(out)
        os.close(err)
    try:
        yield process
    finally:
        _signal_group(process, signal.SIGKILL)
        await process.wait()


async def _end_process_group(process: asyncio.subprocess.Process) -> None:
    """Ask the process group to end, and kill what is left of it after `GRACE_S`."""
    if process.returncode is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_S)
    _signal_group(process, signal.SIGKILL)


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class _Tail:
    """The last bytes that a stream has brought so far."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream, self._data = stream, b""

    async def read(self) -> None:
        """Read the stream to its end."""
        while data := await self._stream.read(KEPT_BYTES):
            self._data = (self._data + data)[-KEPT_BYTES:]

    @property
    def text(self) -> str:
        return self._data.decode("utf-8", "replace")


def _read_result(file: Path, out: str) -> Any:
    """Return the parsed JSON of the result's file; if there is none, of the last line in `out` that is not blank."""
    if file.is_file() and file.stat().st_size <= MAX_RESULT_BYTES:
        return parse_json_or_none(file.read_text("utf-8", "replace"))
    return parse_json_or_none(next((line for line in reversed(out.splitlines()) if line.strip()), ""))
