"""A guarded merge through the real engines: a judge that contradicts itself is asked once about everything, killed and resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from opd.stream.rollouts import read_file
from tests.integration.test_agents import agent_pipeline
from tests.integration.test_merge import kill_when_logged, opd, records

JUDGE = '''
import fcntl, hashlib, os

def score(prompt, verdicts):
    """Log-probs of a judge that says the opposite whenever it is asked again."""
    key = hashlib.sha256(prompt.encode()).hexdigest()
    with open(os.environ["ASKED"], "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = file.read().split().count(key)
        file.write(key + "\\n")
    block = (int(key[0], 16) < 6) != bool(before % 2)
    return [-2.0, -0.1] if block else [-0.1, -2.0]
'''


@pytest.mark.slow
def test_what_a_judge_said_stands_whatever_kills_the_run(
    tmp_path: Path, pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    (tmp_path / "judge.py").write_text(JUDGE)
    judge = {"kind": "local", "scorer": "judge:score"}
    pipeline["guard"] = {"answers": True, "judge": judge, "on_hit": "mask", "deadline_s": 60}
    file, student = agent_pipeline(tmp_path, pipeline), pipeline["student"]["model"]
    broken, whole, domain = tmp_path / "broken", tmp_path / "whole", "right-domain"

    monkeypatch.setenv("ASKED", str(tmp_path / "asked-broken"))
    kill_when_logged(file, broken, 2)
    vocabulary = len(AutoTokenizer.from_pretrained(student))
    logged = read_file((broken / "targets" / "step-000001" / "rollouts.arrow").read_bytes(), vocabulary)
    assert any(span.origin == "masked" for rollout in logged for span in rollout.spans)
    told = json.loads((broken / "targets" / "step-000001" / "step.json").read_text())["episodes"][domain]["guard"]
    assert told["checked"] == len(told["events"]) > 8
    assert {event["verdict"]["stage"] for event in told["events"]} == {"judge"}

    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert {1, 2} <= {r["step"] for r in records(broken) if "replayed" in r}
    asked = Counter((tmp_path / "asked-broken").read_text().split())
    assert set(asked.values()) == {1}, "nothing was asked twice"
    stored = [json.loads(line)["key"] for line in (broken / "judged.jsonl").read_text().split("\n") if line]
    assert len(stored) == len(set(stored)) == len(asked)

    monkeypatch.setenv("ASKED", str(tmp_path / "asked-whole"))
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [r["episodes"] for r in records(broken)] == [r["episodes"] for r in records(whole)]
    assert all(r["episodes"][domain]["guard"]["blocked_turns"] > 0 for r in records(whole))
    assert all(0 < r["episodes"][domain]["trained"] < 1 for r in records(whole))
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    report = json.loads((whole / "report.json").read_text())
    assert report["guard"]["rules"][0]["rule"] == "answer" and 'id="guard"' in (whole / "report.html").read_text()
    shown = opd("traces", whole, cwd=tmp_path)
    assert "guard: blocked by the judge, answer: " in shown.stdout and "environment: The task is not" in shown.stdout
