"""Scorers: one small file for each way to ask a teacher, behind one dictionary from `teachers.engine` to what does it.

A scorer is made inside a scoring worker, `Scorer(options)`, and knows nothing of Ray. Every one is checked against a
plain float32 transformers forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from opd.losses.rule import LogitRule
from opd.named import imported
from opd.stream.heads import HeadFile
from opd.stream.schema import TargetRow
from opd.types import LayoutProof, Rollout, Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where a teacher is served."""

    base_url: str
    """Up to and including the API's version: https://host/v1."""
    model: str
    """What the server calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerOptions:
    """What every scorer needs to know; plain values, so they cross process boundaries."""

    dtype: str
    """Teachers compute in it, hidden states and heads are sent in it."""
    payload: str
    """What is sent of each trained token: a name in `opd.payloads.PAYLOADS`."""
    top_k: int
    """Tokens of a `top_k` payload."""
    vocab_size: int
    """Ids that the tokenizer knows; rows of a head beyond them are padding and have no probability."""
    memory_bytes: int = 8 << 30
    """Budget of the teachers kept in memory; engine `transformers`."""
    max_model_len: int = 512
    """Prompt and response tokens of the longest rollout; engine `vllm`, like the next one."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory that the engine may take."""
    servers: Mapping[str, Server] = field(default_factory=dict)
    """Teacher's name -> server; engine `openai`, like the next two."""
    api_key_env: str | None = None
    """Environment variable with the servers' key. Only its name travels: the worker reads it itself."""
    server_timeout_s: float = 120.0
    """Deadline of one attempt to get an answer."""


class Scorer(Protocol):
    """One way to ask a teacher about tokens that the student wrote."""

    def score(self, teacher: Teacher, rollouts: Sequence[Rollout], broken: dict[str, str]) -> Iterator[list[TargetRow]]:
        """Target rows in batches. A response that cannot be scored gets no row but an entry in `broken`: id -> reason.

        A scorer that reads ahead has loaded the teacher when this returns: `prefetch` may follow before the first batch.
        """
        ...

    def prefetch(self, teacher: Teacher) -> None:
        """Begin to load a teacher that is asked next; returns at once."""
        ...

    def head(self, teacher: Teacher) -> Tensor:
        """[V, D] the output head, on the CPU; only under a payload that sends heads."""
        ...

    def head_key(self, teacher: Teacher) -> str:
        """Content hash of head and logit rule, empty where no head is at hand. Raises: RunError if the teacher cannot be
        used: this is where every scorer tries it out."""
        ...

    def head_file(self, teacher: Teacher) -> HeadFile | None:
        """Where the head lies, None where no head is at hand."""
        ...

    def head_rule(self, teacher: Teacher) -> LogitRule:
        """What the teacher's architecture does to its logits."""
        ...

    def layout(self, teacher: Teacher) -> LayoutProof | None:
        """How several rows share a forward pass, proven; None where the engine that scores sees to that."""
        ...


SCORERS = {
    "transformers": "teachers.scorers.transformers:TransformersScorer",
    "vllm": "teachers.scorers.vllm:VLLMScorer",
    "openai": "teachers.scorers.openai:OpenAIScorer",
}
"""Named, not imported: a worker loads only what it uses."""


def make_scorer(engine: str, options: ScorerOptions) -> Scorer:
    """The scorer behind `teachers.engine`."""
    made: Scorer = imported(SCORERS[engine])(options)
    return made
