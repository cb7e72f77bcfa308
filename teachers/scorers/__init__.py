"""Scorers: one small file for each way to ask a teacher, behind one dictionary from `teachers.engine` to what does it.

A scorer is made inside a scoring worker, `Scorer(options)`, and knows nothing of Ray. Every one is checked against a
plain float32 transformers forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from torch import Tensor

from opd.losses.chunked import LogitRule
from opd.stream.schema import TargetRow
from opd.types import Rollout, Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerOptions:
    """What every scorer needs to know; plain values, so they cross process boundaries."""

    dtype: str
    """Teachers compute in it, hidden states and heads are sent in it."""
    payload: str
    """As `teachers.payload`."""
    top_k: int
    """Tokens of a `top_k` payload."""
    vocab_size: int
    """Ids that the tokenizer knows; rows of a head beyond them are padding and have no probability."""
    memory_bytes: int
    """Budget of the teachers kept in memory."""


class Scorer(Protocol):
    """One way to ask a teacher about tokens that the student wrote."""

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        """Target rows in batches. A response that cannot be scored gets no row but an entry in `broken`: id -> reason."""
        ...

    def prefetch(self, teacher: Teacher) -> None:
        """Begin to load a teacher that is asked next; returns at once."""
        ...

    def head(self, teacher: Teacher) -> Tensor:
        """[V, D] the output head, on the CPU; only under payload `hidden_states`."""
        ...

    def head_key(self, teacher: Teacher) -> str:
        """Content hash of head and logit rule. Raises: RunError if the teacher cannot be used."""
        ...

    def head_rule(self, teacher: Teacher) -> LogitRule:
        """What the teacher's architecture does to its logits."""
        ...


SCORERS = {"transformers": "teachers.scorers.transformers:TransformersScorer"}
"""Named, not imported: a worker loads only what it uses."""


def make_scorer(engine: str, options: ScorerOptions) -> Scorer:
    """The scorer behind `teachers.engine`."""
    module, _, name = SCORERS[engine].partition(":")
    made: Scorer = getattr(import_module(module), name)(options)
    return made
