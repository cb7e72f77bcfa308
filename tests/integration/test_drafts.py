"""A merge whose engines guess with the draft that learns beside the student: what it leaves, and that it is killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from opd.files import blake3_file
from opd.machine.address import Address
from pipelines.after.models import find_model
from pipelines.after.serve import ServeOptions, server_command
from tests.integration.conftest import write_pipeline
from tests.integration.test_merge import kill_when_logged, records
from tests.integration.test_schedules import opd


def guess(pipeline: dict[str, Any]) -> None:
    pipeline["draft"] = {"lr": 3e-3, "loss": "end_to_end_tv"}
    pipeline["rollout"] |= {"num_speculative_tokens": 3, "max_new_tokens": 24}


def test_a_merge_leaves_the_draft_that_wrote_its_rollouts(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    guess(pipeline)
    pipeline["trainer"]["steps"] = 10
    opd("merge", write_pipeline(tmp_path, pipeline), "--run-dir", "run", cwd=tmp_path)
    drafts = [record["draft"] for record in records(tmp_path / "run")]
    for numbers in drafts:
        assert {"loss", "grad_norm", "accepted_length/left-domain", "engine_accepted_length/right-domain"} <= set(
            numbers
        )
        # The engine guessed with the very draft that the trainer judged, whose estimate is of a part of the same text.
        assert numbers["engine_accepted_length"] == pytest.approx(numbers["accepted_length"], abs=0.25)
    assert {"engine_tokens_s", "engine_plain_tokens_s"} <= set(drafts[9]) and "engine_tokens_s" not in drafts[8]
    model = find_model(tmp_path / "run", print)
    assert model.draft == tmp_path / "run" / "model" / "draft"
    # An exam of the run guesses with it, too, and of the base, which has none, without.
    opd(
        "evaluate",
        "run",
        pipeline["student"]["model"],
        "--pipeline",
        "run/pipeline.yaml",
        "--output",
        "exam.json",
        cwd=tmp_path,
    )
    merged, base = (
        model["scores"]["left-domain"] for model in json.loads((tmp_path / "exam.json").read_text())["models"].values()
    )
    assert merged["accepted_length"] > 1 and base["accepted_length"] is None
    options = ServeOptions(address=Address("127.0.0.1", 8000))
    command = server_command(model, options)
    settings = json.loads(command[command.index("--speculative-config") + 1])
    assert settings["model"] == str(model.draft) and settings["num_speculative_tokens"] == 3
    opd("export", "run", "--output", "copy", cwd=tmp_path)
    copied = load_file(tmp_path / "copy" / "draft" / "model.safetensors")
    assert copied.keys() == load_file(model.draft / "model.safetensors").keys()


@pytest.mark.slow
def test_killed_and_resumed_it_ends_with_the_same_student_and_draft(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    guess(pipeline)
    file = write_pipeline(tmp_path, pipeline)
    opd("merge", file, "--run-dir", "whole", cwd=tmp_path)
    kill_when_logged(file, tmp_path / "broken", 4)
    opd("merge", "--resume", "broken", cwd=tmp_path)
    whole, broken = (records(tmp_path / name) for name in ("whole", "broken"))
    assert [r["loss"] for r in broken] == [r["loss"] for r in whole]
    # A step that comes from the target log was written by no engine.
    assert [r["draft"]["loss"] for r in broken] == [r["draft"]["loss"] for r in whole]
    for file in ("model.safetensors", "draft/model.safetensors"):
        assert len({blake3_file(tmp_path / run / "model" / file) for run in ("whole", "broken")}) == 1
