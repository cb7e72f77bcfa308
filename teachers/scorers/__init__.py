"""Scorers: each way to ask a teacher has one file here and one entry in `SCORERS`, under its name in `teachers.engine`.

A scorer is made inside a scoring worker, as `Scorer(options)`, and knows nothing of Ray. Tests compare every scorer with a
plain forward pass of transformers in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from opd.interfaces import Scorer
from opd.settings.user_objects import import_object
from opd.vocabularies.spelling import Spelling

SCORE_TOKENS = 4096
"""Tokens of one forward pass of engine `transformers`. On a CPU, larger passes are not faster."""
ENGINE_TOKENS = 32768
"""Tokens that the other engines are given at a time, and whose answers are in memory together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server of a teacher."""

    base_url: str
    """Up to and including the API's version: https://host/v1."""
    model: str
    """Name of the teacher's model at the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerOptions:
    """Settings of every scorer; plain values, so they cross process boundaries."""

    dtype: str
    """Type in which teachers compute, and in which hidden states and heads are sent."""
    payload: str
    """Kind of data sent for each trained token: a name in `opd.config.payloads.PAYLOADS`."""
    top_k: int
    """With payload `top_k`: how many of the likeliest tokens are sent for each position."""
    vocab_size: int
    """Ids that the tokenizer knows; rows of a head beyond them are padding and have no probability."""
    spellings: Mapping[str, Spelling] = field(default_factory=dict)
    """Teacher's name -> its tokens in the student's, for teachers with another tokenizer; engine `transformers`."""
    share_prompts: bool = False
    """Compute the tokens with which several rows begin only once, for teachers where that gives the same states; engine
    `transformers`."""
    memory_bytes: int = 8 << 30
    """Budget for the teachers that are kept in memory; engine `transformers`, like the next three."""
    gpu_memory_bytes: int = 0
    """Budget for the teachers that are kept on the GPU; the newest one is kept even if it exceeds the budget."""
    device_map: str | None = None
    """`auto`: a teacher's layers are divided among the worker's devices; None: all layers are on one device."""
    max_memory: Mapping[int | str, int] = field(default_factory=dict)
    """GPU's number, `cpu` or `disk` -> most bytes of a teacher's weights there; a device that is not named gets none. If
    empty, the free memory is measured."""
    lends_memory: bool = False
    """After a teacher has scored, give the GPU memory that torch caches back to the system, because an engine on the same
    GPU wakes up next; engine `transformers`."""
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
"""Value of `teachers.engine` -> the scorer's class. The class is imported when it is used, so that a worker loads only
the libraries of its own engine."""


def make_scorer(engine: str, options: ScorerOptions) -> Scorer:
    """Make the scorer that `teachers.engine` names."""
    scorer: Scorer = import_object(SCORERS[engine])(options)
    return scorer


def batch_tokens(engine: str) -> int:
    """Return the most prompt and response tokens of a scorer's batch; `engine`: a name in `SCORERS`."""
    return SCORE_TOKENS if engine == "transformers" else ENGINE_TOKENS
