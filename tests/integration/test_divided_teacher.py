"""Teachers in parts, in real scoring workers: the scores are bit for bit those of whole teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd import cluster
from opd.config import PipelineConfig
from opd.config.sections import ClusterConfig
from opd.errors import RunError
from opd.records.types import Teacher, WeightedTeacher
from pipelines.specs import pool_spec
from teachers.pool import Pool
from tests.integration.parts import VOCABULARY, config, rollouts, stop
from tests.unit.conftest import build_adapter
from tests.unit.teachers.test_divided_scoring import HALF, LAYERS

RowsOf = Callable[[Any], Sequence[Any]]


@pytest.fixture
def experts(tmp_path: Path, make_model_dir: Callable[..., Path]) -> dict[str, Teacher]:
    """A full expert and a LoRA expert on another model."""
    full, base = (
        make_model_dir(tmp_path / name, seed=seed, layers=LAYERS) for seed, name in enumerate(("full", "base"), start=1)
    )
    adapter = build_adapter(tmp_path / "adapter", base)
    return {
        "left": Teacher(name="full", model_dir=full),
        "right": Teacher(name="lora", model_dir=base, adapter_dir=adapter),
    }


def divided(cfg: PipelineConfig, gpus: float, max_memory: Mapping[int | str, int] | None) -> PipelineConfig:
    data = cfg.model_dump()
    data["cluster"]["teacher_gpus"] = gpus
    if max_memory is not None:
        data["teachers"] |= {"device_map": "auto", "max_memory": max_memory}
    return PipelineConfig.model_validate(data)


def answers(cfg: PipelineConfig, experts: Mapping[str, Teacher], rows_of: RowsOf) -> dict[str, Any]:
    """Sample id -> what its teacher says, twice: teachers take turns in one worker."""
    pool = Pool(pool_spec(cfg, VOCABULARY), {d: (WeightedTeacher(teacher=t, weight=1.0),) for d, t in experts.items()})
    try:
        pool.wait_ready()
        rows = [row for seed in (0, 1) for row in rows_of(pool.score(rollouts(seed=seed)))]
        assert {row.teacher for row in rows} == {"full", "lora"}
        return {f"{i}:{row.rollout.sample_id}": row.answer for i, row in enumerate(rows)}
    finally:
        stop(pool)


@pytest.mark.parametrize("payload", ["hidden_states", pytest.param("sampled_logprobs", marks=pytest.mark.slow)])
def test_layers_on_disk_change_no_bit(
    payload: str, experts: dict[str, Teacher], tmp_path: Path, rows_of: RowsOf
) -> None:
    kind = {"hidden_states": "reverse_kl", "sampled_logprobs": "sampled"}[payload]
    cfg = config(experts["left"].model_dir, payload=payload, objective={"kind": kind})
    size = sum(tensor.nbytes for tensor in load_file(experts["left"].model_dir / "model.safetensors").values())
    with cluster.ray_session(ClusterConfig(), 2):
        # Without the disk there is no room: so with it, it is used.
        with pytest.raises(RunError, match=r"no room for .*; raise teachers\.max_memory"):
            answers(divided(cfg, 0, {"cpu": int(HALF * size)}), experts, rows_of)
        parts = answers(divided(cfg, 0, {"cpu": int(HALF * size), "disk": size}), experts, rows_of)
        assert parts == answers(divided(cfg, 0, None), experts, rows_of)


@pytest.mark.gpu
@pytest.mark.parametrize("others", ["cpu", "disk", "GPU"])
def test_layers_on_another_device_change_no_bit(others: str, experts: dict[str, Teacher], rows_of: RowsOf) -> None:
    needed = 2 if others == "GPU" else 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"{needed} GPUs are needed")
    cfg = config(experts["left"].model_dir)
    size = sum(tensor.nbytes for tensor in load_file(experts["left"].model_dir / "model.safetensors").values())
    ways: dict[str, dict[int | str, int]] = {"GPU": {0: 2 * size, 1: 2 * size}}
    max_memory = ways.get(others, {0: int(HALF * size), others: 2 * size})
    with cluster.ray_session(ClusterConfig(), 2):
        parts = answers(divided(cfg, needed, max_memory), experts, rows_of)
        assert parts == answers(divided(cfg, 1, None), experts, rows_of)
