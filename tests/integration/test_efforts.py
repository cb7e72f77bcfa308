"""A merge of two efforts through the real engines, killed and resumed: the student reads a tag, the teachers do not."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from opd.prompts import load_tokenizer
from tests.integration.conftest import write_pipeline
from tests.integration.test_after import asked
from tests.integration.test_merge import ROOT, kill_when_logged, opd, records
from tests.integration.test_teacher_prompts import logged_rows
from tests.servers import serving

TAGS = {"low": "go ", "max": "think "}


def with_efforts(pipeline: dict[str, Any]) -> dict[str, Any]:
    """One expert of `left` for both efforts, and two of `right`; only `left` reads no tag."""
    left, right = (pipeline["experts"].pop(name) for name in ("left", "right"))
    pipeline["experts"] = {
        "left": {**left, "prompt": {"effort": False}},
        "right-low": {**right, "effort": "low"},
        "right-max": {**right, "effort": "max"},
    }
    pipeline["efforts"] = {name: {"text": text} for name, text in TAGS.items()}
    # On the way to the expert: the start student is a second teacher there.
    pipeline["domains"]["right-domain-max"] = {"extrapolate": 0.5}
    pipeline["trainer"] |= {"steps": 5, "samples_per_step": 16}
    return pipeline


@torch.no_grad()
def check_scores(rows: list[Any], pipeline: dict[str, Any]) -> None:
    """The logged states are those that plain transformers computes after what the teacher reads."""
    from transformers import AutoModelForCausalLM

    paths = {name: expert["model"] for name, expert in pipeline["experts"].items()}
    paths["start student"] = pipeline["student"]["model"]
    models = {n: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for n, p in paths.items()}
    tokenizer = load_tokenizer(Path(pipeline["student"]["model"]))
    for row in rows:
        asked = tokenizer.decode(row.rollout.prompt_ids)
        tag = TAGS[row.rollout.domain.rpartition("-")[2]]
        assert asked.startswith(tag)
        prompt = tokenizer.encode(asked.removeprefix(tag) if row.teacher == "left" else asked, add_special_tokens=False)
        ids = torch.tensor([[*prompt, *row.rollout.response_ids]])
        hidden_T_D = models[row.teacher].base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        want = hidden_T_D[len(prompt) - 1 : -1][list(row.rollout.trained_positions)]
        torch.testing.assert_close(row.answer.states(torch.float32), want, rtol=0, atol=1e-4)


def test_two_efforts_in_a_merge_that_is_killed_and_resumed(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    file, run = write_pipeline(tmp_path, with_efforts(pipeline)), tmp_path / "run"
    kill_when_logged(file, run, 4)
    rows = [row for step in sorted((run / "targets").glob("step-*")) for row in logged_rows(step)]
    weights = {(row.rollout.domain, row.teacher): row.weight for row in rows}
    assert weights == {
        ("left-domain-low", "left"): 1.0,
        ("left-domain-max", "left"): 1.0,
        ("right-domain-low", "right-low"): 1.0,
        ("right-domain-max", "right-max"): 0.5,
        ("right-domain-max", "start student"): 0.5,
    }
    check_scores(rows, pipeline)

    resumed = opd("merge", "--resume", run, cwd=tmp_path, timeout_s=400)
    assert resumed.returncode == 0 and "resumed from step 2" in resumed.stdout + resumed.stderr, resumed.stderr
    steps = records(run)
    assert {name: domain["samples"] for name, domain in steps[-1]["domains"].items()} == {
        f"{side}-domain-{effort}": 4 for side in ("left", "right") for effort in TAGS
    }
    ends = [domain for step in steps for domain in step["domains"].values() if domain.get("end_tokens")]
    assert ends and all(domain["end_tokens"] <= domain["samples"] and domain["end_loss"] > 0 for domain in ends)

    report = json.loads((run / "report.json").read_text())["efforts"]
    assert [(row["domain"], row["effort"]) for row in report["rows"]] == [
        (f"{side}-domain", effort) for side in ("left", "right") for effort in TAGS
    ]
    assert all(row[f"{key}_tokens"] > 0 for row in report["rows"] for key in ("before", "after", "expert"))
    assert "efforts" in resumed.stdout + resumed.stderr, "the table of the terminal"
    expert = json.loads((run / "evaluation" / "expert.json").read_text())
    prompts = {answer["domain"]: answer["prompt"] for answer in expert["answers"]}
    assert prompts["left-domain-low"].startswith("lef ") and prompts["right-domain-low"].startswith("go rig ")


@pytest.mark.slow
def test_a_chat_and_a_server_pass_the_tag_on(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    file, run = write_pipeline(tmp_path, with_efforts(pipeline)), tmp_path / "run"
    merged = opd("merge", file, "--run-dir", run, "--set", "trainer.steps=2", cwd=tmp_path, timeout_s=400)
    assert merged.returncode == 0, merged.stderr
    talk = opd("chat", run, "--effort", "max", "--plain", "--max-new-tokens", "2", cwd=tmp_path, timeout_s=200)
    assert talk.returncode == 0, talk.stderr

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "cli", "serve", str(run), "--port", str(port), "--effort", "low"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    body = {"model": "two", "messages": [{"role": "user", "content": "rig abc"}], "max_tokens": 1}
    with serving([*command, "--", "--enforce-eager"], env, tmp_path / "log") as server:
        deadline, answer = time.monotonic() + 240, None
        while answer is None:
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(1)
            answer = asked(f"http://127.0.0.1:{port}/v1/chat/completions", body)
        most = asked(f"http://127.0.0.1:{port}/v1/chat/completions", {**body, "reasoning_effort": "max"})
    assert most is not None
    lengths = [found["usage"]["prompt_tokens"] for found in (answer, most)]
    assert lengths[1] - lengths[0] == len(TAGS["max"]) - len(TAGS["low"]), "every character is a token"
