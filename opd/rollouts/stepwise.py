"""Sampling with a plain transformers model, for architectures that no engine serves.

    position   0 1 2 3 4 5 6
    row a      p p p p s s s      p: a token of the prompt, s: a sampled one
    row b      p p s s s s .      .: the row has left the batch

All rows are at the same position, from the first on, so nothing is padded or masked: that is right for every architecture, recurrent ones
too. The model reads as many tokens at once as the shortest prompt has, then one at a time. Each request has its own random stream.
transformers' continuous batching has one seed for all requests, so a response would depend on what else is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opd.errors import RunError
from opd.records.types import TurnStop
from opd.rollouts.worker import Generated, GenerateRequest

PROOF_TOKENS, PROOF_ROWS = 24, 3
PROOF_NATS = 1e-3
"""Largest difference of a log-prob with and without the cache in float32; in shorter types `PROOF_NATS_SHORT`."""
PROOF_NATS_SHORT = 0.2


class StepwiseReader:
    """Reads rows position by position, and returns what the model predicts next."""

    def __init__(self, lm: Any, vocab_size: int, *, cached: bool) -> None:
        """`cached`: keep keys, values and states; else every step computes all positions again."""
        self._lm, self._vocab_size, self._cached = lm, vocab_size, cached
        self._cache: Any = None
        self._read_B_T = torch.empty(0, 0, dtype=torch.long, device=lm.device)
        self._rows: Tensor | None = None
        """Rows of the cache that are read; None: all."""
        self._last_only = (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(lm).forward).parameters else {}
        )

    def read(self, ids_B_T: Tensor) -> Tensor:
        """Read the next tokens of each row, and return the logits [B, V] behind the last one, float32, of the tokenizer's ids alone."""
        if self._rows is not None:  # rows that could not be dropped read anything
            ids_B_T = ids_B_T.new_zeros(len(self._read_B_T), ids_B_T.shape[1]).index_copy(0, self._rows, ids_B_T)
        start = self._read_B_T.shape[1]
        self._read_B_T = torch.cat([self._read_B_T, ids_B_T], dim=1) if start else ids_B_T
        if self._cached:
            positions_B_T = torch.arange(start, self._read_B_T.shape[1], device=ids_B_T.device).expand_as(ids_B_T)
            output = self._lm(
                input_ids=ids_B_T,
                position_ids=positions_B_T,
                past_key_values=self._cache,
                use_cache=True,
                **self._last_only,
            )
            self._cache = getattr(output, "past_key_values", None)  # RecurrentGemma keeps its states to itself
        else:
            output = self._lm(input_ids=self._read_B_T, use_cache=False, **self._last_only)
        logits_B_V: Tensor = output.logits[:, -1, : self._vocab_size].float()
        return logits_B_V if self._rows is None else logits_B_V[self._rows]

    @property
    def has_cache(self) -> bool:
        """True if the model gave a cache, without which the next tokens cannot be read alone."""
        return self._cache is not None

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all other rows. A cache of a family's own keeps them: MiniMax's fails when it selects some."""
        from transformers import DynamicCache
        from transformers.cache_utils import LinearAttentionCacheLayerMixin

        index = torch.tensor(rows, device=self._read_B_T.device)
        if self._cache is not None and type(self._cache) is not DynamicCache:
            self._rows = index if self._rows is None else self._rows[index]
            return
        self._read_B_T = self._read_B_T[index]
        if self._cache is None:
            return
        # A cache with states of linear layers selects all of its parts only when it is reordered, any other by this method.
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._cache.layers):
            self._cache.reorder_cache(index)
        else:
            self._cache.batch_select_indices(index)


@torch.inference_mode()
def prove_cache(lm: Any, vocab_size: int) -> bool:
    """Return True if the model predicts the same with its cache as without, also after a row has left the batch."""
    generator = torch.Generator().manual_seed(0)
    ids_B_T = torch.randint(0, vocab_size, (PROOF_ROWS, PROOF_TOKENS), generator=generator).to(lm.device)
    cached, plain = (StepwiseReader(lm, vocab_size, cached=flag) for flag in (True, False))
    limit = PROOF_NATS if lm.dtype == torch.float32 else PROOF_NATS_SHORT
    half, rows = PROOF_TOKENS // 2, list(range(PROOF_ROWS))
    for start, end in [(0, half), *((t, t + 1) for t in range(half, PROOF_TOKENS))]:
        first, second = (reader.read(ids_B_T[rows, start:end]).log_softmax(-1) for reader in (cached, plain))
        if not cached.has_cache or float((first - second).abs().max()) > limit:
            return False
        if end == PROOF_TOKENS - 4:
            rows = rows[1:]
            for reader in (cached, plain):
                reader.keep_rows(range(1, PROOF_ROWS))
    return True


@torch.inference_mode()
def generate_stepwise(
    lm: Any,
    requests: Sequence[GenerateRequest],
    *,
    vocab_size: int,
    stop: frozenset[int],
    max_num_seqs: int,
    cached: bool,
) -> list[Generated]:
    """Sample every request, at most `max_num_seqs` at a time; at temperature 0, decode it greedily. Prompts of like lengths share a batch.

    Raises: RunError on NaN log-probs.
    """
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids))
    results: dict[int, Generated] = {}
    for first in range(0, len(order), max_num_seqs):
        batch = order[first : first + max_num_seqs]
        reader = StepwiseReader(lm, vocab_size, cached=cached)
        results |= zip(batch, _generate_batch(reader, [requests[i] for i in batch], stop, lm.device), strict=True)
    return [results[i] for i in range(len(requests))]


class _Writer:
    """One request while it is written."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.ids = list(request.token_ids)
        self.logprobs: list[float] = []
        self.stop_reason: TurnStop | None = None
        self._random = torch.Generator()
        if request.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(request.seed)

    def write(self, logits_V: Tensor, stop: frozenset[int]) -> None:
        """Sample the next token. Raises: RunError on NaN log-probs."""
        request = self.request
        logprobs_V = (logits_V / request.temperature if request.temperature else logits_V).log_softmax(-1)
        if request.temperature:
            # The largest of p / e, with e exponential, is a sample of p.
            waiting_V = torch.empty_like(logprobs_V).exponential_(generator=self._random)
            token = int((logprobs_V.exp() / waiting_V).argmax())
        else:
            token = int(logprobs_V.argmax())
        logprob = float(logprobs_V[token])
        if logprob != logprob:  # NaN alone is unequal to itself
            raise RunError("the rollout engine returned NaN log-probs: the student's weights are broken")
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in stop:
            self.stop_reason = "stop"
        elif len(self.logprobs) == request.max_tokens:
            self.stop_reason = "length"

    def finish(self) -> Generated:
        """Return what was written."""
        assert self.stop_reason is not None
        written = self.ids[len(self.request.token_ids) :]
        return Generated(token_ids=tuple(written), logprobs=tuple(self.logprobs), stop_reason=self.stop_reason)


def _generate_batch(
    reader: StepwiseReader, requests: Sequence[GenerateRequest], stop: frozenset[int], device: torch.device
) -> list[Generated]:
    writers = [_Writer(request) for request in requests]
    active, start, end = writers, 0, min(len(writer.ids) for writer in writers)
    while active:
        ids_B_T = torch.tensor([writer.ids[start:end] for writer in active], device=device)
        logits_B_V = reader.read(ids_B_T).cpu()
        for writer, logits_V in zip(active, logits_B_V, strict=True):
            if len(writer.ids) == end:  # else the next token is one of the prompt
                writer.write(logits_V, stop)
        remaining = [row for row, writer in enumerate(active) if writer.stop_reason is None]
        if remaining and len(remaining) < len(active):
            reader.keep_rows(remaining)
        active = [active[row] for row in remaining]
        start, end = end, end + 1
    return [writer.finish() for writer in writers]
