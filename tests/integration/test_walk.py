"""The walk of docs/walk.md, as a stranger takes it: from an empty directory to an answer of the served model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.unit.sources import ROOT

DEADLINE_S = 1200
"""Twice what the walk may take on two cores that do nothing else."""


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
def test_the_walk_ends_with_a_merged_model_that_answers(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PORT": str(port)}
    walk = tmp_path / "walk"
    walk.mkdir()
    done = subprocess.run(
        ["bash", ROOT / "docs/walk.sh", walk], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    print(done.stdout, done.stderr, sep="\n")
    assert done.returncode == 0, done.stderr
    answer = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"id"'))
    assert answer["choices"][0]["message"]["content"] == "klaw"
    report = json.loads((walk / "runs/letters/report.json").read_text())
    assert report["mean_headroom"] > 0.8
    assert set(report["domains"]) == {"reverse", "sort", "rotate"}
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", port)) != 0, "the server still listens"
