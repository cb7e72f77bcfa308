"""Records and rollouts of a merge, small enough to reckon by heart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opd.records.step import DomainRecord, StepRecord
from opd.records.types import Rollout
from tests.rows import make_rollout


def step(number: int, domains: dict[str, dict[str, Any]] | None = None, **more: Any) -> StepRecord:
    """A step in which domain `a` had ten responses of four tokens each."""
    found = {"a": {}} if domains is None else domains
    plain = {"tokens": 40, "samples": 10, "loss": 0.5}
    return StepRecord(step=number, domains={d: DomainRecord(**plain | values) for d, values in found.items()}, **more)


def rollout(
    number: int, ids: Sequence[int], *, domain: str = "a", truncated: bool = True, logprob: float = -1.0
) -> Rollout:
    """A response of that step."""
    return make_rollout(
        sample_id=f"{number:06d}/{domain}/0", step=number, domain=domain, prompt_ids=(7, 8), response_ids=ids,
        behaviour_logprobs=(logprob,) * len(ids), truncated=truncated,
    )  # fmt: skip


class Letters:
    """A tokenizer whose token 0 is `a`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)
