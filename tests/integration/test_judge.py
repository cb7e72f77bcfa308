"""A merge whose rewards and exams are a judge's numbers, through the real engines, killed and resumed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import write_pipeline
from tests.integration.test_merge import assert_the_same_merge, kill_when_logged, opd, records
from tests.listener import answer_posts

RUBRIC = "10: letters alone. 0: none. The word was {{ row.answer }}."
FIRST_TRY = 0.1
"""Share of the questions to which the judge gives no number when it is asked first."""


@pytest.mark.slow
def test_what_a_judge_said_stands_whatever_kills_the_merge(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    """The judge says something else whenever it is asked the same again, so both runs have the numbers of one only if a resume asks
    nothing twice."""
    asked: Counter[str] = Counter()
    first: dict[str, str] = {}

    def judge(path: str, headers: Mapping[str, str], request: Any) -> tuple[int, bytes]:
        system, question, *retry = request["messages"]
        assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
        assert "The word was" in system["content"] and "row.answer" not in system["content"]
        shown = json.loads(question["content"])
        key = json.dumps([request["messages"], phase])
        asked[key] += 1
        draw = random.Random(question["content"])
        letters = sum(map(str.isalpha, shown["response"])) / max(1, len(shown["response"]))
        score = 10 * letters if asked[key] == 1 else 10 * draw.random()
        content = "I cannot say." if not retry and draw.random() < FIRST_TRY else json.dumps({"score": score})
        first.setdefault(question["content"], content)
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        return 200, json.dumps({"model": "judge", "choices": [choice], "usage": usage}).encode()

    with answer_posts(judge) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPD_TEST_KEY", "secret")
        pipeline["domains"]["left-domain"]["eval"]["verifier"] = {
            "kind": "judge", "base_url": f"{url}/v1", "model": "judge", "api_key_env": "OPD_TEST_KEY", "rubric": RUBRIC,
            "range": [0, 10], "max_calls": 2000, "price": {"input": 1.0, "output": 2.0},
        }  # fmt: skip
        pipeline["domains"]["right-domain"]["reward"] = False
        pipeline["objective"] = {"reward": {"baseline": "leave_one_out"}}
        pipeline["rollout"] |= {"n": 4}
        pipeline["trainer"] |= {"samples_per_step": 32}
        file = write_pipeline(tmp_path, pipeline)
        whole, broken = tmp_path / "whole", tmp_path / "broken"
        phase = "whole"
        merged = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
        assert merged.returncode == 0, merged.stderr
        phase = "broken"
        kill_when_logged(file, broken, 4)
        resumed = opd("merge", "--resume", broken, cwd=tmp_path)
        assert resumed.returncode == 0 and "resumed from step" in resumed.stdout + resumed.stderr, resumed.stderr
    assert set(asked.values()) == {1}, "nothing is asked twice"
    assert "I cannot say." in first.values()
    assert_the_same_merge(whole, broken)
    steps = records(whole)
    assert [r["reward"]["domains"] for r in records(broken)] == [r["reward"]["domains"] for r in steps]
    for step in steps:
        assert 0 < step["reward"]["domains"]["left-domain"]["reward"] < 1
    for run in (whole, broken):
        (spent,) = json.loads((run / "report.json").read_text())["judges"].values()
        lines = [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines() if line]
        assert spent["calls"] == sum(line["attempts"] for line in lines) and not spent["failed"]
        assert spent["cost"] == pytest.approx(spent["calls"] * (100 + 20) / 1e6)
    exams = [json.loads((run / "evaluation" / "after.json").read_text())["scores"] for run in (whole, broken)]
    assert exams[0] == exams[1] and 0 < exams[0]["left-domain"]["accuracy"] < 1
