"""Measure how far a right engine and a right trainer differ, as a basis for the default of `sync.tolerance`.

    python -m benchmarks.gap MODEL_DIR [--output FILE]

vLLM writes answers with the model's own weights, and a transformers forward of the same weights says how likely each token
was: the mean |difference| of log-probs a sampled token, for each pair of compute types. Both hold the same weights, so what is
measured is rounding alone; a threshold below it would stop sound runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from statistics import fmean
from typing import Any

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 32, 64
DTYPES = ("float32", "bfloat16")


def written(model_dir: Path, dtype: str, vocab_size: int) -> list[tuple[tuple[int, ...], Any]]:
    """Prompts of chance tokens, and what the engine sampled after each."""
    from opd.rollouts.processes import ENGINE_ENV

    os.environ.update(ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": "1"})
    from opd.rollouts.worker import EngineOptions, GenerateRequest, VLLMWorker

    options = EngineOptions(
        model_dir=model_dir,
        dtype=dtype,
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
        max_num_seqs=PROMPTS,
        gpu_memory_utilization=0.5,
        vocab_size=vocab_size,
    )
    rng = random.Random(0)
    prompts = [tuple(rng.choices(range(vocab_size), k=PROMPT_TOKENS)) for _ in range(PROMPTS)]
    requests = [
        GenerateRequest(token_ids=p, max_tokens=NEW_TOKENS, temperature=1.0, seed=i) for i, p in enumerate(prompts)
    ]
    return list(zip(prompts, VLLMWorker(options, ()).generate(requests), strict=True))


def gaps(model_dir: Path, dtype: str, answers: list[tuple[tuple[int, ...], Any]], vocab_size: int) -> list[float]:
    """|transformers - engine| of each sampled token, nats."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    found = []
    for prompt, sampled in answers:
        ids_T = torch.tensor([*prompt, *sampled.token_ids])
        with torch.no_grad():
            logp_T_V = model(ids_T[None], use_cache=False).logits[0, :, :vocab_size].float().log_softmax(-1)
        ours = logp_T_V[len(prompt) - 1 : -1].gather(1, ids_T[len(prompt) :, None])[:, 0].tolist()
        found += [abs(a - b) for a, b in zip(ours, sampled.logprobs, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from experts.model_dir import inspect_model

    vocab_size = inspect_model(args.model, hash_weights=False).vocab_size
    rows = []
    for engine in DTYPES:
        answers = written(args.model, engine, vocab_size)
        for trainer in DTYPES:
            values = gaps(args.model, trainer, answers, vocab_size)
            rows.append({"engine": engine, "trainer": trainer, "tokens": len(values), "mean_nats": fmean(values)})
            print(f"engine {engine:8}  trainer {trainer:8}  {fmean(values):.1e} nats a token over {len(values)}")
    if args.output:
        args.output.write_text(json.dumps({"model": args.model.name, "gaps": rows}, indent=2))


if __name__ == "__main__":
    main()
