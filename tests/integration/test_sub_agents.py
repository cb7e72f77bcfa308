"""A merge whose student starts sub-agents that another domain's expert teaches, killed while they write, and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from opd.records.types import Rollout
from opd.stream.rollouts import read_file
from tests.integration.test_agents import agent_pipeline, largest_gap_by_turn
from tests.integration.test_merge import ROOT, opd, records, write

WORLD = '''
from pathlib import Path
from world import Corridor

class Told(Corridor):
    """A corridor that writes down each of its turns, so that a test knows when one is under way."""

    def __init__(self, log, sign="-"):
        super().__init__(sign)
        self.log = Path(log)

    def step(self, action):
        with self.log.open("a") as file:
            file.write(".")
        return super().step(action)
'''


def teach_to_ask(model_dir: Path) -> None:
    """Let the untrained student begin many a turn with a call: `ask` and some letters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    heads = [f"go t{n} {n}-" for n in range(1, 7)] + [f"go t{n} {n}-ab 1-" for n in range(1, 7)]
    texts = [tokenizer(f"{head}ask {word}")["input_ids"] for head in heads for word in ("ab", "xe", "oi")]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(240):
        ids = torch.tensor([texts[step % len(texts)]])
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, -7:-1], ids[0, -6:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(model_dir)


def asking_pipeline(root: Path, pipeline: dict[str, Any]) -> Path:
    agent_pipeline(root, pipeline)
    (root / "told.py").write_text(WORLD)
    teach_to_ask(Path(pipeline["student"]["model"]))
    ask = {"description": "Say it backwards.", "domain": "left-domain", "prompt": "lef {task}=", "result": "{answer}-"}
    pipeline["domains"]["right-domain"]["environment"] |= {
        "name": "told:Told",
        "options": {"log": str(root / "turns")},
        "sub_agents": {"ask": ask},
        "max_tokens": 48,
        "max_turns": 8,
    }
    return write(root, pipeline)


def kill_while_they_play(pipeline: Path, run: Path) -> None:
    """Start a merge and kill its driver while the episodes of the second step, or a later one, are under way."""
    log = pipeline.parent / "turns"
    log.write_text("")
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "merge", str(pipeline), "--run-dir", str(run)],
        cwd=pipeline.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    deadline, turns = time.monotonic() + 300, None
    while turns is None or log.stat().st_size < turns + 4:
        assert process.poll() is None and time.monotonic() < deadline
        if turns is None and (run / "targets" / "step-000001").exists():
            turns = log.stat().st_size
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run / "targets" / "step-000002").exists(), "it was killed too late"


def logged(run: Path, step: int, vocabulary: int) -> list[Rollout]:
    return read_file((run / "targets" / f"step-{step:06d}" / "rollouts.arrow").read_bytes(), vocabulary)


@pytest.mark.slow
def test_sub_agents_are_taught_by_their_domain_and_survive_a_kill(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    file = asking_pipeline(tmp_path, pipeline)
    student, whole, broken = pipeline["student"]["model"], tmp_path / "whole", tmp_path / "broken"
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for record in records(whole):
        found, domains = record["episodes"]["right-domain"], record["domains"]
        started = found["sub_agents"]["done"]
        assert started >= 3 and found["trained"] == 1.0 and found["broken"] == found["forks"] == 0
        assert record["prompts"] == {"left-domain": 8, "right-domain": 8}
        assert domains["right-domain"]["samples"] == 8 and domains["left-domain"]["samples"] >= 8 + started
        assert domains["right-domain"]["tokens"] < found["tokens"], "the rest is left-domain's"
        assert record["logprob_gap"] < 1e-3

    kill_while_they_play(file, broken)
    vocabulary = AutoTokenizer.from_pretrained(student)
    first = logged(broken, 1, len(vocabulary))
    mine = [r for r in first if r.origin == "sub_agent"]
    assert {r.domain for r in mine} == {"left-domain"} and {r.parent for r in mine} <= {r.sample_id for r in first}
    assert all(vocabulary.decode(r.prompt_ids).startswith("lef ") for r in mine)
    assert max(largest_gap_by_turn(first, student).values()) < 1e-3

    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [r["episodes"] for r in records(broken)] == [r["episodes"] for r in records(whole)]
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
