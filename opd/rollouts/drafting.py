"""Repairs of vLLM's speculative decoding, without which drafted tokens would be no samples of the student, or not those of their seeds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def repair_drafting(draft: Any, vocab_size: int) -> None:
    """Repair vLLM's functions, and cut the guesses of `draft`, vLLM's model, to `vocab_size` ids."""
    repair_functions()
    if getattr(draft, "draft_id_to_target_id", None) is not None:
        # vLLM spreads the guesses over so many ids, and compares them with the student's probabilities one by one.
        draft.config.vocab_size = vocab_size


def repair_functions() -> None:
    """Repair vLLM's functions in this process."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import llm_base_proposer

    if loses_fractions(rejection_sampler.expand_batch_to_tokens):
        rejection_sampler.expand_batch_to_tokens = repeat_by_counts
    llm_base_proposer.compute_probs_and_sample_next_token = draw_guesses


def loses_fractions(expand_batch_to_tokens: Any) -> bool:
    """Return True if this version of vLLM's function loses what it should write, temperatures above all: its CPU build casts them to
    whole numbers in a copy (vllm-project/vllm#55005)."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    values_B, ends_B = torch.tensor([0.5, 0.75]), torch.tensor([2, 3], dtype=torch.int32)
    return not torch.equal(expand_batch_to_tokens(values_B, ends_B, 3), torch.tensor([0.5, 0.5, 0.75]))


def repeat_by_counts(
    values_B: Tensor, ends_B: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Return [num_tokens] the value of each request for each of its tokens, as vLLM's function of this signature should.

    `ends_B`: number of the tokens up to and with each request. Values equal to `replace_from` become `replace_to`.
    """
    counts_B = torch.diff(ends_B, prepend=ends_B.new_zeros(1))
    replaced_B = values_B
    if replace_from != replace_to:
        replaced_B = values_B.masked_fill(values_B == replace_from, replace_to)
    return replaced_B.repeat_interleave(counts_B.long(), output_size=num_tokens)


def draw_guesses(logits_B_V: Tensor, sampling_metadata: Any, use_fp64_gumbel: bool = False) -> tuple[Tensor, Tensor]:
    """Draw a guess for each request, and return the guesses [B] and the probabilities [B, V] that they were drawn from.

    Replaces vLLM's function of this signature, which draws for all requests from one stream of numbers: what a request samples then
    depends on the others beside it. Here each draws from the stream of its own seed, as it does for its checked tokens.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import empty_exponential_noise_like, sample_with_exponential_noise

    if sampling_metadata.all_greedy:
        return logits_B_V.argmax(-1), logits_B_V  # nobody reads the probabilities
    temperature_B = sampling_metadata.temperature
    greedy_B = temperature_B < LEAST_TEMPERATURE
    probs_B_V = (logits_B_V / temperature_B.where(~greedy_B, 1.0)[:, None]).softmax(-1, dtype=torch.float32)
    noise_B_V = empty_exponential_noise_like(probs_B_V, use_fp64_gumbel)
    noise_B_V.exponential_()
    for index, generator in sampling_metadata.generators.items():
        noise_B_V[index].exponential_(generator=generator)
    drawn_B = sample_with_exponential_noise(probs_B_V.clone(), noise_B_V)
    return drawn_B.where(~greedy_B, probs_B_V.argmax(-1)), probs_B_V


LEAST_TEMPERATURE = 1e-5
"""Temperature below which vLLM decodes a request greedily."""
