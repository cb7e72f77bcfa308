"""Our side: a merge as `opd merge` runs it, on Ray, with every default that the case does not set.

python -m benchmarks.merging.ours CASE DESCRIPTOR
"""

from __future__ import annotations

import tempfile
import time
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.merging.case import OURS, PARTS, Case
from benchmarks.merging.turns import Turns, started

GIB = 2**30


def pipeline(case: Case) -> dict[str, Any]:
    """Return the contents of a pipeline file of the case; `case.options` come on top."""
    numbers = range(case.experts)
    lora = {"lora": {"r": case.lora, "alpha": 2 * case.lora}} if case.lora else {}
    return {
        "name": "bench",
        "student": {"model": str(case.student), **lora},
        "experts": {f"e{i}": {"model": str(case.expert(i)), "domain": f"d{i}"} for i in numbers},
        "domains": {f"d{i}": {"prompts": str(case.prompts(i))} for i in numbers},
        "rollout": {
            "dtype": case.dtype,
            "max_new_tokens": case.new_tokens,
            "max_model_len": case.prompt_tokens + case.new_tokens,
            "max_num_seqs": case.responses,
            "kv_cache_gib": kv_cache_gib(case),
        },
        "teachers": {"dtype": case.dtype},
        "objective": {"kind": "reverse_kl"},  # as on TRL's side
        "trainer": {
            "dtype": case.dtype,
            "ranks": 1,
            "steps": case.warm_up + case.steps,
            "samples_per_step": case.responses,
            "micro_batch_tokens": case.micro_batch_tokens,
        },
        "checkpoint": {"every": case.warm_up + case.steps},
        "logging": {"tensorboard": False},
    }


def kv_cache_gib(case: Case) -> int:
    """Whole GiB that hold the keys and values of all responses of a step."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(case.student)
    head = config.hidden_size // config.num_attention_heads
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * (4 if case.dtype == "float32" else 2)
    return ceil(case.tokens * a_token / GIB)


class _Watch:
    """Times steps from one record to the next."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._since = time.monotonic()

    def step(self, record: Any) -> None:
        """A step's record is stored; nothing runs until this returns."""
        phases = {name: record.phase_s.get(name, 0.0) for name in PARTS[OURS]}
        self._turns.over(
            {
                "seconds": time.monotonic() - self._since,
                "phases": phases,
                "prompt_tokens": record.prompt_tokens,
                "response_tokens": record.response_tokens,
            }
        )
        self._since = time.monotonic()


def main() -> None:
    case, turns = started()
    from opd import merge
    from pipelines.api import load_pipeline

    with tempfile.TemporaryDirectory(dir=case.folder) as scratch:
        config = load_pipeline(pipeline(case), case.options)
        merge(config, run_dir=Path(scratch) / "run", on_step=_Watch(turns).step)


if __name__ == "__main__":
    main()
