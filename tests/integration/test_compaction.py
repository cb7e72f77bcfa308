"""A summary carries what the window has lost: the vault of `benchmarks.compaction`, through the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_merge import ROOT


@pytest.mark.slow
def test_a_key_outside_of_the_window_reaches_the_door_in_a_summary_alone(tmp_path: Path) -> None:
    file = tmp_path / "compaction.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compaction", "--json", str(file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    with_it, one_token, without = json.loads(file.read_text())["arms"]
    assert with_it["success"] >= 0.9 and with_it["summaries"] >= 2 and with_it["stop_reasons"] == {"done": 200}
    assert one_token["success"] <= 0.2 and one_token["stop_reasons"] == {"done": 200}, "it cannot hold the key"
    assert without["success"] <= 0.2 and without["stop_reasons"] == {"context": 200}
