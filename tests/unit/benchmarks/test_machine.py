"""The type that the benchmarks compute in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import merge, shared_prefix, tool_wait

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("benchmark", [tool_wait, shared_prefix])
def test_auto_is_the_type_that_the_cores_have(benchmark: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for has, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("opd.machine.processor.has_bf16", lambda has=has: has)
        assert benchmark.parse_args([]).dtype == dtype  # type: ignore[attr-defined]
        assert benchmark.parse_args(["--dtype", "auto"]).dtype == dtype  # type: ignore[attr-defined]
        assert merge.parse_args([]).dtypes == (["float32", "bfloat16"] if has else ["float32"])
        assert benchmark.parse_args(["--dtype", "bfloat16"]).dtype == "bfloat16", "who asks for it gets it"  # type: ignore[attr-defined]


def test_another_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        tool_wait.parse_args(["--dtype", "float16"])
    assert end.value.code == 2 and "'float32', 'bfloat16'" in capsys.readouterr().err


def test_the_benchmark_of_the_loss_has_the_same_option() -> None:
    command = [sys.executable, "benchmarks/loss.py", "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--dtype {auto,float32,bfloat16}" in done.stdout, done.stderr
