"""A sandbox as seen from outside: starts it, runs commands in it, ends it. `inside.py` is its other side."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import select
import subprocess
import sys
import time
import unicodedata
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from opd.errors import ConfigError, RunError
from opd.settings.strict import Strict

INSIDE = Path(__file__).resolve().with_name("inside.py")
START_S = 30.0
"""Seconds that a sandbox may take to start."""
GRACE_S = 10.0
"""Seconds that an answer may take beyond the command's own deadline."""
MOST_ARGUMENT = 100_000
"""The most bytes of one argument of a command; Linux takes a little more."""
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)?", re.DOTALL)
"""Escape sequences that terminals obey: colours, cursor, titles."""


class SandboxLimits(Strict):
    """Options of a sandbox."""

    seconds: float = Field(10.0, gt=0, le=3600)
    """Wall-clock deadline of a command."""
    memory_mb: int = Field(256, ge=64, le=1 << 16)
    """Memory of one process, and of all of them together with the files that they wrote."""
    disk_mb: int = Field(8, ge=1, le=1 << 12)
    """Room in the directory of the task, and once more in `/tmp`; both are in memory."""
    processes: int = Field(32, ge=4, le=1024)
    """Processes at once."""
    output: int = Field(4000, ge=100, le=100_000)
    """Bytes of a command's output that are shown: half from its beginning, half from its end."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command."""

    code: int | None
    """Its exit code, negative for a signal; None if it was ended, or not started."""
    output: str
    """Its output, without control characters."""
    end_reason: str
    """The limit that ended it: deadline, memory, output; or `not started`; else empty."""
    seconds: float = field(default=0.0, compare=False)
    """The deadline that it had."""


PROGRAMS = (["/bin/sh", "-c", "true"], ["python3", "-c", "import json"])
"""Commands that every sandbox has to be able to run: without them each attempt at a task would fail, and nobody would know why."""
_proven: set[str] = set()
"""Interpreters with which this process has seen `PROGRAMS` run in a sandbox."""


class Box:
    """A sandbox of its own for one episode. Its files are in memory and go when it ends."""

    def __init__(self, limits: SandboxLimits, log: Path | None = None) -> None:
        """Start the sandbox. The file `log` gets a line of JSON for each command before it runs.

        Raises: ConfigError if this machine does not allow sandboxes, RunError if the sandbox does not start.
        """
        self._limits = limits
        self._log = log
        limits_json = {"memory_mb": limits.memory_mb, "disk_mb": limits.disk_mb, "processes": limits.processes}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(INSIDE), json.dumps(limits_json)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={},
            start_new_session=True,
        )
        self._read = b""
        try:
            answer = self._read_answer(START_S)
        except RunError:
            self.close()
            raise
        if "refused" in answer:
            self.close()
            raise ConfigError.at(
                "environment sandbox",
                found=f"this machine makes none: {answer['refused']}",
                wanted="a Linux where this user may make user, mount, process and network namespaces",
                fix="allow them (kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns, a "
                "container's seccomp profile), or run this domain on a machine that has them",
            )
        if sys.executable not in _proven:
            self._prove_programs()
            _proven.add(sys.executable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self, argv: list[str], stdin: str = "", output: int | None = None, seconds: float = math.inf
    ) -> CommandResult:
        """Run one command to its end. `output` is the most bytes of its output that are kept, by default `SandboxLimits.output`. Its
        deadline is the smaller of `seconds` and `SandboxLimits.seconds`.

        Raises: RunError if the sandbox has ended or does not answer; OSError if the log cannot be written.
        """
        problem = next(filter(None, (_explain_bad_argument(part) for part in argv)), "") or _explain_no_text(stdin)
        if problem:
            return CommandResult(None, problem, "not started")
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps({"sandbox": self._process.pid, "argv": argv}) + "\n")
        return self._send_request(argv, stdin, output or self._limits.output, min(seconds, self._limits.seconds))

    def close(self) -> None:
        """End the sandbox, with everything that runs in it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()  # its child is the first process inside and dies with it, and so does everything there
        self._process.wait()
        with suppress(BrokenPipeError):  # a request that was never read
            self._process.stdin.close()
        self._process.stdout.close()

    def _prove_programs(self) -> None:
        """Run `PROGRAMS`. Raises: ConfigError if one of them fails, RunError."""
        for argv in PROGRAMS:
            ran = self._send_request(argv, "", self._limits.output, START_S)
            if ran.code != 0:
                self.close()
                raise ConfigError.at(
                    "environment sandbox",
                    found=f"{argv[0]} of this machine does not run in it: {ran.output.strip()[-500:] or ran.end_reason or ran.code}",
                    wanted=f"a shell and a Python that need no files but those in /usr and in {sys.base_prefix}",
                    fix="run `opd` with a Python that brings its libraries along (of the distribution, pyenv, uv or conda)",
                )

    def _send_request(self, argv: list[str], stdin: str, output: int, seconds: float) -> CommandResult:
        """Have the sandbox run a command, and return the result. Raises: RunError if it has ended or does not answer."""
        request = {"argv": argv, "stdin": stdin, "seconds": seconds, "output": output}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RunError("sandbox: it has ended") from None
        answer = self._read_answer(seconds + GRACE_S)
        return CommandResult(answer["code"], self._decode_output(answer), answer["why"], seconds)

    def _read_answer(self, seconds: float) -> dict[str, Any]:
        """Return the next answer of the sandbox, one line of JSON. Raises: RunError if none comes within these seconds, or no JSON."""
        end = time.monotonic() + seconds
        while b"\n" not in self._read:
            if not self._read_more(end):
                raise RunError(f"sandbox: it ended, or gave no answer within {seconds:g} s")
        line, _, remainder = self._read.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:  # a traceback of `inside.py`, so a mistake of ours; its last line says most
            while self._read_more(time.monotonic() + START_S):
                pass
            raise RunError(f"sandbox: no answer but {strip_control_characters(self._read[-2000:])}") from None
        self._read = remainder
        return answer

    def _read_more(self, end: float) -> bool:
        """Add to `_read` what the sandbox has written, and wait for it if there is nothing yet. Return False if the sandbox has ended, or
        if nothing comes until `end`, by `time.monotonic`."""
        assert self._process.stdout is not None
        source, waiting = self._process.stdout.fileno(), select.poll()  # select knows no file numbers above 1023
        waiting.register(source, select.POLLIN)
        ready = waiting.poll(1000 * max(0.0, end - time.monotonic()))
        piece = os.read(source, 1 << 16) if ready else b""
        self._read += piece
        return bool(piece)

    def _decode_output(self, answer: dict[str, Any]) -> str:
        head, tail = (strip_control_characters(base64.b64decode(answer[key])) for key in ("head", "tail"))
        gap = f"\n[... {answer['missing']:,} bytes are left out ...]\n" if answer["missing"] else ""
        return head + gap + tail


def strip_control_characters(output: bytes) -> str:
    """Return bytes as text without escape sequences, control characters, and characters that change the direction of writing; line
    ends and tabs stay."""
    text = ESCAPES.sub("", output.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp"))


def _explain_bad_argument(part: str) -> str:
    """Return the reason why a command cannot have this argument; empty if it can."""
    if "\0" in part:
        return "a NUL character"
    return _explain_no_text(part) or (
        f"longer than {MOST_ARGUMENT:,} bytes" if len(part.encode()) > MOST_ARGUMENT else ""
    )


def _explain_no_text(part: str) -> str:
    """Return the reason why a text cannot be encoded as UTF-8; empty if it can."""
    lone = any("\ud800" <= c <= "\udfff" for c in part)
    return "a lone surrogate, which is no text" if lone else ""
