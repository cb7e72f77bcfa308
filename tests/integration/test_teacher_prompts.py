"""A merge with a teacher that has a system message before episodes of two turns, one that reads a column which the student never sees,
and general prompts that are kept, through the real engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from opd.prompts import load_tokenizer
from opd.stream.schema import TargetRow, read_stream
from tests.integration.conftest import write_pipeline, write_prompts
from tests.integration.test_merge import kill_when_logged, opd, records

SYSTEM = "say the word: "
WORLD = """
from opd.records.environments import Outcome

class Echo:
    tools = ()
    def reset(self, metadata, seed):
        self.turns = 0
        return ""
    def step(self, action):
        self.turns += 1
        return Outcome(observation=" more=", reward=0.5, done=self.turns == 2)
    def close(self):
        pass
"""


def with_own_prompts(root: Path, pipeline: dict[str, Any]) -> dict[str, Any]:
    template = root / "join.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    file = root / "right.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | {"solution": f"it is {row['answer']}. "}) + "\n" for row in rows))
    for name, text in (("left", SYSTEM), ("right", "{{ row.solution }}")):
        pipeline["experts"][name]["prompt"] = {"system": text, "template": str(template), "max_model_len": 80}
    (root / "world.py").write_text(WORLD)
    pipeline["domains"]["left-domain"]["environment"] = {"name": "world:Echo"}
    pipeline["keep"] = {"prompts": str(write_prompts(root / "general.jsonl", "gen", 20, 3)), "weight": 0.5}
    pipeline["trainer"] |= {"steps": 5, "samples_per_step": 20}
    return pipeline


def logged_rows(step: Path) -> Iterator[TargetRow]:
    for part in sorted(step.glob("worker-*.arrow")):
        yield from read_stream(pa.py_buffer(part.read_bytes())).rows


@torch.no_grad()
def check_scores(rows: list[TargetRow], pipeline: dict[str, Any]) -> None:
    """The logged states are those that plain transformers computes after the teacher's own prompt, token by token."""
    from transformers import AutoModelForCausalLM

    experts = {name: expert["model"] for name, expert in pipeline["experts"].items()}
    experts["kept"] = pipeline["student"]["model"]
    models = {n: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for n, p in experts.items()}
    tokenizer = load_tokenizer(Path(pipeline["student"]["model"]))
    for row in rows:
        asked = tokenizer.decode(row.rollout.prompt_ids)
        word = asked.split()[1].rstrip("=")
        front = {"left": SYSTEM, "right": f"it is {word}. ", "kept": ""}[row.teacher]
        prompt = tokenizer.encode(front + asked, add_special_tokens=False)
        ids = torch.tensor([[*prompt, *row.rollout.response_ids]])
        hidden_T_D = models[row.teacher].base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        want = hidden_T_D[len(prompt) - 1 : -1][list(row.rollout.trained_positions)]
        states: Any = row.answer
        torch.testing.assert_close(states.states(torch.float32), want, rtol=0, atol=1e-4)


@pytest.mark.slow  # three starts of all engines; the ranks that teach are in the test below
def test_own_prompts_and_kept_prompts_in_a_merge_that_is_killed_and_resumed(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    file = write_pipeline(tmp_path, with_own_prompts(tmp_path, pipeline))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    merged = opd("merge", file, "--run-dir", whole, cwd=tmp_path, timeout_s=400)
    assert merged.returncode == 0, merged.stderr
    steps = records(whole)
    assert {name: d["samples"] for name, d in steps[-1]["domains"].items()} == {
        "left-domain": 8,
        "right-domain": 8,
        "kept": 4,
    }
    # The student begins as the teacher of what is kept, so that there is nothing to learn at first.
    assert steps[0]["domains"]["kept"]["loss"] == pytest.approx(0.0, abs=1e-5)
    assert steps[0]["domains"]["right-domain"]["loss"] > 1e-3
    assert all(record["quarantined"] == {} for record in steps)
    assert "kept" in (whole / "report.html").read_text()

    kill_when_logged(file, broken, 4)
    rows = [row for step in sorted((broken / "targets").glob("step-*")) for row in logged_rows(step)]
    assert {row.teacher for row in rows} == {"left", "right", "kept"}
    assert {len({*row.rollout.turns}) for row in rows if row.teacher == "left"} == {2}
    check_scores(rows, pipeline)
    resumed = opd("merge", "--resume", broken, cwd=tmp_path, timeout_s=400)
    assert resumed.returncode == 0 and "resumed from step 2" in resumed.stdout + resumed.stderr, resumed.stderr
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    (tmp_path / "join.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    changed = opd("merge", "--resume", broken, "--set", "trainer.steps=6", cwd=tmp_path, timeout_s=100)
    assert changed.returncode == 2
    assert "teacher templates changed since the run began: left, right" in changed.stdout + changed.stderr


def test_the_ranks_of_a_lora_student_teach_beside_experts_in_a_pool(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    data = with_own_prompts(tmp_path, pipeline)
    data["student"]["lora"] = {"r": 4}
    data["experts"]["right"]["model"] = "student"
    data["trainer"] |= {"steps": 3, "lr": 1.0e-2}
    run = tmp_path / "lora"
    merged = opd("merge", write_pipeline(tmp_path, data), "--run-dir", run, cwd=tmp_path, timeout_s=400)
    assert merged.returncode == 0, merged.stderr
    steps = records(run)
    losses = {name: domain["loss"] for name, domain in steps[0]["domains"].items()}
    assert losses["kept"] == pytest.approx(0.0, abs=1e-5) and losses["right-domain"] > 1e-3 < losses["left-domain"]
    assert steps[-1]["domains"]["right-domain"]["loss"] < losses["right-domain"]
