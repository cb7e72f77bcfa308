"""Teachers served by a process of their own, over TLS and with a token: the merge is the same to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ENV = {k: v for k, v in os.environ.items() if k != "OPD_TEACHERS_TOKEN"} | {"PYTHONPATH": str(ROOT)}


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


def merge(file: Path, run: Path, token: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", "merge", str(file), "--run-dir", str(run)],
        cwd=file.parent,
        env=ENV | ({} if token is None else {"OPD_TEACHERS_TOKEN": token}),
        capture_output=True,
        text=True,
        timeout=500,
    )


def without_times(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in ("phase_s", "busy_s")} for record in records]


def first_line(stream: IO[str], timeout_s: float) -> str:
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(stream.readline()), daemon=True)
    reader.start()
    reader.join(timeout_s)
    assert lines and lines[0], "nothing was said in time"
    return lines[0]


@pytest.fixture
def teachers(tmp_path: Path, pipeline: dict[str, Any], certificate: tuple[Path, Path]) -> Iterator[tuple[str, Any]]:
    """`opd teachers serve` on a free port; its address and process."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    command = ["teachers", "serve", write(tmp_path / "served.yaml", pipeline), "--listen", "127.0.0.1:0"]
    command += ["--tls-cert", certificate[0], "--tls-key", certificate[1], "--token-file", token]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *map(str, command)],
        cwd=tmp_path,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield first_line(process.stdout, 300).split()[-1], process
    finally:
        process.kill()
        process.wait()


def test_a_merge_with_served_teachers_is_the_same_merge(
    tmp_path: Path, pipeline: dict[str, Any], teachers: tuple[str, Any], certificate: tuple[Path, Path]
) -> None:
    address, process = teachers
    # With two ranks a step is one round of micro-batches: how many begin before the last row is scored is no matter of time.
    pipeline["trainer"] |= {"steps": 2, "ranks": 2}
    pipeline["checkpoint"]["every"] = 5
    local = merge(write(tmp_path / "local.yaml", pipeline), tmp_path / "local")
    assert local.returncode == 0, local.stderr

    pipeline["teachers"] = {"engine": "flight", "address": address, "tls_root_certs": str(certificate[0])}
    file = write(tmp_path / "remote.yaml", pipeline)
    remote = merge(file, tmp_path / "remote", token="s3cret")
    assert remote.returncode == 0, remote.stderr
    assert len(without_times(tmp_path / "remote")) == 2
    assert without_times(tmp_path / "remote") == without_times(tmp_path / "local")
    ours, theirs = ((tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("local", "remote"))
    assert ours == theirs

    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
