"""Rows of several sequences without a mask: the kernel is torch's on a GPU, and stood in for here."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from opd.machine.devices import to_device
from opd.models import layouts, varlen
from opd.models.layouts import (
    LAYOUTS,
    PACKED_VARLEN,
    Packed,
    lay_out_single,
    layout_error,
    list_candidate_layouts,
    measure_layout_differences,
    prove_layout,
)
from opd.models.packing import SHARED
from opd.models.weights import choose_attention, obeys_masks, takes_lengths
from opd.records.types import LayoutProof
from pipelines.merging.layouts import _layout_lines
from tests.models.families import FAMILIES, build_config

VOCABULARY = 76
SEQUENCES = [[(7 * i + n) % VOCABULARY for i in range(n)] for n in (40, 13, 70)]
CUDA = torch.device("cuda")
FULL_ATTENTION = ["Llama", "Qwen2", "Qwen3-MoE", "OLMo2", "GPT-NeoX"]


def attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """Compute what the kernel computes, a sequence at a time."""
    assert starts.dtype == torch.int32 and int(starts.diff().max()) == longest
    parts = [
        nn.functional.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], is_causal=True, scale=scaling, enable_gqa=True
        )
        for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with the kernel; it takes any type here."""
    monkeypatch.setattr("opd.models.weights.has_varlen_kernel", lambda device, dtype: True)
    monkeypatch.setattr(varlen, "_attend_within", attend_one_by_one)
    monkeypatch.setattr(varlen, "KERNEL_TYPES", (torch.bfloat16, torch.float32, torch.float64))


def build_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    config = build_config(FAMILIES[family])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind = choose_attention(config, CUDA, dtype)
        return AutoModelForCausalLM.from_config(config, attn_implementation=kind).to(dtype).eval()


def body_of(lm: Any) -> Callable[[Packed], Tensor]:
    return lambda packed: lm.base_model(**packed.inputs(lm.dtype)).last_hidden_state.flatten(0, 1)


def prove(lm: Any, *, share: bool = False) -> LayoutProof:
    error = functools.partial(
        layout_error, body_of(lm), vocab_size=VOCABULARY, dtype=lm.dtype,
        masks_decide=obeys_masks(lm), lengths_decide=takes_lengths(lm),
    )  # fmt: skip
    return prove_layout(lambda layout: error(layout), "m", share=share, varlen=True)


class SquareTensors(TorchDispatchMode):
    """Keeps the shapes of all tensors with a number for each pair of columns."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []
        self._columns = columns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.shape[-2:] == (self._columns, self._columns):
            self.shapes.append(made.shape)
        return made


# The proof


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_full_attention_gets_rows_without_a_mask_within_the_old_bounds(
    family: str, dtype: torch.dtype, kernel: None
) -> None:
    lm = build_model(family, dtype)
    assert takes_lengths(lm)
    assert prove(lm).layout == PACKED_VARLEN
    alone, neighbour = measure_layout_differences(body_of(lm), PACKED_VARLEN, VOCABULARY)
    assert neighbour == 0
    assert alone <= (1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("family", ["Mistral", "Gemma 2", "Gemma 3", "gpt-oss", "LFM2", "Qwen3-Next"])
def test_windows_and_other_layers_keep_their_attention_and_their_layouts(family: str, kernel: None) -> None:
    lm = build_model(family)
    assert not takes_lengths(lm)
    proof = prove(lm)
    assert proof.tried[PACKED_VARLEN] == math.inf and proof.layout in ("packed", "packed_indexed", "padded")
    assert not any(PACKED_VARLEN in line for line in _layout_lines("the student", proof))


@pytest.mark.parametrize("broken", ["lengths do not arrive", "the kernel does not take them"])
def test_attention_that_does_not_go_by_the_lengths_is_found(
    broken: str, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = build_model("Llama")
    if broken == "lengths do not arrive":
        whole = layouts.lay_out_packed_varlen

        def without(sequences: Any) -> Packed:
            laid_out = whole(sequences)
            return dataclasses.replace(laid_out, cu_seq_lens=None, seq_idx_B_T=None)

        monkeypatch.setitem(layouts.LAYOUTS, PACKED_VARLEN, without)
    else:
        monkeypatch.setattr(varlen, "KERNEL_TYPES", (torch.bfloat16,))
    proof = prove(lm)
    assert proof.tried[PACKED_VARLEN] > 10 and proof.layout == "packed"
    (line,) = _layout_lines("the student", proof)
    assert "(packed_varlen: " in line and "the layout is packed" in line


def test_it_is_tried_on_gpus_only_and_after_trees() -> None:
    assert PACKED_VARLEN not in list_candidate_layouts(share=True)
    assert list_candidate_layouts(share=True, varlen=True)[:3] == (SHARED, PACKED_VARLEN, "packed")


def test_without_a_gpu_the_attention_is_what_it_was() -> None:
    config = build_config(FAMILIES["Llama"])
    for device in (None, torch.device("cpu")):
        assert choose_attention(config, device, torch.bfloat16) == "sdpa"
    assert not varlen.has_varlen_kernel(torch.device("cpu"), torch.bfloat16)
    assert not varlen.has_varlen_kernel(CUDA, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_the_kernel_itself_keeps_sequences_apart(family: str) -> None:
    if not varlen.has_varlen_kernel(CUDA, torch.bfloat16):
        pytest.skip("this card or this torch lacks the kernel")
    lm = build_model(family, torch.bfloat16).to(CUDA)
    error = layout_error(lambda packed: body_of(lm)(to_device(packed, CUDA)), PACKED_VARLEN, VOCABULARY, torch.bfloat16)
    assert error <= 1


# Masks


@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_no_mask_of_all_pairs_of_columns_is_made(family: str, kernel: None) -> None:
    lm = build_model(family)
    for layout, expects_mask in ((PACKED_VARLEN, False), ("packed_indexed", True)):
        packed = LAYOUTS[layout](SEQUENCES)
        with SquareTensors(packed.input_ids_B_T.shape[1]) as squares:
            body_of(lm)(packed)
        assert bool(squares.shapes) == expects_mask, layout


def test_one_sequence_and_rows_with_a_mask_are_computed_as_by_sdpa(kernel: None) -> None:
    lm, plain = build_model("Llama"), build_model("Llama")
    plain.set_attn_implementation("sdpa")
    cases = [lay_out_single(SEQUENCES[0]), *(LAYOUTS[name](SEQUENCES) for name in ("shared", "packed", "padded"))]
    for packed in cases:
        assert torch.equal(body_of(lm)(packed), body_of(plain)(packed))


@pytest.mark.parametrize("key_heads", [1, 4])
def test_torchs_kernel_takes_what_it_is_given(key_heads: int) -> None:
    """On torch's device for shapes, where nothing is computed."""
    query, key, value = (torch.empty(1, heads, 16, 64, device="meta") for heads in (4, key_heads, key_heads))
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    assert varlen._attend_within(query, key, value, starts, 11, 0.125).shape == (1, 16, 4, 64)


def test_what_is_put_around_sdpa_is_around_these_calls_too(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks do that share rows."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[torch.Size] = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(module: Any, query: Tensor, *args: Any, **options: Any) -> Any:
        calls.append(query.shape)
        return sdpa(module, query, *args, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", watched)
    lm = build_model("Llama")
    body_of(lm)(LAYOUTS["padded"](SEQUENCES))
    assert len(calls) == lm.config.num_hidden_layers
    body_of(lm)(LAYOUTS[PACKED_VARLEN](SEQUENCES))
    assert len(calls) == lm.config.num_hidden_layers


# Gradients


def test_gradients_are_those_of_separate_rows(kernel: None) -> None:
    lm = build_model("Llama", torch.float64)
    found = []
    for rows in ([LAYOUTS[PACKED_VARLEN](SEQUENCES)], [lay_out_single(s) for s in SEQUENCES]):
        lm.zero_grad()
        torch.stack([body_of(lm)(packed).square().sum() for packed in rows]).sum().backward()
        found.append([param.grad for param in lm.base_model.parameters()])
    for together, alone in zip(*found, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)


def test_heads_too_wide_and_dropout_go_to_sdpa(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(varlen, "_attend_within", lambda *args: calls.append("kernel"))
    module = nn.Module()

    def attend(width: int, value_width: int, **options: Any) -> None:
        query, key = (torch.ones(1, 2, 6, width) for _ in range(2))
        value = torch.ones(1, 2, 6, value_width)
        starts = torch.tensor([0, 2, 6], dtype=torch.int32)
        varlen._compute_attention(module, query, key, value, None, cu_seq_lens_q=starts, max_length_q=4, **options)

    attend(512, 512)
    attend(64, 32)
    attend(64, 64, dropout=0.5)
    attend(64, 64, is_causal=False)
    assert calls == []
    attend(64, 64)
    assert calls == ["kernel"]
