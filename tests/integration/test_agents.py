"""A merge with one agent domain through the real engines: episodes of several turns, killed and resumed."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from opd.records.json_fields import make_record
from opd.records.scores import DomainScore, Evaluation
from opd.records.types import Rollout
from opd.run.paths import RunPaths
from opd.stream.rollouts import read_file
from opd.traces.record import read_traces
from tests.integration.test_merge import kill_when_logged, opd, records, write

WORLD = '''
import time
from opd.records.environments import Outcome

class Corridor:
    """Says how many vowels there were so far, and ends after as many turns as the task is long."""
    tools = ()

    def __init__(self, sign="+"):
        self.sign = sign

    def reset(self, metadata, seed):
        self.turns, self.length, self.vowels = 0, metadata["length"], 0
        return f" {self.length}{self.sign}"

    def step(self, action):
        self.turns += 1
        self.vowels += sum(map(action.text.lower().count, "aeiou"))
        time.sleep(0.01 * (self.length % 3))
        if self.length == 9:
            raise RuntimeError("the corridor fell in")
        return Outcome(observation=f" {self.vowels}{self.sign}", reward=0.1 * self.vowels, done=self.turns == self.length)

    def close(self):
        pass
'''


def agent_pipeline(root: Path, pipeline: dict[str, Any]) -> Path:
    (root / "world.py").write_text(WORLD)
    for name, lengths in (("right", range(1, 7)), ("right-eval", (2, 3, 4))):
        rows = [{"prompt": f"go {name[-1]}{n}", "metadata": {"length": n, "moves": n}} for n in lengths]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    domain = pipeline["domains"]["right-domain"]
    domain["environment"] = {"name": "world:Corridor", "options": {"sign": "-"}, "max_turns": 4, "max_tokens": 24}
    pipeline["rollout"] = {"max_new_tokens": 8, "max_model_len": 96}
    pipeline["trainer"] |= {"steps": 3, "samples_per_step": 16}
    pipeline["checkpoint"] = {"every": 100}
    return write(root, pipeline)


def turns_of(rollout: Rollout) -> list[list[int]]:
    """Places in the response of each turn of the policy."""
    origins = [span.origin == "environment" for span in rollout.spans for _ in range(span.length)]
    runs = groupby(range(len(origins)), key=origins.__getitem__)
    return [list(places) for observed, places in runs if not observed]


def largest_gap_by_turn(rollouts: list[Rollout], model_dir: str) -> dict[int, float]:
    """Turn -> largest |engine - transformers| log-prob of a token that the policy sampled."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    worst: dict[int, float] = {}
    for rollout in rollouts:
        ids = [*rollout.prompt_ids, *rollout.response_ids]
        with torch.no_grad():
            logprobs_T_V = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for turn, places in enumerate(turns_of(rollout)):
            for place in places:
                at = len(rollout.prompt_ids) + place
                gap = abs(float(logprobs_T_V[at - 1, ids[at]]) - rollout.behaviour_logprobs[place])
                worst[turn] = max(worst.get(turn, 0.0), gap)
    return worst


def test_a_merge_with_an_agent_domain(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    whole = tmp_path / "whole"
    done = opd("merge", agent_pipeline(tmp_path, pipeline), "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for record in records(whole):
        found = record["episodes"]["right-domain"]
        assert (found["episodes"], found["trained"], found["broken"]) == (8, 1.0, 0)
        assert found["turns"] > 1 and found["reward"] is not None and found["forks"] == found["lost_turns"] == 0
        assert set(found["stop_reasons"]) <= {"done", "turns", "tokens"} and "done" in found["stop_reasons"]
        assert record["domains"]["right-domain"]["tokens"] == found["tokens"]
        assert sum(turn["tokens"] for turn in found["by_turn"]) == found["tokens"] and len(found["by_turn"]) >= 3
        assert all(turn["logprob_gap"] < 1e-3 for turn in found["by_turn"])
        assert {d: s["samples"] for d, s in record["domains"].items()} == {"left-domain": 8, "right-domain": 8}
        assert record["logprob_gap"] < 1e-3 and record["probe_gap"] < 1e-3
    after = Evaluation.load(whole / "evaluation" / "after.json").scores["right-domain"]
    assert after.turns is not None and after.turns > 1 and after.failed == 0
    groups = json.loads((whole / "report.json").read_text())["by_length"]["right-domain"]
    assert [(group["fewest"], group["most"], group["questions"]) for group in groups] == [(1, 3, 2), (4, 7, 1)]
    assert [group["after"] for group in groups] == [part.accuracy for part in after.by_length]
    assert all(group["before"] is not None and group["expert"] is not None for group in groups)

    kept = RunPaths(whole).traces_by_step()
    assert list(kept) == [1, 2, 3]
    for trace in read_traces(kept[3]).episodes:
        wrote = [piece for segment in trace.segments for piece in segment.pieces if piece.origin == "policy"]
        assert wrote and all(len(piece.losses) == len(piece.texts) == piece.length for piece in wrote)


@pytest.mark.slow  # three starts; tests/integration/test_merge.py has a merge without agents
def test_a_merge_with_an_agent_domain_killed_and_resumed(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    file, student = agent_pipeline(tmp_path, pipeline), pipeline["student"]["model"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    kill_when_logged(file, broken, 2)
    vocabulary = AutoTokenizer.from_pretrained(student)
    logged = read_file((broken / "targets" / "step-000001" / "rollouts.arrow").read_bytes(), len(vocabulary))
    acted = [r for r in logged if r.domain == "right-domain"]
    assert len(acted) == 8 and max(len(turns_of(r)) for r in acted) >= 3
    gaps = largest_gap_by_turn(acted, student)
    assert set(gaps) >= {0, 1, 2} and max(gaps.values()) < 1e-3, gaps
    for rollout in acted:
        observed = [s for s in rollout.spans if s.origin == "environment"]
        assert len(observed) == len(turns_of(rollout)) - 1 and vocabulary.decode(rollout.prompt_ids).endswith("-")

    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert {1, 2} <= {r["step"] for r in records(broken) if "replayed" in r}
    assert [r["episodes"] for r in records(broken)] == [r["episodes"] for r in records(whole)]
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (whole, broken))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    kept, again = (RunPaths(run).traces_by_step() for run in (whole, broken))
    assert list(kept) == [1, 2, 3] and {s: f.read_text() for s, f in kept.items()} == {
        s: f.read_text() for s, f in again.items()
    }

    after = Evaluation.load(whole / "evaluation" / "after.json").scores["right-domain"]
    asked = opd("evaluate", whole, "--json", cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    (model,) = json.loads(asked.stdout)["models"].values()
    assert make_record(DomainScore, model["scores"]["right-domain"]).by_length == after.by_length


@pytest.mark.slow  # a merge; tests/unit/opd/rollouts/episodes has the budget
def test_a_broken_environment_stops_the_merge_by_name(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    file = agent_pipeline(tmp_path, pipeline)
    rows = [{"prompt": f"go {n}", "metadata": {"length": 9 if n < 4 else 1}} for n in range(8)]
    (tmp_path / "right.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = opd("merge", file, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "domain right-domain: 4 of 8 episodes broke (4 raised)" in done.stderr
    assert (
        "step: RuntimeError: the corridor fell in" in done.stderr
        and "max_broken of domains.right-domain is 0.1" in done.stderr
    )
