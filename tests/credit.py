"""Episodes as strings, and a critic's rank without DeepSpeed: what the tests of credit share."""

from __future__ import annotations

from itertools import groupby
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from opd.credit.episodes import Episode, group_into_episodes
from opd.models.weights import load_causal_lm
from opd.records.types import Rollout, Span
from opd.train import critic_rank
from opd.train.critic_rank import CriticOptions, CriticRank
from opd.train.optimizer import AdamWOptions
from tests.rows import make_rollout

ORIGINS = {"a": "policy", "m": "masked", "o": "environment"}


def segment(kinds: str, place: int = 0, *, episode: str = "e", **columns: Any) -> Rollout:
    """A segment whose response tokens are actions (a), masked tokens of the policy (m) or observations (o)."""
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)] or [("a", 0)]
    spans = tuple(Span(length=length, origin=ORIGINS[kind], policy_version=0) for kind, length in runs)  # type: ignore[arg-type]
    plain: dict[str, Any] = {
        "sample_id": episode + (f"+{place}" if place else ""), "episode": episode, "group": episode, "step": 1,
        "domain": "d", "prompt_ids": (1, 2), "response_ids": range(3, 3 + len(kinds)), "reward": 1.0,
        "stop_reason": "done", "spans": spans,
    }  # fmt: skip
    return make_rollout(**plain | columns)


def chain(*kinds: str, episode: str = "e", **columns: Any) -> Episode:
    """An episode that was compacted after each of its segments but the last."""
    names = [episode + (f"+{place}" if place else "") for place in range(len(kinds))]
    segments = []
    for place, written in enumerate(kinds):
        links: dict[str, Any] = {"next": names[place + 1] if place + 1 < len(kinds) else None}
        links |= {"origin": "summary", "parent": names[place - 1]} if place else {}
        segments.append(segment(written, place, episode=episode, **links | columns))
    (found,) = group_into_episodes(segments)
    return found


class PlainEngine:
    """Stands for DeepSpeed on one rank: AdamW behind the last micro-batch."""

    def __init__(self, module: nn.Module, max_grad_norm: float) -> None:
        self.module = module
        params = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(params, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
        self._max, self._last, self._norm = max_grad_norm, False, 0.0

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def set_gradient_accumulation_boundary(self, last: bool) -> None:
        self._last = last

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        assert self._last
        params = [p for p in self.module.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in params), "a weight without a gradient stops ZeRO-3"
        self._norm = float(nn.utils.clip_grad_norm_(params, self._max))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def get_global_grad_norm(self) -> float:
        return self._norm


class PlainRank(CriticRank):
    """A rank of a critic on plain torch."""

    def open_meeting_point(self, address: str) -> tuple[str, int]:
        return address, 1

    def start(self, address: str, port: int) -> None:
        # There is nobody to share with.
        load = lambda options: load_causal_lm(options.model_dir, getattr(torch, options.dtype))  # noqa: E731
        with mock.patch.object(critic_rank, "load_model_share", load):
            self._engine = PlainEngine(self._build().eval(), self._options.max_grad_norm)
        self._device = torch.device("cpu")


def critic_options(model_dir: Any, **more: Any) -> CriticOptions:
    """Options of one rank in float32."""
    plain: dict[str, Any] = {
        "name": "critic", "model_dir": model_dir, "world_size": 1, "dtype": "float32", "vocab_size": 76,
        "adamw": AdamWOptions(betas=(0.9, 0.99), epsilon=1e-8, weight_decay=0.0), "max_grad_norm": 1.0,
        "grad_accum_dtype": "float32", "gradient_checkpointing": False, "timeout_s": 60.0,
    }  # fmt: skip
    return CriticOptions(**plain | more)
