"""Scorers: one small file for each way to ask a teacher, behind one dictionary from `teachers.engine` to what does it.

A scorer is made inside a scoring worker, `Scorer(options)`, and knows nothing of Ray. Every one is checked against a
plain float32 transformers forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from opd.interfaces import Scorer
from opd.settings.named import import_object

SCORE_TOKENS = 4096
"""Tokens of one forward pass of engine `transformers`; more does not get faster on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server of a teacher."""

    base_url: str
    """Up to and including the API's version: https://host/v1."""
    model: str
    """What the server calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerOptions:
    """Settings of every scorer; plain values, so they cross process boundaries."""

    dtype: str
    """Teachers compute in it, hidden states and heads are sent in it."""
    payload: str
    """What is sent of each trained token: a name in `opd.config.payloads.PAYLOADS`."""
    top_k: int
    """Tokens of a `top_k` payload."""
    vocab_size: int
    """Ids that the tokenizer knows; rows of a head beyond them are padding and have no probability."""
    share_prompts: bool = False
    """Compute what rows have in common once, where that is right for a teacher; engine `transformers`."""
    memory_bytes: int = 8 << 30
    """Budget of the teachers kept in memory; engine `transformers`, like the next three."""
    gpu_memory_bytes: int = 0
    """Budget of the teachers kept on the GPU; the one in use stays in any case."""
    device_map: str | None = None
    """`auto`: a teacher's layers are divided among the worker's devices; None: all are on one."""
    max_memory: Mapping[int | str, int] = field(default_factory=dict)
    """GPU's number, `cpu` or `disk` -> most bytes of a teacher's weights there; a device that is not named gets none. Empty: what is
    free."""
    lends_memory: bool = False
    """Return the GPU memory that torch caches once a teacher has scored, because an engine on that GPU wakes up next; engine
    `transformers`."""
    max_model_len: int = 512
    """Prompt and response tokens of the longest rollout; engine `vllm`, like the next one."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory that the engine may take."""
    tensor_parallel_size: int = 1
    """Processes of the engine, each with a part of every weight; engine `vllm`."""
    servers: Mapping[str, Server] = field(default_factory=dict)
    """Teacher's name -> server; engine `openai`, like the next two."""
    api_key_env: str | None = None
    """Environment variable with the servers' key. Only its name travels: the worker reads it itself."""
    server_timeout_s: float = 120.0
    """Deadline of one attempt to get an answer."""


SCORERS = {
    "transformers": "teachers.scorers.transformers:TransformersScorer",
    "vllm": "teachers.scorers.vllm:VLLMScorer",
    "openai": "teachers.scorers.openai:OpenAIScorer",
}
"""Named, not imported: a worker loads only what it uses."""


def make_scorer(engine: str, options: ScorerOptions) -> Scorer:
    """Make the scorer that `teachers.engine` names."""
    scorer: Scorer = import_object(SCORERS[engine])(options)
    return scorer
