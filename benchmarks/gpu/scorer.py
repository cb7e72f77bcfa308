"""The scorer on a GPU: the same states as on a CPU, and how many tokens a second."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.check import Check
from benchmarks.gpu.work import MODELS as SIZES
from benchmarks.gpu.work import (
    Shape,
    build_model,
    count_parameters,
    make_rollouts,
    measured,
    num_tokens,
    scorer_options,
    share_of_peak,
    used_bytes,
)
from opd.records.types import Rollout, Teacher
from opd.stream.schema import TargetRow
from teachers.scorers import transformers as scoring
from teachers.scorers.transformers import TransformersScorer
from teachers.weights import weights_nbytes

PASSES = (4096, 16384, 65536)
"""Tokens of one forward pass."""


def measure(check: Check) -> None:
    """Measure what a process takes, speed in bfloat16, then equality in float32."""
    if check.device == "cuda" and shutil.which("nvidia-smi"):
        _context(check)
    with tempfile.TemporaryDirectory() as folder:
        _speed(check, Path(folder), "tiny" if check.quick else "medium")
        for size in ("tiny",) if check.quick else ("tiny", "small"):
            if check.in_time(f"equality, {size}", 0 if check.quick else 10):
                _equality(check, Path(folder), size)
                _divided(check, Path(folder), size)


def _context(check: Check) -> None:
    """Measure how much less memory the GPU has, as the driver says, once a process has multiplied two matrices on it."""
    before = used_bytes()
    ones = torch.ones(256, 256, device="cuda")
    (ones @ ones).sum().item()
    check.add("a process on the GPU", context_bytes=used_bytes() - before - torch.cuda.memory_reserved())


def _score(scorer: TransformersScorer, teacher: Teacher, rollouts: list[Rollout]) -> list[TargetRow]:
    return [row for rows in scorer.score(teacher, rollouts, {}) for row in rows]


def _teacher(path: Path) -> Teacher:
    return Teacher(name=path.name, model_dir=path, digest=path.name)


def _equality(check: Check, folder: Path, size: str) -> None:
    """Largest difference to the CPU in float32: of states relative to the largest one, of log-probs in nats."""
    vocab = SIZES[size]["vocab_size"]
    teacher = _teacher(build_model(folder / f"{size}-float32", size, dtype=torch.float32, seed=1, device=check.device))
    rollouts = make_rollouts(Shape(rows=6, prompt=16, response=48), vocab)
    states, logprobs = [], []
    for device in (check.device, "cpu"):
        scorer = TransformersScorer(scorer_options("float32", vocab), device=device)
        rows = {row.rollout.sample_id: row for row in _score(scorer, teacher, rollouts)}
        hidden_N_D = torch.cat(
            [torch.frombuffer(bytearray(rows[r.sample_id].answer.hidden), dtype=torch.float32) for r in rollouts]
        ).view(-1, SIZES[size]["hidden_size"])
        token_N = torch.tensor([t for r in rollouts for t in r.response_ids])
        logq_N_V = (hidden_N_D.double() @ scorer.head(teacher).double().T).log_softmax(-1)
        states.append(hidden_N_D)
        logprobs.append(logq_N_V.gather(1, token_N[:, None])[:, 0])
    check.add(
        "float32 against the CPU",
        model=size,
        hidden_difference=float((states[0] - states[1]).abs().max() / states[1].abs().max()),
        logprob_difference=float((logprobs[0] - logprobs[1]).abs().max()),
        allowed=1e-4,
    )


def _divided(check: Check, folder: Path, size: str) -> None:
    """A teacher in parts beside the same on one device: is every state of every token the same, bit for bit?"""
    vocab = SIZES[size]["vocab_size"]
    teacher = _teacher(folder / f"{size}-float32")
    rollouts = make_rollouts(Shape(rows=6, prompt=16, response=48), vocab)
    nbytes = weights_nbytes(teacher.model_dir, torch.float32)
    whole = _score(TransformersScorer(scorer_options("float32", vocab), device=check.device), teacher, rollouts)
    first: int | str = 0 if check.device == "cuda" else "cpu"
    ways: dict[str, dict[int | str, int]] = {"a part in its files": {first: int(0.6 * nbytes), "disk": nbytes}}
    if check.device == "cuda":
        ways["a part in the machine's memory"] = {0: int(0.6 * nbytes), "cpu": nbytes}
        if torch.cuda.device_count() > 1:
            ways["two GPUs"] = {0: 2 * nbytes, 1: 2 * nbytes}
        else:
            check.leave_out("a teacher on two GPUs", "one is here")
    for name, max_memory in ways.items():
        options = replace(scorer_options("float32", vocab), device_map="auto", max_memory=max_memory)
        scorer = TransformersScorer(options, device=check.device)
        with measured(check.device) as span:
            rows = _score(scorer, teacher, rollouts)
        equal = [row.answer for row in rows] == [row.answer for row in whole]
        check.add("divided teacher, float32", model=size, where=name, bit_equal=equal, seconds=span.seconds)


def _speed(check: Check, folder: Path, size: str) -> None:
    vocab = SIZES[size]["vocab_size"]
    teacher = _teacher(build_model(folder / f"{size}-bf16", size, dtype=torch.bfloat16, seed=1, device=check.device))
    shape = Shape(rows=8, prompt=8, response=24) if check.quick else Shape(rows=256, prompt=64, response=448)
    rollouts = make_rollouts(shape, vocab)
    scorer = TransformersScorer(scorer_options("bfloat16", vocab), device=check.device)
    with measured(check.device) as first:
        scorer.head_key(teacher)
    usual = scoring.SCORE_TOKENS
    for tokens in dict.fromkeys((usual, *PASSES)):
        if not check.in_time(f"{tokens} tokens a pass", 0 if check.quick else 10):
            continue
        scoring.SCORE_TOKENS = tokens
        _score(scorer, teacher, rollouts[: max(1, len(rollouts) // 8)])
        with measured(check.device) as span:
            _score(scorer, teacher, rollouts)
        check.add(
            "speed, bfloat16",
            model=size,
            tokens_a_pass=tokens,
            tokens=num_tokens(rollouts),
            tokens_per_s=num_tokens(rollouts) / span.seconds,
            share_of_peak=share_of_peak(2 * count_parameters(size, head=False) * num_tokens(rollouts) / span.seconds),
            peak_bytes=span.peak_bytes,
            load_s=first.seconds,
        )
    scoring.SCORE_TOKENS = usual
