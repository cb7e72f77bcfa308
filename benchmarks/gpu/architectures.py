"""The table of `python -m tests.models` on this machine."""

from __future__ import annotations

import sys

from benchmarks.gpu.check import Check, within


def measure(check: Check) -> None:
    """Run it and keep its last lines; it writes its own files beside ours."""
    command = [sys.executable, "-m", "tests.models", "--output", str(check.output / "models")]
    done = within(command, max(60.0, check.left_s))
    lines = (done.out + done.errors).strip().splitlines()
    status = "its time was over" if done.code is None else done.code
    check.add("python -m tests.models", exit_status=status, last_words=" / ".join(lines[-3:])[-600:])
