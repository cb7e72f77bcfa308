"""Attention within the sequences of one row by a flash kernel that is told where each begins, so that no mask is needed.

With transformers' `sdpa` a row of several sequences has a mask of [T, T] numbers, with which torch takes no flash kernel: time and
memory grow with the square of the row. torch's `varlen_attn` takes the first column of each sequence instead (`Packed.cu_seq_lens`).
It knows CUDA and types of two bytes only. `register_attention` gives transformers an attention implementation that uses it where a call
names the sequences, and is `sdpa` in every other call. Whether a model hands the names on to its layers is proven at start, like
every layout (`opd.models.layouts`).

Shapes: B rows, H heads, T columns, K width of a head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

VARLEN = "opd_varlen"
"""Name of the attention implementation in transformers."""
KERNEL_TYPES = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
"""Most numbers of a head that the kernel takes."""


@functools.cache
def has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernel runs on a device, with its backward pass. It is tried once, on two sequences."""
    if device.type != "cuda" or dtype not in KERNEL_TYPES:
        return False
    query_B_H_T_K = torch.ones(1, 2, 16, 64, device=device, dtype=dtype, requires_grad=True)
    key_B_H_T_K = torch.ones(1, 1, 16, 64, device=device, dtype=dtype)
    starts = torch.tensor([0, 5, 16], device=device, dtype=torch.int32)
    try:
        _attend_within(query_B_H_T_K, key_B_H_T_K, key_B_H_T_K, starts, 11, None).sum().backward()
    except (ImportError, TypeError, ValueError, RuntimeError):
        return False  # this torch lacks the function or an argument, or the card is too old for the kernel
    return True


def register_attention() -> str:
    """Make transformers know the implementation. Returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(VARLEN, _compute_attention)
    AttentionMaskInterface.register(VARLEN, sdpa_mask)
    return VARLEN


def _compute_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return [B, T, H, K] what the columns read, as transformers wants it; the tensors given are [B, H, T, K]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    starts, longest = options.get("cu_seq_lens_q"), options.get("max_length_q")
    plain = (
        not options.get("dropout") and options.get("position_bias") is None and options.get("is_causal") is not False
    )
    fits = query.dtype in KERNEL_TYPES and query.shape[-1] == value.shape[-1] <= WIDEST_HEAD
    if starts is None or longest is None or attention_mask is not None or not (plain and fits):
        # What is registered as `sdpa`: ranks that share rows put their exchange there (`opd.train.sequence_parallel`).
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        result: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **options)
        return result
    return _attend_within(query, key, value, starts, longest, options.get("scaling")), None


def _attend_within(
    query_1_H_T_K: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """Return [1, T, H, K] causal attention within each sequence; key and value may have fewer heads."""
    from torch.nn.attention.varlen import varlen_attn

    query_T_H_K, key_T_H_K, value_T_H_K = (part[0].transpose(0, 1) for part in (query_1_H_T_K, key, value))
    result_T_H_K = varlen_attn(
        query_T_H_K, key_T_H_K, value_T_H_K, starts, starts, longest, longest,
        scale=scaling, window_size=(-1, 0), enable_gqa=key_T_H_K.shape[1] != query_T_H_K.shape[1],
    )  # fmt: skip
    assert isinstance(result_T_H_K, Tensor)  # a pair only if more is asked for
    return result_T_H_K[None]
