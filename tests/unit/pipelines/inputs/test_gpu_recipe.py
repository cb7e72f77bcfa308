"""The recipes of docs/gpu.md: `opd check` accepts each on the machine that it is meant for, with the sums that the page shows."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cli import app
from opd.config import PipelineConfig, load_pipeline
from opd.settings.yaml_files import validate_section
from pipelines.catalog import PLANS, find_pipeline
from pipelines.check.described import check_on_cluster
from pipelines.plan.plan import MergePlan, make_plan
from pipelines.plan.spec import load_spec

PAGE = Path(__file__).parents[4] / "docs" / "gpu.md"
SPECS = {"one-card": "1-gpu-24gb", "one-gpu": "1-gpu-80gb", "eight": "8-gpus", "sixteen": "16-gpus"}
"""Recipe -> the machine that it is for."""
GIB = 1 << 30


def recipes() -> dict[str, dict[str, Any]]:
    """Whole pipelines on the page, by name; other blocks show a section."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return {block["name"]: block for block in map(yaml.safe_load, blocks) if "name" in block}


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with every recipe as a file, and what all of them name: the configurations of models, and prompts."""
    shipped = PLANS / "models"
    for name in ("base", "math", "code"):
        shutil.copytree(shipped / "qwen2.5-7b", tmp_path / "models" / name)
    lora = json.loads((shipped / "qwen2.5-7b-lora" / "adapter_config.json").read_text())
    for name in ("math-lora", "code-lora"):
        (tmp_path / "models" / name).mkdir()
        file = tmp_path / "models" / name / "adapter_config.json"
        file.write_text(json.dumps(lora | {"base_model_name_or_path": "models/base"}))
    (tmp_path / "prompts").mkdir()
    for name in ("math", "code"):
        (tmp_path / "prompts" / f"{name}.jsonl").write_text('{"prompt": "a question"}\n')
    for name, recipe in recipes().items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_whole_pipeline_of_the_page_is_for_a_machine() -> None:
    assert set(recipes()) == set(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_check_accepts_the_recipe_on_its_machine_with_the_sums_of_the_page(name: str, described: Path) -> None:
    accepted = CliRunner().invoke(app, ["check", f"{name}.yaml", "--cluster", SPECS[name]])
    assert accepted.exit_code == 0, accepted.output
    assert f"nothing is refused on {SPECS[name]}" in accepted.stderr
    (report,) = check_on_cluster(load_pipeline(described / f"{name}.yaml"), load_spec(SPECS[name]))
    gpu = ", ".join(f"{float(needed):.1f}" for _, _, needed, _ in report.gpus)
    host = round(sum(need.nbytes for need in report.memory) / GIB)
    there = f"{float(report.gpus[0][-1]):.1f}"
    row = f"| `{SPECS[name]}` | {gpu} | {there} | {host:,} of {report.machine.memory // GIB:,} |"
    assert row in PAGE.read_text(encoding="utf-8"), row


@pytest.mark.parametrize(
    ("name", "spec", "field"),
    [
        ("one-gpu", "1-gpu-24gb", "rollout.gpu_memory_utilization"),
        ("eight", "1-gpu-80gb", "memory"),
        ("sixteen", "8-gpus", "cluster"),
    ],
)
def test_on_a_smaller_machine_the_recipe_is_refused(name: str, spec: str, field: str, described: Path) -> None:
    refused = CliRunner().invoke(app, ["check", f"{name}.yaml", "--cluster", spec])
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {field}\n  found:") and "\n  wanted:" in refused.stderr
    assert "\n  fix:" in refused.stderr


def plan_on_one_card(**changes: Any) -> MergePlan:
    """Plan the recipe with a student of seven billion parameters and ten LoRA experts of it, on a card of 24 GB."""
    recipe, large = recipes()["one-card"], yaml.safe_load(find_pipeline("merge-7b").read_text(encoding="utf-8"))
    recipe["student"]["model"] = large["student"]["model"]
    recipe |= {key: large[key] for key in ("experts", "domains")}
    config = validate_section(PipelineConfig, recipe | {k: recipe[k] | v for k, v in changes.items()}, PAGE)
    return make_plan(config, load_spec("1-gpu-24gb").model_copy(update={"placement": None}))


def test_ten_lora_experts_fit_on_a_card_of_24_gb() -> None:
    made = plan_on_one_card()
    assert made.experts == 10 and made.fits


@pytest.mark.parametrize(
    "changes",
    [
        {"teachers": {"engine": "transformers"}, "cluster": {"rollout_gpus": 0.3, "teacher_gpus": 0.2}},
        {"trainer": {"deepspeed": {}}},
        {"rollout": {"sleep": False}},
    ],
    ids=["the base a second time", "the base on the card while the engine writes", "the engine beside the trainer"],
)
def test_each_part_of_the_recipe_is_needed(changes: dict[str, Any]) -> None:
    assert not plan_on_one_card(**changes).fits
