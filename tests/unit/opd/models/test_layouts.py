"""Sequences of one forward pass: each layout is what it says, and what lets neighbours in is found and left."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.errors import RunError
from opd.models.layouts import (
    LAYOUTS,
    Packed,
    find_positions_before,
    lay_out_single,
    layout_error,
    measure_layout_differences,
    prove_layout,
)

VOCABULARY = 64
SEQUENCES = [random.Random(n).choices(range(VOCABULARY), k=n) for n in (5, 61, 1, 90, 17)]
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
LINEAR = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")} | {
    f"linear_{kind}_head_dim": 32 for kind in ("key", "value")
}
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (SHAPE, "packed"),
    "mistral": (SHAPE | {"sliding_window": 8}, "packed"),
    "qwen3_moe": (SHAPE | MOE, "packed"),
    "gpt2": ({"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256}, "packed"),
    "opt": (SHAPE | {"ffn_dim": 128, "word_embed_proj_dim": 64}, "padded"),
    "falcon": (SHAPE | {"alibi": True, "new_decoder_architecture": False}, "padded"),
    "lfm2": (SHAPE | {"layer_types": ["conv", "full_attention"]}, "padded"),
    "qwen3_next": (SHAPE | MOE | LINEAR | {"shared_expert_intermediate_size": 32}, "padded"),
    "bamba": (SHAPE | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_expand": 2}, "padded"),
}


def body(family: str, dtype: torch.dtype = torch.float32) -> Callable[[Packed], Tensor]:
    """A tiny model of random weights, spread as widely as those of a trained one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **FAMILIES[family][0], initializer_range=0.1)
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    return lambda packed: model.base_model(**packed.inputs()).last_hidden_state.flatten(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_lie_where_the_offsets_say(layout: str) -> None:
    laid_out = LAYOUTS[layout](SEQUENCES)
    assert laid_out.position_ids_B_T is not None
    for ids, offset in zip(SEQUENCES, laid_out.offsets, strict=True):
        assert laid_out.input_ids_B_T.flatten()[offset : offset + len(ids)].tolist() == ids
        assert laid_out.position_ids_B_T.flatten()[offset : offset + len(ids)].tolist() == list(range(len(ids)))
        assert offset // laid_out.input_ids_B_T.shape[1] == (offset + len(ids) - 1) // laid_out.input_ids_B_T.shape[1]
    spans = [(1, len(ids)) for ids in SEQUENCES]
    read = laid_out.input_ids_B_T.flatten()[find_positions_before(laid_out, spans)]
    assert read.tolist() == [t for ids in SEQUENCES for t in ids[:-1]]


def test_what_tells_sequences_apart() -> None:
    padded, indexed = LAYOUTS["padded"](SEQUENCES), LAYOUTS["packed_indexed"](SEQUENCES)
    assert padded.mask_B_T is not None and indexed.cu_seq_lens is not None and indexed.seq_idx_B_T is not None
    assert padded.mask_B_T.sum(1).tolist() == [len(ids) for ids in SEQUENCES]
    assert indexed.cu_seq_lens.diff().tolist() == [len(ids) for ids in SEQUENCES]
    assert indexed.seq_idx_B_T[0].bincount().tolist() == [len(ids) for ids in SEQUENCES]
    assert set(LAYOUTS["packed"](SEQUENCES).inputs()) == {"input_ids", "position_ids", "use_cache"}
    assert set(lay_out_single(SEQUENCES[0]).inputs()) == {"input_ids", "use_cache"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gets_the_fastest_layout_that_is_right_for_it(family: str, dtype: torch.dtype) -> None:
    states = body(family, dtype)
    proof = prove_layout(lambda layout: layout_error(states, layout, VOCABULARY, dtype), family)
    assert proof.layout == FAMILIES[family][1]
    assert [layout for layout, error in proof.tried.items() if error <= 1] == [proof.layout]
    alone, neighbour = measure_layout_differences(states, proof.layout, VOCABULARY)
    assert neighbour == 0
    assert alone <= (1e-5 if dtype == torch.float32 else 0.02)


def attention(packed: Packed, *, leak: float = 0.0, wrong_positions: bool = False, noise: float = 0.0) -> Tensor:
    """[B*T, 1] a causal mean over the own sequence, and what it lets in of its neighbours or of its place in the row."""
    ids, rows = packed.input_ids_B_T.double(), []
    positions = packed.position_ids_B_T
    for row in range(len(ids)):
        place = torch.arange(ids.shape[1]) if positions is None else positions[row]
        number = (place == 0).cumsum(0)
        own = (number[:, None] == number[None]) & (torch.arange(len(place))[:, None] >= torch.arange(len(place)))
        told = torch.arange(ids.shape[1]) if wrong_positions else place
        states = (own * ids[row]).sum(1) / own.sum(1) + told + leak * ids[row].cumsum(0)
        rows.append(states + noise * torch.randn(len(states), dtype=torch.float64))
    return torch.stack(rows).flatten()[:, None]


def test_a_leak_too_small_for_rounding_is_found_by_other_neighbours() -> None:
    assert layout_error(attention, "packed", VOCABULARY, torch.bfloat16) <= 1
    alone, neighbour = measure_layout_differences(lambda p: attention(p, leak=1e-4), "packed", VOCABULARY)
    assert alone < 0.1 and 1e-4 < neighbour < 1e-2
    assert layout_error(lambda p: attention(p, leak=1e-4), "packed", VOCABULARY, torch.bfloat16) > 1
    assert layout_error(lambda p: attention(p, leak=1e-4), "padded", VOCABULARY, torch.bfloat16) <= 1


def test_positions_that_go_on_are_found_although_no_neighbour_is_seen() -> None:
    alone, neighbour = measure_layout_differences(lambda p: attention(p, wrong_positions=True), "packed", VOCABULARY)
    assert alone > 0.1 and neighbour == 0
    assert layout_error(lambda p: attention(p, wrong_positions=True), "packed", VOCABULARY, torch.bfloat16) > 1


def test_a_model_without_a_right_layout_is_refused() -> None:
    with pytest.raises(RunError, match=r"^teacher t: sequences of one forward pass see each other in every layout"):
        prove_layout(
            lambda layout: layout_error(lambda p: attention(p, noise=9.0), layout, VOCABULARY, torch.float32),
            "teacher t",
        )


def test_states_that_are_not_finite_prove_nothing_and_get_the_safe_layout() -> None:
    def broken(packed: Packed) -> Tensor:
        return attention(packed) * torch.nan

    proof = prove_layout(lambda layout: layout_error(broken, layout, VOCABULARY, torch.float32), "teacher t")
    assert (proof.layout, proof.proven) == ("padded", False)
    assert math.isnan(proof.tried["packed"])
