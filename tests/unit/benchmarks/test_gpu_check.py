"""The GPU check without a GPU: what it leaves out, what it writes down, and the page made of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu_check
from benchmarks.gpu.check import PARTS, RECORD, Check, Part, finish, within
from benchmarks.gpu.render import page

ROOT = Path(__file__).parents[3]


def check(folder: Path, left_s: float = 60.0) -> Check:
    return Check("loss", "cpu", True, time.time() + left_s, folder)


def test_it_starts_as_a_module_with_nothing_installed_but_python() -> None:
    """-I -S: no site-packages; the folder of the repository is all there is."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.gpu_check import parse_args; parse_args(['--help'])"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--output" in done.stdout, done.stderr


def test_without_torch_or_a_gpu_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(tmp_path / "out")])
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_check.main() == 2
    assert "torch is not installed" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(tmp_path / "out")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main() == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_part_whose_modules_are_missing_is_left_out_by_their_names(tmp_path: Path) -> None:
    part = Part("loss", "Loss", ("json", "no_such_module", "no.such.module"), 1)
    args = gpu_check.parse_args(["--device", "cpu", "--quick", "--output", str(tmp_path)])
    gpu_check.run_parts([part], args)
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["parts"]["loss"]["left_out"] == [
        {"what": "Loss", "why": "not installed: no_such_module, no.such.module"}
    ]


def test_a_part_that_fails_leaves_its_last_words_and_what_it_had(tmp_path: Path) -> None:
    check(tmp_path).add("times", ms=1.5)
    args = gpu_check.parse_args(["--device", "cpu", "--quick", "--output", str(tmp_path)])
    gpu_check.run_part(Part("loss", "Loss", (), 1), _without_its_module(args), time.time() + 60)
    part = json.loads((tmp_path / RECORD).read_text())["parts"]["loss"]
    assert part["tables"] == {"times": [{"ms": 1.5}]}
    assert part["error"] and part["seconds"] > 0


def _without_its_module(args: object) -> object:
    """Arguments that the part's process refuses."""
    args.device = "no such device"  # type: ignore[attr-defined]
    return args


def test_parts_that_are_left_out_leave_their_time_to_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[tuple[str, int]] = []
    monkeypatch.setattr(
        gpu_check, "run_part", lambda part, args, ends: given.append((part.name, round((ends - time.time()) / 60)))
    )
    args = gpu_check.parse_args(["--minutes", "60", "--output", str(tmp_path)])
    gpu_check.run_parts(
        [Part("a", "A", (), 1), Part("b", "B", ("no_such_module",), 9), Part("c", "C", (), 3), Part("d", "D", (), 2)],
        args,
    )
    assert given == [("a", 10), ("c", 36), ("d", 60)]


def test_what_does_not_fit_into_the_time_is_named(tmp_path: Path) -> None:
    assert check(tmp_path, 60).in_time("a case", 30)
    late = check(tmp_path, 10)
    for _ in range(2):
        assert not late.in_time("a case", 30)
    ((left_out),) = json.loads((tmp_path / RECORD).read_text())["parts"]["loss"]["left_out"][:1]
    assert left_out["what"] == "a case" and "s were left" in left_out["why"]


def test_the_page_shows_every_figure_and_what_is_missing(tmp_path: Path) -> None:
    one = check(tmp_path)
    row = {"V": 8, "D": 4, "T": 2, "dtype": "float32", "chunk": 2, "value": 0.1}
    one.add("time and memory", variant="ours", ms=1.25, extra_bytes=1 << 30, gradient_error=0.0021, **row)
    one.add("time and memory", variant="trl", note="out of memory", **row)
    one.add("resume", bit_equal=True, tokens_per_s=123456.7, peak_bytes=3 << 29, gap=0.000012345)
    one.leave_out("liger", "not installed")
    finish(tmp_path, "trainer", seconds=1.0, error="RuntimeError: broken")
    record = json.loads((tmp_path / RECORD).read_text()) | {"environment": {"device": "a GPU"}}
    text = page([record])
    assert "| float32 | 8 | 4 | 2 | 1.2 ms, 1.00 GiB, 2.1e-03 | out of memory |" in text
    assert "| bit equal | tokens/s | peak, GiB | gap |" in text and "| yes | 123,457 | 1.50 | 1.23e-05 |" in text
    assert "- liger: not installed" in text and "Ended with: RuntimeError: broken" in text
    assert text.index("## Loss") < text.index("## Trainer"), "in the order of the parts"


def test_of_two_runs_the_later_ones_part_counts() -> None:
    def record(device: str, **parts: str) -> dict[str, object]:
        return {
            "environment": {"device": device},
            "parts": {n: {"tables": {"t": [{"x": v}]}, "left_out": []} for n, v in parts.items()},
        }

    text = page([record("first", loss="old", scorer="kept"), record("second", loss="new")])
    assert "second" in text and "kept" in text and "new" in text and "old" not in text


def test_every_part_has_a_module() -> None:
    folder = ROOT / "benchmarks" / "gpu"
    assert all((folder / f"{part.name}.py").is_file() for part in PARTS)


@pytest.mark.parametrize("own_session", [False, True])
def test_a_command_whose_time_is_over_takes_its_children_with_it(own_session: bool) -> None:
    child = "import time; time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session={own_session})"
    script = f"import subprocess, sys; p = {start}; print(p.pid, flush=True); p.wait()"
    began = time.monotonic()
    done = within([sys.executable, "-c", script], seconds=2.0)
    assert done.code is None and time.monotonic() - began < 30, "nobody waits for a child that is left"
    pid = int(done.out)
    deadline = time.monotonic() + 5  # the system ends a process a moment after it was killed
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert within([sys.executable, "-c", "raise SystemExit('no')"], seconds=60.0).errors == "no\n"
