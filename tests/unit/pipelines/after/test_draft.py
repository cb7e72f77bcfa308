"""Texts that a draft learns from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cli import app
from pipelines.after.draft import split_texts
from tests.rows import make_rollout


def test_texts_to_one_prompt_stay_together() -> None:
    rollouts = [
        make_rollout(sample_id=f"{i}", step=1, domain="d", prompt_ids=(i // 2,), response_ids=(1, 2)) for i in range(40)
    ]
    learned, held_out = split_texts(rollouts, 0.1, 0)
    assert len(held_out) == 4 and len(learned) == 36
    assert not {r.prompt_ids for r in held_out} & {r.prompt_ids for r in learned}
    assert [r.sample_id for r in learned] != sorted((r.sample_id for r in learned), key=int), "domains are mixed"


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["draft", "train", *map(str, words)])


def test_a_model_without_a_run_needs_a_pipeline(tiny_model_dir: Path) -> None:
    done = run(tiny_model_dir)
    assert done.exit_code == 2 and "--pipeline" in done.output


def test_what_cannot_have_a_draft_is_refused_before_anything_starts(
    world: Any, make_model_dir: Any, tmp_path: Path
) -> None:
    model = make_model_dir(tmp_path / "model")
    (tmp_path / "there").mkdir()
    done = run(model, "--pipeline", world.write(), "--output", tmp_path / "there")
    assert done.exit_code == 2 and "something that exists" in done.output
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]})
    )
    done = run(model, "--pipeline", world.write())
    assert done.exit_code == 2 and "olmo2" in done.output
