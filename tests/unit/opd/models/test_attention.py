"""The attention that trainer and scorers run is the one that the architecture has."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from opd.models.weights import choose_attention
from tests.models.check import alone, gap, load, sequences
from tests.models.families import FAMILIES, build_models


def test_a_bound_on_attention_scores_is_not_left_out(tmp_path: Path) -> None:
    directory = build_models(FAMILIES["Gemma 2"], tmp_path)["student"]
    wanted = alone(load(directory), sequences(76), 76)
    kind = choose_attention(load(directory).config)
    ours = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=kind).eval()
    assert gap(alone(ours, sequences(76), 76), wanted) < 1e-5


def test_the_fast_kernel_runs_where_it_is_right() -> None:
    from tests.models.families import build_config

    kinds = {name: choose_attention(build_config(family)) for name, family in FAMILIES.items()}
    assert {name for name, kind in kinds.items() if kind != "sdpa"} == {"Gemma 2", "gpt-oss"}
