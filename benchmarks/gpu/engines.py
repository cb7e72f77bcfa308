"""vLLM on this machine: new weights in a running engine, captured CUDA graphs and sleep mode."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.check import Check
from benchmarks.gpu.runner import RunnerWorker
from benchmarks.gpu.work import measured, used_bytes
from opd.rollouts.processes import ENGINE_ENV
from opd.rollouts.worker import EngineOptions, GenerateRequest, VLLMWorker
from tests.conftest import build_model_dir

PROBE = [tuple(range(5 + i, 26 + i)) for i in range(4)]
KNOWN = 70
"""Ids that the tokenizer is said to know, of the head's 76: the engine cuts the others off all logits."""


def measure(check: Check) -> None:
    """Log-probs of the engine against transformers, at first and after each push; on a GPU with nights between them."""
    os.environ.update(ENGINE_ENV, VLLM_CPU_KVCACHE_SPACE="1")
    sleeps = check.device == "cuda"
    if not sleeps:
        check.leave_out("sleep mode, CUDA graphs", "they are a GPU's")
    with tempfile.TemporaryDirectory() as folder:
        first, second = (build_model_dir(Path(folder) / str(seed), seed=seed) for seed in (0, 1))
        options = EngineOptions(
            model_dir=first, dtype="float32", max_model_len=64, max_num_seqs=8, gpu_memory_utilization=0.2,
            vocab_size=KNOWN, sleep=sleeps,
        )  # fmt: skip
        worker = RunnerWorker(options, (2,))
        check.add("model runner", runner=worker.model_runner())
        awake = used_bytes() if sleeps else 0
        for name, model_dir in (("start", first), ("push", second), ("push back", first)):
            with measured(check.device) as span:
                if name != "start":
                    worker.load(model_dir)
            probe_gap = _gap(worker.logprobs(PROBE), _plain(model_dir, PROBE))
            check.add(
                "weight push",
                weights=name,
                seconds=span.seconds,
                probe_gap=probe_gap,
                sampled_gap=_sampled_gap(worker, model_dir),
            )
        if sleeps:  # it has just written
            check.add("sleep mode", awake_bytes=awake, asleep_bytes=used_bytes())


def _sampled_gap(worker: VLLMWorker, model_dir: Path) -> float:
    """Mean difference from transformers of the log-probs that the engine gives for the tokens that it samples."""
    requests = [GenerateRequest(token_ids=ids[:8], max_tokens=16, temperature=1.0, seed=7) for ids in PROBE]
    sampled = worker.generate(requests)
    whole = _plain(model_dir, [(*r.token_ids, *s.token_ids) for r, s in zip(requests, sampled, strict=True)])
    wanted = [part[len(r.token_ids) - 1 :] for r, part in zip(requests, whole, strict=True)]
    return _gap([list(s.logprobs) for s in sampled], wanted)


def _plain(model_dir: Path, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-prob of every token after the first, by transformers on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    out = []
    for ids in sequences:
        with torch.no_grad():
            logp_T_V = model(torch.tensor([list(ids)])).logits[0, :, :KNOWN].log_softmax(-1)
        out.append(logp_T_V[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    return out


def _gap(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    pairs = [(a, b) for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
