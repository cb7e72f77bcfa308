"""Skip vLLM's count of token ranks.

Beside each log-prob vLLM gives the token's rank: how many ids are at least as likely. Nobody here reads it, and the count is a
`torch.compile` function, which costs compile time at the first request with log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def skip_rank_counts() -> None:
    """Make every engine in this process return rank 0 for each token."""
    from vllm.v1.sample import sampler

    # `sampler` has imported the function by name, so it is replaced there.
    sampler.batched_count_greater_than = _return_zero_ranks


def _return_zero_ranks(logprobs_N_V: Tensor, values_N_1: Tensor) -> Tensor:
    return torch.zeros(len(logprobs_N_V), dtype=torch.int64, device=logprobs_N_V.device)
