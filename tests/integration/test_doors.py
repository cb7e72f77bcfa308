"""Under umask 077 a merge opens nothing to the other users of its machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import write_pipeline

ROOT = Path(__file__).parents[2]
OWN_VIEW = ("unshare", "--mount", "--propagation", "private")


def own_view() -> list[str]:
    """The beginning of a command that has mounts of its own; skips where the machine allows none."""
    command = [*OWN_VIEW, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace on this machine: {error}")
    return command


def merge_and_walk(root: Path, pipeline: dict[str, Any]) -> dict[str, Any]:
    """Merge, with the home directory and all temporary ones empty; what was seen there and in the run directory meanwhile."""
    (root / "home").mkdir()
    file = write_pipeline(root, pipeline)
    command = [*own_view(), sys.executable, str(Path(__file__).with_name("doors.py")), str(root), "--"]
    command += [sys.executable, "-m", "cli", "merge", str(file), "--run-dir", str(root / "run")]
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("TMPDIR", "RAY_TMPDIR", "TORCHINDUCTOR_CACHE_DIR")
    }
    ran = subprocess.run(
        command,
        cwd=root,
        env=kept | {"HOME": str(root / "home"), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0
    seen: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert seen["code"] == 0
    return seen


def assert_closed(seen: dict[str, Any], root: Path) -> None:
    kinds = [kind.split()[0] for kind in seen["seen"].values()]
    assert kinds.count("SOCK") >= 2 and kinds.count("file") > 50, "the walk saw the merge at work"
    assert seen["open"] == {}
    for part in (str(root / "run"), str(root / "home"), "/tmp/opd-ray-", "/dev/shm/opd-run-"):
        assert any(path.startswith(part) for path in seen["seen"]), part
    assert seen["other"] == [], "ports beyond loopback, and sockets without a file"
    # torch's compiled code is for the next run; joblib leaves semaphores of 32 bytes when a process of an engine is killed
    assert [path for path in seen["left"] if not path.startswith(("/tmp/torchinductor_", "/dev/shm/sem.loky-"))] == []


def test_other_users_can_open_nothing_that_a_merge_makes(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    pipeline["trainer"]["steps"] = 3
    assert_closed(merge_and_walk(tmp_path, pipeline), tmp_path)


@pytest.mark.slow
def test_other_users_can_open_nothing_of_several_ranks_and_of_an_engine_of_several_processes(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    pipeline["trainer"]["steps"] = 3
    pipeline["rollout"]["tensor_parallel_size"] = 2
    assert_closed(merge_and_walk(tmp_path, pipeline), tmp_path)
