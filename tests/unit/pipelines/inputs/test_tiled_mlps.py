"""MLPs in tiles: settings and students for which they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig

from opd.config import load_pipeline
from opd.errors import ConfigError
from pipelines.inputs.read import read_inputs
from pipelines.inputs.tiled_mlps import refuse_tiled_mlps
from tests.unit.pipelines.inputs.test_shared_rows import SIZES, model, pipeline

TILED = {"sequence_parallel_size": 1, "mlp_tile_tokens": 512}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def test_linear_modules_are_taken_and_a_mixture_is_refused_if_there_are_tiles(tmp_path: Path) -> None:
    refuse_tiled_mlps(pipeline(trainer=TILED), model(tmp_path / "llama", LlamaConfig(**SIZES, **HEADS)))
    mixture = model(tmp_path / "mixtral", MixtralConfig(**SIZES, **HEADS, num_local_experts=2))
    refuse_tiled_mlps(pipeline(trainer={"sequence_parallel_size": 1}), mixture)
    with pytest.raises(ConfigError) as refused:
        refuse_tiled_mlps(pipeline(trainer=TILED), mixture)
    assert "trainer.mlp_tile_tokens" in str(refused.value) and "512 with MixtralSparseMoeBlock" in str(refused.value)


def test_compiled_layers_are_refused(tmp_path: Path) -> None:
    lm: Any = model(tmp_path, LlamaConfig(**SIZES, **HEADS))
    with pytest.raises(ConfigError, match=r"512 with trainer\.compile"):
        refuse_tiled_mlps(pipeline(trainer=TILED | {"compile": True}), lm)


def test_a_merge_reads_that_it_is_refused(world: Any) -> None:
    world.data["trainer"] |= {"mlp_tile_tokens": 512, "compile": True}
    with pytest.raises(ConfigError, match=r"trainer\.mlp_tile_tokens"):
        read_inputs(load_pipeline(world.write()))


def test_what_is_not_recomputed_is_not_moved() -> None:
    with pytest.raises(ConfigError, match=r"true without trainer\.gradient_checkpointing"):
        pipeline(trainer={"sequence_parallel_size": 1, "activation_offloading": True})
