"""One trainer rank on a GPU, in this process and without Ray: the loss that plain torch has, speed, memory, resume."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.check import Check
from benchmarks.gpu.work import MODELS as SIZES
from benchmarks.gpu.work import (
    Shape,
    Span,
    build_model,
    count_parameters,
    make_rollouts,
    measured,
    num_tokens,
    scorer_options,
    share_of_peak,
)
from opd.config import PipelineConfig
from opd.models.heads import HeadSource
from opd.records.types import Rollout, Teacher
from opd.settings.yaml_files import validate_section
from opd.stream.schema import TargetRow, write_stream
from opd.train.components import Component
from opd.train.plan import RowSize, plan_micro_batches
from opd.train.rank import RankResult, RankWork, TrainerRank
from opd.train.totals import weigh_rows
from pipelines.specs import rank_options
from teachers.scorers.transformers import TransformersScorer

NOTHING: frozenset[str] = frozenset()


def measure(check: Check) -> None:
    """Speed of a model of usual size, then float32 against plain torch, a resume bit for bit, what many micro-batches cost."""
    with tempfile.TemporaryDirectory() as folder:
        _speed(check, Path(folder), "tiny" if check.quick else "medium")
        if check.in_time("against plain torch", 0 if check.quick else 10):
            _against_torch(check, Path(folder))
        size = "tiny" if check.quick else "small"
        for dtype in ("float32", "bfloat16"):
            if check.in_time(f"resume and accumulation, {dtype}", 0 if check.quick else 20):
                _resume(check, Path(folder), size, dtype)
                _accumulation(check, Path(folder), size, dtype)


class Task:
    """A random student, a random teacher, and what the teacher said of fixed responses."""

    def __init__(self, check: Check, folder: Path, size: str, dtype: str, shape: Shape) -> None:
        self.size, self.dtype, self.device = size, dtype, check.device
        self.held_before = 0
        """Bytes of the GPU that were in use when the last rank was started."""
        self.folder = folder / f"{size}-{dtype}-{shape.rows}"
        kind = getattr(torch, dtype)
        self.student, expert = (
            build_model(self.folder / name, size, dtype=kind, seed=seed, device=check.device)
            for seed, name in enumerate(("student", "expert"))
        )
        self.vocab = SIZES[size]["vocab_size"]
        self.rollouts = make_rollouts(shape, self.vocab)
        teacher = Teacher(name="expert", model_dir=expert, digest=str(expert))
        scorer = TransformersScorer(scorer_options(dtype, self.vocab), device=check.device)
        self.rows = [row for rows in scorer.score(teacher, self.rollouts, {}) for row in rows]
        key = scorer.head_key(teacher)
        self.heads = {key: HeadSource(key=key, rule=scorer.head_rule(teacher), file=scorer.head_file(teacher))}
        self.head_V_D = scorer.head(teacher)

    def start(self, **trainer: Any) -> TrainerRank:
        """A rank of its own; DeepSpeed's process group is the process's."""
        data = {
            "name": "gpu-check",
            "student": {"model": self.student},
            "experts": {"expert": {"model": self.student, "domain": "d"}},
            "domains": {"d": {}},
            "objective": {"chunk": 512},
            "trainer": {"ranks": 1, "dtype": self.dtype, "steps": 100, "samples_per_step": len(self.rollouts)}
            | trainer,
        }
        gc.collect()  # the rank before holds itself in a cycle
        if self.device == "cuda":
            torch.cuda.empty_cache()
            self.held_before = torch.cuda.memory_allocated()
        rank = TrainerRank(rank_options(validate_section(PipelineConfig, data, "gpu-check"), self.vocab), 0)
        rank.start(*rank.open_meeting_point("127.0.0.1"))
        return rank

    def step(self, rank: TrainerRank, step: int, lr: float, micro_batch_tokens: int) -> RankResult:
        """One optimiser step on all rows."""
        self.backward(rank, step, lr, micro_batch_tokens)
        return rank.finish_step(1.0)

    def backward(self, rank: TrainerRank, step: int, lr: float, micro_batch_tokens: int) -> int:
        """All of a step but the optimiser; returns the number of micro-batches."""
        sizes = [RowSize(r.sample_id, r.domain, num_tokens([r])) for r in self.rollouts]
        (plan,) = plan_micro_batches(sizes, 1, micro_batch_tokens)
        weights = weigh_rows(self.rollouts, "token_mean", {})
        components = {"divergence": Component(weights=weights)}
        work = RankWork(step=step, lr=lr, micro_batches=tuple(map(tuple, plan)), components=components)
        rank.begin_step(work, self.heads)
        for index in range(len(plan)):
            rank.accumulate_micro_batch(index, NOTHING, *([_stream(self.rows, self.dtype)] if index == 0 else []))
        return len(plan)


def _stream(rows: Sequence[TargetRow], dtype: str) -> np.ndarray:
    return np.frombuffer(write_stream(rows, dtype), dtype=np.uint8)


def _save(rank: TrainerRank, path: Path) -> str:
    """The hash of what was written."""
    path.mkdir(parents=True)
    rank.begin_save(path)
    files = rank.saved(600)
    assert files is not None, "a checkpoint was not written in ten minutes"
    return files[0].blake3


# ---- Float32 against plain torch -------------------------------------------------------------------------------------


def _against_torch(check: Check, folder: Path) -> None:
    """The losses of a few steps: ours on this device in float32, and plain torch's in float64 on the CPU."""
    task = Task(check, folder, "tiny", "float32", Shape(rows=16, prompt=8, response=32))
    rank, lr, steps = task.start(), 1e-3, 5
    ours = [task.step(rank, step, lr, 128) for step in range(1, steps + 1)]
    for step, (result, (loss, norm)) in enumerate(zip(ours, _plain(task, lr, steps), strict=True), 1):
        check.add(
            "tiny, float32, against plain torch in float64 on the CPU",
            step=step,
            loss=result.loss,
            loss_difference=abs(result.loss - loss) / loss,
            grad_norm=result.grad_norm,
            grad_norm_difference=abs(result.grad_norm - norm) / norm,
        )


def _plain(task: Task, lr: float, steps: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: one sequence at a time, all logits, autograd, torch's AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task.student, dtype=torch.float64).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    scored = {row.rollout.sample_id: row for row in task.rows}
    total = sum(len(r.response_ids) for r in task.rollouts)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = 0.0
        for rollout in task.rollouts:
            loss = _plain_loss(model, rollout, scored[rollout.sample_id], task.head_V_D.double()) / total
            loss.backward()
            value += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        found.append((value, norm))
    return found


def _plain_loss(model: Any, rollout: Rollout, row: TargetRow, head_V_D: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher), summed over the response."""
    start = len(rollout.prompt_ids) - 1
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
    logp_R_V = model(ids).logits[0, start:-1].log_softmax(-1)
    hidden_R_D = (
        torch.frombuffer(bytearray(row.answer.hidden), dtype=torch.float32).view(-1, row.answer.hidden_size).double()
    )
    logq_R_V = (hidden_R_D @ head_V_D.T).log_softmax(-1)
    return (logp_R_V.exp() * (logp_R_V - logq_R_V)).sum()


# ---- Resume ----------------------------------------------------------------------------------------------------------


def _resume(check: Check, folder: Path, size: str, dtype: str) -> None:
    """Two steps, a checkpoint, two more; then a new rank from the checkpoint does these two again.

    Once as a run does it, once with torch's deterministic algorithms.
    """
    task = Task(check, folder / "resume", size, dtype, Shape(rows=12, prompt=24, response=72))
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        place = task.folder / ("deterministic" if deterministic else "usual")
        rank = task.start()
        for step in (1, 2):
            task.step(rank, step, 1e-3, 512)
        _save(rank, place / "middle")
        digests, norms = [], []
        for name in ("straight", "resumed"):
            if name == "resumed":
                rank = task.start()
                rank.load(place / "middle")
            norms.append([task.step(rank, step, 1e-3, 512).grad_norm for step in (3, 4)])
            digests.append(_save(rank, place / name))
        check.add(
            "resume",
            model=size,
            dtype=dtype,
            algorithms="deterministic" if deterministic else "as a run has them",
            bit_equal=digests[0] == digests[1],
            first_grad_norm_equal=norms[0][0] == norms[1][0],
            largest_weight_difference=_apart(place / "straight", place / "resumed"),
        )
    torch.use_deterministic_algorithms(False)


def _apart(one: Path, other: Path) -> float:
    from safetensors.torch import load_file

    a, b = (load_file(path / "rank-0.safetensors") for path in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a if name.startswith("param/"))


# ---- Accumulation ----------------------------------------------------------------------------------------------------


def _accumulation(check: Check, folder: Path, size: str, dtype: str) -> None:
    """The gradient of many micro-batches against that of one: what the type costs in which it is summed."""
    shape = Shape(rows=16, prompt=8, response=24) if check.quick else Shape(rows=128, prompt=16, response=48)
    task = Task(check, folder / "accumulation", size, dtype, shape)
    rank = task.start(lr=0.0)
    gradients: list[dict[str, torch.Tensor]] = []
    counts = []
    for step, tokens in enumerate((10**6, 64), 1):
        counts.append(task.backward(rank, step, 0.0, tokens))
        gradients.append(_gradients(rank))
        rank.finish_step(1.0)
    one, many = gradients
    apart = sum(float((many[n] - one[n]).square().sum()) for n in one) ** 0.5
    size_of_one = sum(float(one[n].square().sum()) for n in one) ** 0.5
    check.add(
        "gradient accumulation",
        model=size,
        dtype=dtype,
        micro_batches=counts[1],
        summed_in=str(getattr(rank._engine.optimizer, "gradient_accumulation_dtype", "unknown")),
        gradient_difference=apart / size_of_one,
    )


def _gradients(rank: TrainerRank) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(param).double().cpu() for name, param in rank._engine.module.lm.named_parameters()}


# ---- Speed -----------------------------------------------------------------------------------------------------------


def _speed(check: Check, folder: Path, size: str) -> None:
    """Steps on fixed rows in bfloat16: does the loss fall, how fast, in how much memory; then a checkpoint."""
    shape = Shape(rows=8, prompt=8, response=24) if check.quick else Shape(rows=64, prompt=64, response=448)
    task = Task(check, folder / "speed", size, "bfloat16", shape)
    for checkpointing, micro_batch_tokens in ((False, 4096), (False, 16384), (True, 16384)):
        name = f"{size}, micro-batches of {micro_batch_tokens} tokens" + (", recomputed" if checkpointing else "")
        if not check.in_time(name, 0 if check.quick else 30):
            continue
        rank = None
        rank = task.start(gradient_checkpointing=checkpointing)
        results, spans = [], []
        for step in range(1, 9):
            with measured(check.device) as span:
                results.append(task.step(rank, step, 1e-4, micro_batch_tokens))
            spans.append(span)
        _tell_speed(check, name, task, results, spans)
    if check.in_time("checkpoint", 0 if check.quick else 60):
        with measured(check.device) as save:
            _save(rank, task.folder / "checkpoint")
        with measured(check.device) as load:
            rank.load(task.folder / "checkpoint")
        check.add("checkpoint", model=size, save_s=save.seconds, load_s=load.seconds)


def _tell_speed(check: Check, name: str, task: Task, results: list[RankResult], spans: list[Span]) -> None:
    seconds = sorted(span.seconds for span in spans[2:])[len(spans[2:]) // 2]
    check.add(
        "speed, bfloat16",
        model=name,
        tokens=num_tokens(task.rollouts),
        step_s=seconds,
        tokens_per_s=num_tokens(task.rollouts) / seconds,
        # Forward and backward; a recomputed forward pass is no useful work.
        share_of_peak=share_of_peak(6 * count_parameters(task.size, head=True) * num_tokens(task.rollouts) / seconds),
        peak_bytes=max((s.peak_bytes - task.held_before for s in spans if s.peak_bytes is not None), default=None),
        first_loss=results[0].loss,
        last_loss=results[-1].loss,
        first_grad_norm=results[0].grad_norm,
    )
