"""The merges that `opd plan` is compared with: settings, and pipelines that are ready to run in them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAUGHT = ("word_reversal", "needle", "rotation")
"""Domains of smollm2 that take part, each with an expert."""
CHANGED = 1e-3
"""Distance of an expert of smollm2 from the student, as a share of each weight's standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One merge of a pipeline."""

    name: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline in several settings."""

    settings: tuple[Setting, ...]
    always: tuple[str, ...] = ()
    warm_up: int = 2
    """First steps of a merge, which do not count."""
    steps: int = 6
    """Steps that do."""


def _small(changes: tuple[str, ...], name: str) -> Setting:
    return Setting(name=f"tiny, {name}", changes=changes)


CASES = {
    "quickstart": Case(
        always=("schedule.mode=sync",),
        settings=(
            Setting(name="quickstart, two ranks"),
            Setting(name="quickstart, one step off", changes=("trainer.ranks=1", "schedule.mode=one_step_off")),
            Setting(
                name="quickstart, two engines and two scorers",
                changes=("trainer.ranks=1", "rollout.workers=2", "teachers.workers=2"),
            ),
            Setting(
                name="quickstart, 80 samples, four to a prompt",
                changes=("trainer.ranks=1", "trainer.samples_per_step=80", "rollout.n=4"),
            ),
        ),
    ),
    "smollm2": Case(
        always=(
            "rollout.dtype=float32",
            "teachers.dtype=float32",
            "trainer.dtype=float32",
            "trainer.ranks=1",
            "trainer.samples_per_step=12",
            "trainer.micro_batch_tokens=512",
            "rollout.max_new_tokens=16",
            "rollout.max_model_len=160",
        ),
        warm_up=1,
        steps=3,
        settings=(
            Setting(name="smollm2, 12 samples"),
            Setting(
                name="smollm2, 24 samples, four to a prompt, over the network",
                changes=("trainer.samples_per_step=24", "rollout.n=4", "sync.kind=network"),
            ),
            Setting(name="smollm2, an adapter", changes=("student.lora.r=16", "student.lora.alpha=32")),
            Setting(
                name="smollm2, 48 tokens, activations computed again",
                changes=(
                    "rollout.max_new_tokens=48",
                    "trainer.samples_per_step=9",
                    "trainer.gradient_checkpointing=true",
                ),
            ),
        ),
    ),
    "tiny-ten": Case(
        settings=(_small(("rollout.max_new_tokens=8", "trainer.samples_per_step=128"), "128 x 8, ten experts"),),
    ),
    "tiny": Case(
        settings=(
            _small(("rollout.max_new_tokens=8", "trainer.samples_per_step=4"), "4 x 8"),
            _small(("rollout.max_new_tokens=8", "trainer.samples_per_step=128"), "128 x 8"),
            _small(("rollout.max_new_tokens=32", "trainer.samples_per_step=4"), "4 x 32"),
            _small(
                ("rollout.max_new_tokens=8", "trainer.samples_per_step=128", "trainer.micro_batch_tokens=256"),
                "128 x 8, 8 micro-batches",
            ),
            _small(
                ("rollout.max_new_tokens=8", "trainer.samples_per_step=128", "trainer.ranks=2"), "128 x 8, two ranks"
            ),
            _small(("rollout.max_new_tokens=32", "trainer.samples_per_step=128"), "128 x 32"),
        ),
    ),
}
"""Pipeline -> the merges of it."""
TINY_EXPERTS = {"tiny": 2, "tiny-ten": 10}
"""The pipelines that overheads come from, and their experts."""


def prepared(pipeline: str, folder: Path) -> Path:
    """The pipeline's file in `folder`; with smollm2, experts are made there."""
    import yaml

    if pipeline in TINY_EXPERTS:
        return _tiny(folder, TINY_EXPERTS[pipeline])
    if pipeline == "smollm2":
        _make_experts(folder)
    file = folder / f"plan-{pipeline}.yaml"
    file.write_text(yaml.safe_dump(without_exams(pipeline), sort_keys=False), encoding="utf-8")
    return file


def without_exams(pipeline: str) -> dict[str, Any]:
    """A shipped pipeline without exams, which no plan counts; smollm2 with three experts."""
    import yaml

    from pipelines.catalog import find_pipeline

    data: dict[str, Any] = yaml.safe_load(find_pipeline(pipeline).read_text(encoding="utf-8"))
    data["domains"] = {name: {k: v for k, v in one.items() if k != "eval"} for name, one in data["domains"].items()}
    if pipeline == "smollm2":
        data["domains"] = {name: {"prompts": data["domains"][name]["prompts"]} for name in TAUGHT}
        data["experts"] = {name: {"model": f"models/smollm2-changed/{name}", "domain": name} for name in TAUGHT}
        del data["registry"]
    return data


def _make_experts(folder: Path) -> None:
    """Experts in float32 that are the student with slightly changed weights: what they know costs no time."""
    import torch
    from safetensors.torch import load_file, save_file

    student = folder / "models/smollm2"
    for seed, name in enumerate(TAUGHT):
        expert = folder / "models/smollm2-changed" / name
        if (expert / "model.safetensors").is_file():
            continue
        expert.mkdir(parents=True, exist_ok=True)
        for file in student.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copy(file, expert / file.name)
        draw = torch.Generator().manual_seed(seed)
        changed = {}
        for key, value in load_file(student / "model.safetensors").items():
            weight = value.float()
            changed[key] = weight + CHANGED * weight.std() * torch.randn(weight.shape, generator=draw)
        save_file(changed, expert / "model.tmp", metadata={"format": "pt"})
        (expert / "model.tmp").rename(expert / "model.safetensors")


def _tiny(folder: Path, count: int) -> Path:
    """A pipeline of a tiny model of random weights and so many experts, whose work is nothing beside its overheads."""
    import yaml

    from benchmarks.merging.inputs import Order

    order = Order(
        folder=str(folder), model_dir=None, tiny=True, dtypes=["float32"], experts=count, prompts=600, prompt_tokens=8
    )
    command = [sys.executable, "-m", "benchmarks.merging.inputs", order.to_json()]
    subprocess.run(command, check=True, timeout=600, cwd=ROOT)
    experts = {f"e{i}": {"model": f"float32/expert-{i:02}", "domain": f"d{i}"} for i in range(count)}
    data = {
        "name": "tiny",
        "student": {"model": "float32/student"},
        "experts": experts,
        "domains": {f"d{i}": {"prompts": f"prompts/domain-{i:02}.jsonl"} for i in range(count)},
        "rollout": {"max_model_len": 64},
        "trainer": {"ranks": 1, "steps": 1, "samples_per_step": 4},
    }
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def shapes(folder: Path) -> None:
    """Configs of the models that are made for a comparison, where a plan of recorded merges looks for them."""
    from benchmarks.merging.inputs import SMOLLM2, TINY

    models = {
        f"float32/{name}": TINY for name in ("student", *(f"expert-{i:02}" for i in range(max(TINY_EXPERTS.values()))))
    }
    models |= {f"models/smollm2-changed/{name}": SMOLLM2 for name in TAUGHT}
    for place, shape in models.items():
        (folder / place).mkdir(parents=True)
        config = json.dumps({"model_type": "llama", "tie_word_embeddings": True, **shape})
        (folder / place / "config.json").write_text(config)
