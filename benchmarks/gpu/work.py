"""Random models and rows for the GPU check, and what a device says of itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opd.records import types

MODELS: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1},
    "small": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
              "num_attention_heads": 12, "num_key_value_heads": 4},
    "medium": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12,
               "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
"""Random Llamas with a tied head: 0.1, 62 and 854 million parameters."""


def build_model(path: Path, size: str, *, dtype: torch.dtype, seed: int, device: str) -> Path:
    """A directory with a random Llama of `MODELS`, its weights drawn on `device`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**MODELS[size], max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.05)
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(path)
    return path


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Part of a GPU's name -> its dense bfloat16 products a second, by its maker's data sheet (SXM where there are several)."""


def count_parameters(size: str, *, head: bool) -> int:
    """Return the parameters in the layers of a model of `MODELS`, and those of its head."""
    shape = MODELS[size]
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = 2 * width * width * (1 + shape["num_key_value_heads"] / heads)
    layer = attention + 3 * width * shape["intermediate_size"]
    return int(shape["num_hidden_layers"] * layer + head * shape["vocab_size"] * width)


def share_of_peak(flops_per_s: float) -> float | None:
    """Return the share of the GPU's bfloat16 peak; None on a CPU, or for a GPU whose peak is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((value for part, value in PEAK_FLOPS.items() if part in name), None)
    return flops_per_s / peak if peak else None


@dataclass(frozen=True)
class Shape:
    """The size of one step's responses."""

    rows: int
    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt + self.response)


def make_rollouts(shape: Shape, vocab_size: int, *, seed: int = 0) -> list[types.Rollout]:
    """Responses of random ids, some shorter than others: who wrote them does not matter here."""
    gen = torch.Generator().manual_seed(seed)
    made = []
    for i in range(shape.rows):
        length = shape.response - i % max(1, shape.response // 8)
        prompt, response = (
            tuple(torch.randint(0, vocab_size, (n,), generator=gen).tolist()) for n in (shape.prompt, length)
        )
        name = f"000001/d/{i}"
        made.append(
            types.Rollout(
                sample_id=name, group=name, episode=name, step=1, domain="d", prompt_ids=prompt,
                response_ids=response, behaviour_logprobs=(-1.0,) * length,
                spans=(types.Span(length=length, origin="policy", policy_version=0),), stop_reason="stop",
            )
        )  # fmt: skip
    return made


def num_tokens(rollouts: Sequence[types.Rollout]) -> int:
    """Prompt and response tokens together."""
    return sum(len(r.prompt_ids) + len(r.response_ids) for r in rollouts)


@dataclass
class Span:
    """Duration of something, and the most memory that it had beyond what was there before."""

    seconds: float = 0.0
    peak_bytes: int | None = None
    """On the GPU, all that torch held; None on a CPU."""
    extra_bytes: int | None = None


@contextmanager
def measured(device: str) -> Iterator[Span]:
    """Times what is inside: by events on a GPU, by the clock on a CPU."""
    span = Span()
    if device != "cuda":
        began = time.perf_counter()
        yield span
        span.seconds = time.perf_counter() - began
        return
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first.record()
    yield span
    last.record()
    torch.cuda.synchronize()
    span.seconds = first.elapsed_time(last) / 1000
    span.peak_bytes = torch.cuda.max_memory_allocated()
    span.extra_bytes = span.peak_bytes - before


def used_bytes() -> int:
    """In use on the first GPU by all processes, as the driver's tool says."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def scorer_options(dtype: str, vocab_size: int) -> Any:
    """A scorer that sends hidden states and keeps what it has read."""
    from teachers.scorers import ScorerOptions

    return ScorerOptions(
        dtype=dtype, payload="hidden_states", top_k=0, vocab_size=vocab_size, memory_bytes=64 << 30, max_model_len=4096
    )
