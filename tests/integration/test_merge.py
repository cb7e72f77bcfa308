"""The whole merge through `opd`: real vLLM, Ray, Arrow and two ZeRO-3 ranks, with teachers of its own and with served ones."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from safetensors.torch import load_file

from opd.records.scores import Evaluation

ROOT = Path(__file__).parents[2]
TOKEN = "s3cret"


def opd(*args: object, cwd: Path, timeout_s: float = 500, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def write(root: Path, data: dict[str, Any]) -> Path:
    path = root / "pipeline.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def kill_when_logged(pipeline: Path, run: Path, step: int) -> None:
    """Start a merge beside its pipeline and kill its driver as soon as the target log has a step."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "merge", str(pipeline), "--run-dir", str(run)],
        cwd=pipeline.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not (run / "targets" / f"step-{step:06d}").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def judge_vowels(root: Path, pipeline: dict[str, Any]) -> None:
    """Let exams count vowels: untrained models are never right, and a score that depends on every letter tells whether the
    same answers were judged."""
    (root / "judge.py").write_text(
        "def vowels(text, answer, metadata):\n    return sum(map(text.count, 'aeiou')) / 8\n"
    )
    for domain in pipeline["domains"].values():
        domain["eval"]["verifier"] = {"kind": "python", "function": "judge:vowels"}
    pipeline["evaluate"] = {"n": 2, "temperature": 1.0}


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def first_line(stream: IO[str], timeout_s: float) -> str:
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(stream.readline()), daemon=True)
    reader.start()
    reader.join(timeout_s)
    assert lines and lines[0], "nothing was said in time"
    return lines[0]


@pytest.fixture
def served(
    tmp_path: Path, pipeline: dict[str, Any], certificate: tuple[Path, Path]
) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """The section `teachers` that asks an `opd teachers serve` over TLS for this pipeline's teachers, and the server's process."""
    file, token = tmp_path / "served.yaml", tmp_path / "token"
    file.write_text(yaml.safe_dump(pipeline))
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    command = ["teachers", "serve", file, "--listen", "127.0.0.1:0", "--token-file", token]
    command += ["--tls-cert", certificate[0], "--tls-key", certificate[1]]
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *map(str, command)],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "OPD_TEACHERS_TOKEN"} | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = first_line(process.stdout, 300).split()[-1]
        yield {"engine": "flight", "address": address, "tls_root_certs": str(certificate[0])}, process
    finally:
        process.kill()
        process.wait()


def end_server(process: subprocess.Popen[str]) -> None:
    """By SIGTERM, which it takes well."""
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("phase_s", "busy_s", "checkpoint")}


def assert_the_same_merge(whole: Path, broken: Path) -> None:
    """The weights to the last bit; the records too, but for times and for steps 3 and 4, which `broken` replayed."""
    import torch

    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert set(ours) == set(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    for mine, other in zip(records(whole), records(broken), strict=True):
        assert mine["loss"] == other["loss"] and mine["response_tokens"] == other["response_tokens"]
        if mine["step"] not in (3, 4):
            assert without_times(mine) == without_times(other)


def test_merge_kill_resume_and_the_model_it_leaves(
    tmp_path: Path, pipeline: dict[str, Any], served: tuple[dict[str, Any], subprocess.Popen[str]]
) -> None:
    """One uninterrupted run, with served teachers; the same merge with teachers of its own, killed after a checkpoint and
    resumed, ends with the same weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    judge_vowels(tmp_path, pipeline)
    pipeline["evaluate"] |= {"every": 3}
    # With two ranks a step is one round of micro-batches: how many begin before the last row is scored is no matter of time.
    pipeline["trainer"] |= {"ranks": 2}
    teachers, server = served
    whole = tmp_path / "whole"
    file = write(tmp_path, pipeline | {"teachers": teachers})
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path, OPD_TEACHERS_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert "left-domain" in done.stdout and "headroom recovered" in done.stdout
    end_server(server)

    steps = records(whole)
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["policy_version"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert set(steps[0]["phase_s"]) >= {"rollout", "score", "train", "sync"}
    for record in steps:
        assert {d: s["samples"] for d, s in record["domains"].items()} == {"left-domain": 12, "right-domain": 12}
        assert record["logprob_gap"] < 1e-3 and record["probe_gap"] < 1e-3
    for domain in ("left-domain", "right-domain"):
        assert steps[-1]["domains"][domain]["loss"] < 0.8 * steps[0]["domains"][domain]["loss"]
    report = json.loads((whole / "report.json").read_text())
    assert set(report["domains"]) == {"left-domain", "right-domain"} and report["steps"] == 6
    assert report["response_tokens"] == sum(r["response_tokens"] for r in steps)

    broken = tmp_path / "broken"
    # Step 4 is in the log and not in a checkpoint: the resume has steps to replay.
    kill_when_logged(write(tmp_path, pipeline), broken, 4)
    assert not (broken / "report.json").exists()
    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from step 2" in resumed.stderr
    assert [r["step"] for r in records(broken)] == [1, 2, 3, 4, 5, 6]
    assert {3, 4} <= {r["step"] for r in records(broken) if "replayed" in r}
    assert not any("replayed" in r for r in records(whole))
    assert list((broken / "targets").iterdir()) == [], "the last checkpoint holds what all steps taught"
    assert [r["checkpoint"]["step"] for r in records(whole) if "checkpoint" in r] == [2, 4]
    assert_the_same_merge(whole, broken)

    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    assert tokenizer.chat_template and (whole / "model" / "generation_config.json").exists()
    assert "left" in (whole / "model" / "README.md").read_text()
    ids = tokenizer("lef abc=", return_tensors="pt", add_special_tokens=False)
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids["input_ids"].shape[1]
    start, merged = (load_file(f / "model.safetensors") for f in (Path(pipeline["student"]["model"]), whole / "model"))
    assert any(not start[name].equal(merged[name]) for name in merged)

    stored = {f.stem: Evaluation.load(f) for f in (whole / "evaluation").glob("*.json")}
    assert set(stored) == {"before", "expert", "after", "step-000003", "step-000006"}
    for name in ("before", "expert", "after"):
        assert stored[name].accuracy == {domain: d[name] for domain, d in report["domains"].items()}
    assert records(whole)[2]["accuracy"] == stored["step-000003"].accuracy
    assert {(s.questions, s.samples, s.failed) for s in stored["after"].scores.values()} == {(8, 2, 0)}
    assert all(0 < s.accuracy < 1 for s in stored["after"].scores.values())


@pytest.mark.slow  # a merge and an exam of four models
def test_the_matrix_judges_the_answers_that_the_merge_judged(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    judge_vowels(tmp_path, pipeline)
    whole = tmp_path / "whole"
    done = opd("merge", write(tmp_path, pipeline), "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stored = {name: Evaluation.load(whole / "evaluation" / f"{name}.json") for name in ("before", "expert", "after")}

    judged = opd("evaluate", "--matrix", whole, "--json", cwd=tmp_path)
    assert judged.returncode == 0, judged.stderr
    matrix = {n: Evaluation.from_json({"format": 1, **e}) for n, e in json.loads(judged.stdout)["models"].items()}
    assert list(matrix) == ["student before", "left", "right", "merged"]
    assert replace(stored["after"], model="") == replace(matrix["merged"], model="")
    assert matrix["student before"] == stored["before"]
    for name in ("left", "right"):
        assert matrix[name].scores[f"{name}-domain"] == stored["expert"].scores[f"{name}-domain"]


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    pipeline["trainer"]["steps"] = 500
    pipeline["checkpoint"]["every"] = 500
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "merge", str(write(tmp_path, pipeline)), "--run-dir", str(run)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not (run / "metrics.jsonl").exists() or not records(run):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    last = records(run)[-1]["step"]
    assert (run / "checkpoints" / f"step-{last:06d}" / "checkpoint.json").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_engines_are_the_real_ones() -> None:
    """Nobody put a stand-in on the path."""
    for name in ("vllm", "ray", "deepspeed", "pyarrow"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None and "site-packages" in spec.origin
