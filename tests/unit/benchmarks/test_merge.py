"""The merge benchmark without an engine: its cases, what it refuses, what it makes of its turns, and how it watches a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import merge
from benchmarks.merging import child
from benchmarks.merging.case import (
    BODY,
    ENGINE,
    LIMITS,
    OURS,
    PARTS,
    TRL,
    Case,
    Step,
    Turn,
    floor,
    limits,
    ratio,
    sharding,
    unequal,
)
from benchmarks.merging.memory import anonymous, cpu_s, family, machine_cpu_s, shared, title
from benchmarks.merging.other import adapters
from benchmarks.merging.ours import pipeline
from benchmarks.merging.table import Measured, phases, summary
from pipelines.api import load_pipeline

ROOT = Path(__file__).parents[3]
CASE = Case(
    responses=16,
    new_tokens=64,
    prompt_tokens=43,
    dtype="float32",
    experts=1,
    warm_up=1,
    steps=1,
    micro_batch_tokens=1000,
    folder="folder",
)


def step(seconds: float = 10.0, response_tokens: int = CASE.response_tokens) -> Step:
    phases = {"rollout": 4.0, "score": 2.0, "train": 3.0, "sync": 0.5}
    return Step(seconds=seconds, phases=phases, prompt_tokens=16 * 43, response_tokens=response_tokens)


def turn(side: str, number: int, seconds: float) -> Turn:
    return Turn(side=side, round=number, steps=[step(seconds)], peak_bytes=int(seconds))


def test_it_starts_with_nothing_installed_but_python() -> None:
    """So does the part that runs under TRL's interpreter, which need not have anything of ours."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import benchmarks.merging.other, benchmarks.merging.child; "
        "from benchmarks.merge import parse_args; parse_args(['--help'])"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--trl-python" in done.stdout, done.stderr


def test_quick_gives_way_to_what_is_said() -> None:
    args = merge.parse_args(["--quick", "--rounds", "7"])
    assert (args.rounds, args.responses, args.tiny) == (7, [4], True)
    assert merge.parse_args([]).tiny is False


def test_cases_are_every_shape_in_every_type_and_the_experts_are_ours_alone() -> None:
    both, more = merge.cases(merge.parse_args(["--dtypes", "float32", "bfloat16"]), "folder")
    assert {(c.responses, c.new_tokens, c.dtype) for c in both} == {
        (r, n, d) for r in (16, 64) for n in (64, 256) for d in ("float32", "bfloat16")
    }
    assert {c.experts for c in both} == {1}
    assert [(c.experts, c.responses, c.new_tokens, c.dtype) for c in more] == [
        (n, 64, 64, "bfloat16") for n in (1, 4, 10, 16)
    ]


def test_who_is_first_changes_from_round_to_round() -> None:
    assert merge.turns_of_round(0, True, CASE) == [OURS, TRL, *LIMITS]
    assert merge.turns_of_round(1, True, CASE) == [TRL, OURS, *LIMITS]
    assert merge.turns_of_round(1, False, CASE) == [OURS, *LIMITS]
    for without in (replace(CASE, lora=4), replace(CASE, options=("trainer.compile=true",))):
        assert merge.turns_of_round(0, False, without) == [OURS, ENGINE, BODY]


def test_a_padded_micro_batch_fits_and_divides_the_step() -> None:
    assert CASE.rows == 8  # nine of 107 tokens would fit
    assert replace(CASE, micro_batch_tokens=10).rows == 1
    assert replace(CASE, micro_batch_tokens=10_000).rows == 16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pipeline_is_one_that_opd_takes(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr("benchmarks.merging.ours.kv_cache_gib", lambda case: 1)
    case = replace(CASE, experts=3, dtype=dtype, options=("rollout.workers=2",))
    config = load_pipeline(pipeline(case), case.options)
    assert config.rollout.workers == 2 and config.rollout.max_new_tokens == 64
    assert config.trainer.samples_per_step == 16 and config.trainer.steps == 2
    assert {config.rollout.dtype, config.teachers.dtype, config.trainer.dtype} == {dtype}
    assert {e.domain for e in config.experts.values()} == set(config.domains) == {"d0", "d1", "d2"}


def test_both_sides_have_the_same_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.merging.ours.kv_cache_gib", lambda case: 1)
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(LoraConfig=dict))
    case = replace(CASE, lora=4)
    ours = load_pipeline(pipeline(case)).student.lora
    theirs = adapters(case)
    assert ours is not None
    assert (ours.r, ours.alpha, ours.targets) == (theirs["r"], theirs["lora_alpha"], theirs["target_modules"])
    assert load_pipeline(pipeline(CASE)).student.lora is None and adapters(CASE) is None


def test_a_step_of_other_work_is_named() -> None:
    assert unequal(CASE, step()) is None
    assert "1000 response tokens" in str(unequal(CASE, step(response_tokens=1000)))
    assert "1 prompt" in str(unequal(CASE, replace(step(), prompt_tokens=1)))


def test_the_ratio_is_taken_within_rounds() -> None:
    ours = [turn(OURS, n, s) for n, s in enumerate((10.0, 20.0, 40.0))]
    trl = [turn(TRL, n, s) for n, s in enumerate((20.0, 40.0, 20.0))]
    assert ratio(ours, trl) == 2.0  # of 2, 2 and 0.5; that of the medians would be 1
    assert ratio(ours, trl[1:2]) == 2.0
    assert ratio(ours, []) is None


def test_limits_are_medians_and_the_floor_is_their_work() -> None:
    body = [
        Turn(side=BODY, round=n, figures={"forward_tokens_s": r, "optimizer_s": 0.25})
        for n, r in enumerate((856.0, 1.0, 1712.0))
    ]
    engine = [Turn(side=ENGINE, round=0, figures={"engine_tokens_s": 256.0})]
    found = limits([*body, *engine])
    assert found == {"forward_tokens_s": 856.0, "optimizer_s": 0.25, "engine_tokens_s": 256.0}
    assert floor(CASE, found) == {"engine": 4.0, "forward": 2.0, "optimizer": 0.25}


def test_a_phase_stands_beside_what_its_work_takes_alone() -> None:
    found = {"engine_tokens_s": 512.0, "forward_backward_tokens_s": 1712.0, "loss_tokens_s": 1024.0}
    shown = {p.name: p for p in phases(CASE, OURS, [turn(OURS, 0, 10.0)], found)}
    assert shown["rollout"].seconds == 4.0 and shown["rollout"].alone == 2.0
    assert shown["train"].alone == 2.0 and "loss 1.00" in shown["train"].parts
    assert shown["score"].alone is None and shown["sync"].alone is None
    assert shown["between phases"].seconds == 0.5


def test_our_phases_are_those_of_the_loop() -> None:
    """A phase that the loop renames would read as no time at all."""
    source = (ROOT / "opd" / "loop.py").read_text(encoding="utf-8")
    assert all(f'clock("{name}")' in source for name in PARTS[OURS])


def test_what_sharding_adds_is_without_what_it_wraps() -> None:
    found = {"forward_backward_tokens_s": 1712.0, "optimizer_s": 0.25}
    assert sharding(CASE, found) is None
    found |= {"sharded_micro_s": 1.0, "sharded_last_s": 2.0, "sharded_step_s": 0.5}
    assert sharding(CASE, found) == 1.0 + 2.0 + 0.5 - 1.0 - 0.25  # two micro-batches of eight rows
    shown = phases(CASE, OURS, [turn(OURS, 0, 10.0)], found)
    assert {p.name: p.sharding for p in shown if p.sharding} == {"train": 2.25}


def test_a_summary_goes_into_json() -> None:
    turns = [turn(OURS, 0, 10.0), turn(TRL, 0, 20.0), Turn(side=BODY, round=0, figures={"forward_tokens_s": 856.0})]
    found = json.loads(json.dumps(summary(Measured(CASE, turns))))
    assert found["ours_over_trl"] == 2.0 and found["ours"]["tokens_s"] == 102.4
    assert found["trl"]["step_s"] == 20.0 and found["alone_s"] == {"forward": 2.0}


TALKER = """
import sys
from benchmarks.merging.turns import started
case, turns = started()
for index in range(case.warm_up + case.steps):
    print("noise of a library", flush=True)
    turns.over({"seconds": 1.0 + index, "phases": {}, "prompt_tokens": 688, "response_tokens": TOKENS})
sys.exit(STATUS)
"""


@pytest.fixture
def talker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> child.Interpreters:
    """Children run this instead of a side; it is changed by the test."""
    script = tmp_path / "talker.py"
    script.write_text(TALKER.replace("TOKENS", "1024").replace("STATUS", "0"))
    monkeypatch.setattr(child.Interpreters, "command", lambda self, side: [sys.executable, str(script)])
    return child.Interpreters(ours=sys.executable, trl=None, step_timeout_s=60)


def test_a_turn_keeps_the_steps_after_the_warm_up(talker: child.Interpreters) -> None:
    taken = child.take_turn(replace(CASE, warm_up=2, steps=2), OURS, 3, talker)
    assert [s.seconds for s in taken.steps] == [3.0, 4.0] and taken.round == 3
    assert any("talker.py" in name and held > 0 for name, held in taken.memory.items())
    assert taken.start_s > 0 and min(taken.start_peak_bytes, taken.peak_bytes) > 0


def test_what_others_took_of_the_cores_is_told(talker: child.Interpreters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(child, "cpu_s", lambda pids: 3.0)
    monkeypatch.setattr(child, "machine_cpu_s", iter([100.0, 103.0, 113.0]).__next__)
    monkeypatch.setattr(child.Child, "age", 10.0)
    assert child.take_turn(CASE, OURS, 0, talker).others == 0.5  # 13 CPU seconds of 20, 3 of them the child's


def test_unequal_work_and_a_failure_end_the_run_with_the_log(talker: child.Interpreters, tmp_path: Path) -> None:
    script = tmp_path / "talker.py"
    script.write_text(TALKER.replace("TOKENS", "1000").replace("STATUS", "0"))
    with pytest.raises(SystemExit, match="1000 response tokens"):
        child.take_turn(CASE, OURS, 0, talker)
    script.write_text(TALKER.replace("TOKENS", "1024").replace("STATUS", "3"))
    with pytest.raises(SystemExit, match=r"exit status 3\n(.|\n)*noise of a library"):
        child.take_turn(CASE, OURS, 0, talker)
    script.write_text("raise ValueError('broken')")
    with pytest.raises(SystemExit, match=r"the process ended\n(.|\n)*ValueError: broken"):
        child.take_turn(CASE, OURS, 0, talker)
    script.write_text("import time; time.sleep(600)")
    with pytest.raises(SystemExit, match="nothing in 1 s"):
        child.take_turn(CASE, OURS, 0, replace(talker, step_timeout_s=1))


def test_a_limit_says_its_figures(talker: child.Interpreters, tmp_path: Path) -> None:
    (tmp_path / "talker.py").write_text(
        "import sys\nfrom benchmarks.merging.turns import started\n"
        "case, turns = started()\nturns.over({'matmul_gflops': 5.0, 'rows': case.rows, 'what': len(sys.argv[3])})\n"
    )
    for side in LIMITS:
        taken = child.take_turn(CASE, side, 0, talker)
        assert taken.figures == {"matmul_gflops": 5.0, "rows": 8, "what": len(side)} and not taken.steps


def test_memory_and_time_are_those_of_the_whole_family() -> None:
    code = "import sys, time\nhoard = bytearray(b'x') * (96 << 20)\nsum(range(10**6))\nprint('there', flush=True)\ntime.sleep(600)"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        pids = family(process.pid)
        try:
            assert len(pids) == 2 and pids[0] == process.pid
            assert anonymous(pids)[pids[1]] >= 96 << 20 > anonymous(pids)[pids[0]] > 0
            assert title(pids[1]).startswith("python")
            assert 0 < shared(pids) < 96 << 20
            assert 0 < cpu_s(pids) < machine_cpu_s()
        finally:
            for pid in pids:
                os.kill(pid, 9)
    ended = pids[:1]
    assert anonymous(ended) == {pids[0]: 0} and title(pids[0]) == "" and cpu_s(ended) == shared(ended) == 0


def test_a_case_survives_its_way_to_the_child() -> None:
    case = replace(CASE, options=("a=1",))
    given = json.loads(json.dumps(asdict(case)))
    assert Case(**given | {"options": tuple(given["options"])}) == case
