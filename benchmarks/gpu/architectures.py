"""The table of `python -m tests.models` on this machine."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.check import Check


def measure(check: Check) -> None:
    """Run it and keep its last lines; it writes its own files beside ours."""
    command = [sys.executable, "-m", "tests.models", "--output", str(check.output / "models")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(60.0, check.left_s), check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    check.add("python -m tests.models", exit_status=done.returncode, last_words=" / ".join(lines[-3:])[-600:])
