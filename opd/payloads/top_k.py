"""Payload `top_k`: the teacher's likeliest tokens at each position, with their log-probs in the whole distribution.

Shapes: N tokens of a block, C of a chunk, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from opd.interfaces import ScoredRow
from opd.losses.blocks import Block, BlockChunk
from opd.losses.objective import TeacherChunk
from opd.payloads.answer import Answer, Columns, Position, TeacherStates

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.models.heads import Head


@dataclass(frozen=True, slots=True)
class TopTokens(Answer):
    """A teacher's K likeliest tokens at each trained token of one response."""

    ROW: ClassVar[Columns] = (("topk_ids", pa.list_(pa.int32())), ("topk_logprobs", pa.list_(pa.float32())))
    TOKEN_IDS: ClassVar[tuple[str, ...]] = ("topk_ids",)

    topk_ids: Sequence[int]
    """[N, K] likeliest tokens, row after row."""
    topk_logprobs: Sequence[float]
    """[N, K] their log-probs under the whole distribution."""

    @property
    def nbytes(self) -> int:
        return 8 * len(self.topk_ids)

    @property
    def size(self) -> str:
        return str(len(self.topk_ids))

    def fits(self, num: int, itemsize: int) -> bool:
        if len(self.topk_ids) != len(self.topk_logprobs) or (num == 0) != (len(self.topk_ids) == 0):
            return False
        return num == 0 or len(self.topk_ids) % num == 0

    def select_tokens(self, part: slice, num: int) -> TopTokens:
        k = self.width(num) or 0
        values = slice(part.start * k, part.stop * k)
        return TopTokens(self.topk_ids[values], self.topk_logprobs[values])

    def width(self, num: int) -> int | None:
        """Return K."""
        return len(self.topk_ids) // num if num else None

    @classmethod
    def token_bytes(cls, *, hidden_size: int, itemsize: int, top_k: int) -> int:
        return 8 * top_k

    @classmethod
    def of_states(cls, states: TeacherStates) -> TopTokens:
        logq_N_V = states.logprobs()
        top = logq_N_V.topk(min(states.top_k, logq_N_V.shape[1]), dim=-1)
        return cls(top.indices.flatten().tolist(), top.values.flatten().tolist())

    @classmethod
    def named_by_engine(cls, top_k: int) -> int | None:
        return top_k

    @classmethod
    def of_positions(cls, token_ids: Sequence[int], positions: Sequence[Position], top_k: int) -> TopTokens:
        """Make the answer from an engine's log-probs: the K likeliest tokens. An engine also names the token that stands there,
        which is dropped if it is not among them."""
        top = [sorted(position.items(), key=lambda entry: -entry[1])[:top_k] for position in positions]
        return cls([token for pairs in top for token, _ in pairs], [value for pairs in top for _, value in pairs])

    @classmethod
    def blocks(
        cls, samples: Sequence[Sequence[ScoredRow]], dtype: torch.dtype, baselines: Mapping[str, float] | None
    ) -> tuple[Block, ...]:
        import torch

        assert all(len(scored) == 1 for scored in samples), "top_k does not mix teachers"
        rows = [scored[0] for scored in samples]
        num = sum(row.rollout.num_trained for row in rows)
        ids = torch.tensor([x for r in rows for x in r.answer.topk_ids], dtype=torch.long)
        logprobs = torch.tensor([x for r in rows for x in r.answer.topk_logprobs], dtype=torch.float32)
        width = len(ids) // max(1, num)
        return (TopKBlock(ids.view(num, width), logprobs.view(num, width)),)

    def gap(self, reference: Answer, num: int, dtype: torch.dtype) -> float:
        assert isinstance(reference, TopTokens)
        pairs = zip(self._top_logprobs(num), reference._top_logprobs(num), strict=True)
        gaps = [
            _logprob_difference(own_top, token, value)
            for own_top, reference_top in pairs
            for token, value in reference_top.items()
        ]
        return sum(gaps) / len(gaps)

    def differences(
        self, token_ids: Sequence[int], logprobs: Sequence[float], dtype: torch.dtype, head: Callable[[], Head]
    ) -> list[float]:
        rows = zip(self._top_logprobs(len(logprobs)), token_ids, logprobs, strict=True)
        return [_logprob_difference(top_logprobs, token, logprob) for top_logprobs, token, logprob in rows]

    def _top_logprobs(self, num: int) -> list[dict[int, float]]:
        """Return [N] token -> log-prob at each trained token."""
        k = len(self.topk_ids) // num
        parts = [slice(start, start + k) for start in range(0, num * k, k)]
        return [dict(zip(self.topk_ids[part], self.topk_logprobs[part], strict=True)) for part in parts]


def _logprob_difference(top_logprobs: Position, token: int, logprob: float) -> float:
    """Return the difference of `logprob` and the token's log-prob in `top_logprobs`, nats.

    A token that is not there is at most as likely as the least likely one that is. So the least possible difference is returned.
    """
    if token in top_logprobs:
        return abs(logprob - top_logprobs[token])
    return max(0.0, logprob - min(top_logprobs.values()))


@dataclass(frozen=True, slots=True)
class TopKBlock(Block, BlockChunk):
    """Consecutive trained tokens with the teacher's K likeliest tokens at each. The same class serves as block and as chunk."""

    compiles: ClassVar[bool] = True

    ids_N_K: Tensor
    logprob_N_K: Tensor

    def __len__(self) -> int:
        return len(self.ids_N_K)

    def select_chunk(self, part: slice, vocab_size: int) -> TopKBlock:
        return self.select_rows(part)

    def select_rows(self, rows: slice) -> TopKBlock:
        return TopKBlock(self.ids_N_K[rows], self.logprob_N_K[rows])

    def pad_rows(self, rows: int) -> TopKBlock:
        from opd.losses.logits import pad_rows

        return TopKBlock(pad_rows(self.ids_N_K, rows), pad_rows(self.logprob_N_K, rows))

    def view_chunk(self, token_C: Tensor, dtype: torch.dtype) -> TopKChunk:
        return TopKChunk(self.ids_N_K, self.logprob_N_K.to(dtype))


@dataclass(frozen=True, slots=True)
class TopKChunk(TeacherChunk):
    """The teacher's K likeliest tokens at C tokens."""

    ids_C_K: Tensor
    logq_C_K: Tensor

    def first_C(self) -> Tensor:
        return self.ids_C_K.gather(1, self.logq_C_K.argmax(-1, keepdim=True))[:, 0]
