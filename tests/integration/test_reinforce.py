"""Experts by reinforcement through the real engines: a critic, a verifier and an environment, killed and resumed, and learning."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from experts.registry import Registry
from opd.files import blake3_file
from tests.chaos import Merge, end, frozen, left, place_of_its_own, read_title, remaining
from tests.integration.test_agents import WORLD
from tests.integration.test_merge import ROOT, judge_vowels, opd, records, write


def alone(root: Path, pipeline: dict[str, Any]) -> dict[str, Any]:
    """The pipeline without its experts: the left domain is judged, the right one is a corridor of several turns."""
    judge_vowels(root, pipeline)
    (root / "world.py").write_text(WORLD)
    for name, lengths in (("right", range(1, 7)), ("right-eval", (2, 3))):
        rows = [{"prompt": f"go {name[-1]}{n}", "metadata": {"length": n}} for n in lengths]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    domain = pipeline["domains"]["right-domain"]
    domain["environment"] = {"name": "world:Corridor", "max_turns": 4, "max_tokens": 24}
    reward = {"baseline": {"kind": "critic", "warm_up": {"steps": 1}, "lr_ratio": 5}}
    return pipeline | {
        "experts": {},
        "teachers": {"engine": "none"},
        "objective": {"kind": "none", "reward": reward},
        "rollout": {"max_new_tokens": 8, "max_model_len": 96},
        "trainer": pipeline["trainer"] | {"steps": 4},
        "checkpoint": {"every": 2},
    }


def weights(run: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(run / "model.safetensors"))


def test_a_run_without_teachers_learns_from_a_verifier_and_an_environment(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    import torch

    run = tmp_path / "run"
    done = opd("merge", write(tmp_path, alone(tmp_path, pipeline)), "--run-dir", run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "to learn from rewards alone" in done.stderr
    steps = records(run)
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    for record in steps:
        rewards = record["reward"]["domains"]
        assert {d: r["episodes"] for d, r in rewards.items()} == {"left-domain": 12, "right-domain": 12}
        assert all(0 < r["reward"] <= 1 for r in rewards.values()) and not any("failed" in r for r in rewards.values())
        assert record["logprob_gap"] < 1e-3 and record["probe_gap"] < 1e-3
        assert record["loss"] == 0 and record["reward"]["masked"] == 0
    assert steps[0]["skipped"] and steps[0]["reward"]["weight"] == 0, "the critic knows nothing yet"
    assert any(record["reward"]["weight"] == 1 and record["grad_norm"] > 0 for record in steps[1:])
    assert "explained_variance" in steps[-1]["reward"]["credit"]
    assert (run / "checkpoints" / "step-000004" / "credit" / "credit.json").exists()
    start, ours = weights(Path(pipeline["student"]["model"])), weights(run / "model")
    assert any(not torch.equal(start[name], ours[name]) for name in ours)
    report = json.loads((run / "report.json").read_text())
    assert {d["expert"] for d in report["domains"].values()} == {None} and "reward" in report["curves"]


def spec_of(root: Path, pipeline: dict[str, Any], method: str) -> Path:
    """The corridor of `alone` as the task of one expert."""
    data = alone(root, pipeline)
    raw = {
        "output_dir": str(root / "models"),
        "runs": str(root / "runs"),
        "registry": str(root / "registry"),
        "base": {"model": data["student"]["model"]},
        "method": method,
        "reward": data["objective"]["reward"] if method == "ppo" else {},
        "experts": {"right": {"domain": "right-domain", **data["domains"]["right-domain"]}},
        "trainer": data["trainer"] | {"steps": 5},
        **{key: data[key] for key in ("rollout", "checkpoint", "evaluate")},
    }
    path = root / "spec.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def kill_in(spec: Path, logged: Path) -> None:
    """Start `opd experts train` and kill it as soon as a step is in a target log."""
    command = [sys.executable, "-m", "cli", "experts", "train", str(spec)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=spec.parent, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not logged.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow  # three runs
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_an_expert_killed_and_resumed_is_the_same_bit_for_bit(
    method: str, tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    import torch

    spec = spec_of(tmp_path, pipeline, method)
    whole = opd("experts", "train", spec, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    for name in ("models", "runs", "registry"):
        (tmp_path / name).rename(tmp_path / f"whole-{name}")

    kill_in(spec, tmp_path / "runs" / f"right-{method}" / "targets" / "step-000004")
    done = opd("experts", "train", spec, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "right: going on" in done.stderr and "resumed from step 2" in done.stderr
    ours, theirs = (weights(tmp_path / root / "right") for root in ("models", "whole-models"))
    start = weights(Path(pipeline["student"]["model"]))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert any(not torch.equal(ours[key], start[key]) for key in start)
    mine, other = (records(tmp_path / root / f"right-{method}") for root in ("runs", "whole-runs"))
    assert [r["reward"] for r in mine] == [r["reward"] for r in other]
    assert any("replayed" in r for r in mine)
    manifest = Registry(tmp_path / "registry").get("right")
    assert manifest.training is not None and manifest.training["method"] == method


def kill_a_rank(merge: Merge, title: str, methods: Collection[str], step: int) -> None:
    """Kill the newest process with that title while it is in one of these methods, in this step."""
    shown, deadline, looked = {f"{title}.{method}" for method in methods}, time.monotonic() + 600, 0.0
    while merge.driver.poll() is None and time.monotonic() < deadline:
        if time.monotonic() > looked + 1.0:
            merge.look()
            looked = time.monotonic()
        at_work = [process.pid for process in merge.seen if read_title(process.pid) in shown]
        if merge.records == step - 1 and at_work:
            with frozen([merge.driver.pid, at_work[-1]]):
                if merge.records == step - 1 and read_title(at_work[-1]) in shown:
                    os.kill(at_work[-1], signal.SIGKILL)
                    return
        time.sleep(0.0005)
    raise AssertionError(f"{title}: the moment did not come; {merge.errors.read_text()}")


def hashes(directory: Path) -> dict[str, str]:
    """Hash a checkpoint's tensors of policy and critic."""
    return {str(f.relative_to(directory)): blake3_file(f) for f in directory.rglob("*") if f.suffix == ".safetensors"}


@pytest.mark.slow  # two runs, of which one starts its workers three times
@pytest.mark.timeout(1800)
def test_ranks_of_critic_and_policy_are_killed_and_the_run_goes_on_to_the_same_weights(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    """Each time one step lies between the checkpoint and the fault, and is trained again from the log."""
    data = alone(tmp_path, pipeline)
    data["trainer"] |= {"ranks": 2, "steps": 6}
    file, whole = write(tmp_path, data), tmp_path / "whole"
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with place_of_its_own() as place:  # its path is short: Ray's sockets lie below it
        for module in tmp_path.glob("*.py"):
            shutil.copy(module, place)
        run = place / "run"
        merge = Merge([file, "--run-dir", run], run, place)
        try:
            kill_a_rank(merge, "ray::CriticRank", ("values", "update"), step=4)
            kill_a_rank(merge, "ray::TrainerRank", ("accumulate", "finish_step"), step=6)
            assert merge.wait(300) == 0, merge.errors.read_text()
            assert not remaining(merge) and not left([merge], place)
        finally:
            end(merge)
        said, found, expected = merge.errors.read_text(), records(run), records(whole)
        assert said.count("starting all workers again") == 2 and "critic rank" in said and "trainer rank" in said
        assert [r["step"] for r in found] == [1, 2, 3, 4, 5, 6] and any("replayed" in r for r in found)
        assert [(r["reward"], r["grad_norm"]) for r in found] == [(r["reward"], r["grad_norm"]) for r in expected]
        assert any(r["reward"]["weight"] == 1 for r in found), "the policy trained"
        last = Path("checkpoints", "step-000006")
        assert len(hashes(whole / last)) == 4 and hashes(run / last) == hashes(whole / last)
        assert blake3_file(run / "model" / "model.safetensors") == blake3_file(whole / "model" / "model.safetensors")


@pytest.mark.slow  # two runs
def test_two_ranks_equal_one(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    import torch

    data = alone(tmp_path, pipeline)
    found = {}
    for ranks in (1, 2):
        data["trainer"] |= {"ranks": ranks, "steps": 6, "adam_epsilon": 1e-3}
        run = tmp_path / f"ranks-{ranks}"
        done = opd("merge", write(tmp_path, data), "--run-dir", run, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found[ranks] = weights(run / "model"), records(run)
    start = weights(Path(pipeline["student"]["model"]))
    assert any(not torch.allclose(found[1][0][name], start[name], atol=1e-4) for name in start), (
        "the policy still waits"
    )
    for name, tensor in found[1][0].items():
        assert torch.allclose(tensor, found[2][0][name], atol=1e-5), name
    for one, two in zip(found[1][1], found[2][1], strict=True):
        assert one["reward"]["loss"] == pytest.approx(two["reward"]["loss"], abs=1e-5)
        assert one["reward"]["credit"] == pytest.approx(two["reward"]["credit"], abs=1e-4)


@pytest.mark.slow  # ten minutes on two cores
@pytest.mark.timeout(4000)
def test_ppo_lifts_the_easiest_domain(tmp_path: Path) -> None:
    made = opd(
        "prompts", "make", "rewards", "--output", "prompts/rewards", "--train", 4000, "--eval", 100, cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    raw = yaml.safe_load((ROOT / "experts" / "rewards-experts.yaml").read_text())
    raw["experts"] = {EASIEST: raw["experts"][EASIEST]}
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "cli", "experts", "train", str(spec)]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=3600)
    training = Registry(tmp_path / "registry" / "rewards").get(EASIEST).training
    assert training is not None
    before, after = training["result"]["success"][EASIEST]
    assert before < 0.4 and after > 0.85
    curve = [record["reward"]["domains"][EASIEST]["reward"] for record in records(Path(training["result"]["run"]))]
    assert sum(curve[:5]) / 5 < 0.4 and sum(curve[-5:]) / 5 > 0.8


EASIEST = "beside"
