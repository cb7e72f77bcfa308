"""The merged model's README, and its words about the experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from opd.config import load_pipeline
from pipelines.inputs.read import read_inputs
from pipelines.merging.card import model_card


def digest(file: Path) -> str:
    return blake3(file.read_bytes()).hexdigest()[:16]


def test_an_adapter_is_shown_by_its_own_hash_and_its_base(world: Any, make_adapter: Callable[..., Path]) -> None:
    adapter = make_adapter(world.root / "adapter", world.root / "base")
    world.data["experts"]["rev"]["model"] = "adapter"
    pipeline = load_pipeline(world.write())
    rows = [line for line in model_card(pipeline, read_inputs(pipeline)).splitlines() if line.startswith("| ")]
    own, base, up = (digest(p) for p in (adapter / "adapter_model.safetensors", *models(world, "base", "up")))
    assert rows[1:] == [f"| reverse | rev | LoRA `{own}` on `base` `{base}` |", f"| upper | up | `{up}` |"]


def models(world: Any, *names: str) -> list[Path]:
    return [world.root / name / "model.safetensors" for name in names]


def test_a_lora_student_is_said_to_be_one(world: Any) -> None:
    assert "LoRA" not in card(world)
    world.data["student"]["lora"] = {"r": 4, "targets": ["q_proj"]}
    assert "- LoRA: 1,024 parameters, rank 4, alpha 32\n" in card(world)


def card(world: Any) -> str:
    pipeline = load_pipeline(world.write())
    return model_card(pipeline, read_inputs(pipeline))


def test_what_lies_beyond_the_experts_is_said(world: Any) -> None:
    assert "beyond" not in card(world)
    world.data["domains"]["upper"]["extrapolate"] = 1.25
    found = card(world)
    assert "- Extrapolated beyond the experts, away from the student as it was: upper 1.25\n" in found
    assert "start student" not in found, "the table is about experts"


def test_licences_are_those_of_the_models_own_directories(world: Any, make_adapter: Callable[..., Path]) -> None:
    make_adapter(world.root / "adapter", world.root / "rev")
    world.data["experts"]["up"]["model"] = "adapter"
    world.data["experts"]["rev"]["model"] = "up"
    for name in ("base", "rev", "up", "adapter"):
        (world.root / name / "README.md").write_text("---\nlicense: mit\n---\n")
    assert "license: mit\n" in card(world).partition("\n---")[0] and "Before you pass" not in card(world)
    (world.root / "rev" / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    (world.root / "up" / "README.md").unlink()
    found = card(world)
    assert "license:" not in found.partition("\n---")[0]
    assert "- the base `rev`: cc-by-nc-4.0 (README.md)\n" in found and "- the expert `rev`: none found\n" in found
    assert "- the base `rev`: cc-by-nc-4.0 does not allow commercial use\n" in found


def test_results_lineage_and_commands_are_there_once_they_are_known(world: Any) -> None:
    pipeline = load_pipeline(world.write())
    event = {"event": "extended", "after_step": 2, "steps": [2, 5], "lr_scheduler_type": "constant", "command": "opd x"}
    report = {"domains": {"upper": {"before": 0.1, "expert": 0.9, "after": 0.5, "headroom": 0.5}}, "mean_headroom": 0.5}
    found = model_card(pipeline, read_inputs(pipeline), {"command": "opd merge a.yaml", "lineage": [event]}, report)
    assert "| upper | 0.10 | 0.90 | 0.50 | 50 % |" in found
    assert (
        "    opd merge a.yaml\n    opd x\n" in found and "- Lineage: extended after step 2 from 2 to 5 steps\n" in found
    )
