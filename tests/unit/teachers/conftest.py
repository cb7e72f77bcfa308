"""Things that tests of scorers and of the pool share: two teachers, one that is damaged, and the check of what they say."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd.config import PipelineConfig
from opd.records.types import Rollout, Teacher, WeightedTeacher
from pipelines.specs import pool_spec
from teachers.pool import Pool
from tests.rows import make_rollout

VOCABULARY = 76


def alone(teachers: dict[str, Teacher]) -> dict[str, tuple[WeightedTeacher, ...]]:
    """Each domain has one teacher."""
    return {domain: (WeightedTeacher(teacher=teacher, weight=1.0),) for domain, teacher in teachers.items()}


def start_pool(teachers: dict[str, Teacher], workers: int, *, first_worker: int = 0, **changes: Any) -> Pool:
    """A pool that may not be ready yet. `changes`: keys of the section `teachers`, and `objective`."""
    config = PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": "base"},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "trainer": {"steps": 1, "samples_per_step": 2},
            "objective": changes.pop("objective", {}),
            "teachers": {"workers": workers} | changes,
        }
    )
    return Pool(pool_spec(config, VOCABULARY, first_worker=first_worker), alone(teachers))


def rollout(i: int, domain: str = "reverse", prompt: int = 4, response: int = 5) -> Rollout:
    """Tokens that `i` decides."""
    rng = random.Random(i)
    return make_rollout(
        sample_id=f"000001/{domain}/{i}", step=1, domain=domain, policy_version=0,
        prompt_ids=tuple(rng.choices(range(76), k=prompt)), response_ids=tuple(rng.choices(range(76), k=response)),
        behaviour_logprobs=(-1.0,) * response,
    )  # fmt: skip


@pytest.fixture
def teachers(expert_dirs: dict[str, Path]) -> dict[str, Teacher]:
    """By domain."""
    names = {"reverse": "rev", "upper": "up"}
    return {d: Teacher(name=n, model_dir=expert_dirs[n]) for d, n in names.items()}


@torch.no_grad()
def _check_rows(rows: Sequence[Any], heads: dict[str, torch.Tensor], dirs: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    models = {n: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for n, path in dirs.items()}
    for row in rows:
        ids = [*row.rollout.prompt_ids, *row.rollout.response_ids]
        logits = models[row.teacher](input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        want = logits.log_softmax(-1)[len(row.rollout.prompt_ids) - 1 : -1][list(row.rollout.trained_positions)]
        states = torch.frombuffer(bytearray(row.answer.hidden), dtype=torch.float32).view(-1, row.answer.hidden_size)
        found = (states @ heads[row.answer.head].T).log_softmax(-1)
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def _damaged(teacher: Teacher, tmp_path: Path, name: str, row: int, *, tie: bool = True) -> Teacher:
    path = Path(shutil.copytree(teacher.model_dir, tmp_path / "broken"))
    state = load_file(path / "model.safetensors")
    if not tie:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state[name][row] = torch.nan
    save_file(state, path / "model.safetensors", {"format": "pt"})
    return Teacher(name="bad", model_dir=path)


@pytest.fixture(scope="session")
def check_rows() -> Callable[..., None]:
    """check_rows(rows, heads, dirs): each row's states times its head give what transformers gives for the sequence
    alone; heads by key, model directories by teacher."""
    return _check_rows


@pytest.fixture(scope="session")
def damaged() -> Callable[..., Teacher]:
    """damaged(teacher, tmp_path, name, row, *, tie): a copy of the teacher with NaN in one row of tensor `name`."""
    return _damaged
