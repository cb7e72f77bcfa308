"""No ranks of tokens.

Beside each log-prob vLLM gives the token's rank: how many ids are as likely. Nobody here reads it, and vLLM compiles the count when an
engine first gives log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_no_ranks() -> None:
    """Have all engines of this process say 0 for every rank."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = _no_ranks


def _no_ranks(logprobs_N_V: Tensor, values_N_1: Tensor) -> Tensor:
    return torch.zeros(len(logprobs_N_V), dtype=torch.int64, device=logprobs_N_V.device)
