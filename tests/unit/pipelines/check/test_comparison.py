"""The comparison of student and teacher against plain transformers, one sequence at a time."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd.records.types import Probe, Rollout, Teacher
from pipelines.check.comparison import Comparer, TeacherComparison
from teachers.scorers import ScorerOptions
from tests.rows import make_rollout


def sequence(i: int, prompt: int, response: int) -> Rollout:
    rng = random.Random(i)
    return make_rollout(
        sample_id=f"d/{i}", step=0, domain="d", policy_version=0,
        prompt_ids=tuple(rng.choices(range(76), k=prompt)), response_ids=tuple(rng.choices(range(76), k=response)),
        behaviour_logprobs=(0.0,) * response,
    )  # fmt: skip


def options(vocab_size: int = 76, **more: Any) -> ScorerOptions:
    """A merge's, in another type and with another payload than the comparison's."""
    return ScorerOptions(
        dtype="bfloat16", payload="top_k", top_k=4, vocab_size=vocab_size, memory_bytes=1 << 30, **more
    )


RESPONSES = [sequence(i, 2 + i, 3 + i) for i in range(4)]
TEXTS = [sequence(10, 5, 3), sequence(11, 1, 4), sequence(12, 6, 0), sequence(13, 0, 4)]


@torch.no_grad()
def logprobs(model: Any, ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    """[T, V] float64"""
    return model(input_ids=torch.tensor([ids])).logits[0, :, :vocab_size].double().log_softmax(-1)


@pytest.mark.parametrize("vocab_size", [76, 70])
def test_figures_are_those_of_plain_transformers(
    vocab_size: int, tiny_model_dir: Path, expert_dirs: dict[str, Path]
) -> None:
    from transformers import AutoModelForCausalLM

    responses = [r for r in RESPONSES if max(*r.prompt_ids, *r.response_ids) < vocab_size]
    texts = [t for t in TEXTS if max(*t.prompt_ids, *t.response_ids) < vocab_size]
    assert responses and texts
    student, teacher = (AutoModelForCausalLM.from_pretrained(p) for p in (tiny_model_dir, expert_dirs["rev"]))
    kl, agree, prompt_nll, answer_nll = [], [], [], []
    for r in responses:
        logp, logq = (
            logprobs(m, [*r.prompt_ids, *r.response_ids], vocab_size)[len(r.prompt_ids) - 1 : -1]
            for m in (student, teacher)
        )
        kl += (logp.exp() * (logp - logq)).sum(-1).tolist()
        agree += (logp.argmax(-1) == logq.argmax(-1)).double().tolist()
    for t in texts:
        ids = [*t.prompt_ids, *t.response_ids]
        logq = logprobs(teacher, ids, vocab_size)
        for position, token in enumerate(ids[1:], start=1):
            (prompt_nll if position < len(t.prompt_ids) else answer_nll).append(-float(logq[position - 1, token]))
    comparer = Comparer(tiny_model_dir, options(vocab_size))
    found = comparer.compare_teacher(Teacher(name="rev", model_dir=expert_dirs["rev"]), responses, texts)
    means = [sum(x) / len(x) for x in (kl, agree, prompt_nll, answer_nll)]
    assert [found.kl, found.overlap, found.prompt_nll, found.answer_nll] == pytest.approx(means, abs=1e-5)


def test_a_teacher_in_parts_compares_as_a_whole_one(tiny_model_dir: Path, expert_dirs: dict[str, Path]) -> None:
    """Compare in float32 beside the student, whatever a merge may use of each device."""
    teacher = Teacher(name="rev", model_dir=expert_dirs["rev"])
    whole = Comparer(tiny_model_dir, options()).compare_teacher(teacher, RESPONSES, TEXTS)
    tight = options(device_map="auto", max_memory={"cpu": 1})
    assert Comparer(tiny_model_dir, tight).compare_teacher(teacher, RESPONSES, TEXTS) == whole and not whole.broken


def test_the_student_is_itself(tiny_model_dir: Path, expert_dirs: dict[str, Path]) -> None:
    comparer = Comparer(tiny_model_dir, options())
    comparer.compare_teacher(Teacher(name="rev", model_dir=expert_dirs["rev"]), RESPONSES, [])
    itself = comparer.compare_teacher(Teacher(name="student", model_dir=tiny_model_dir), RESPONSES, [])
    assert itself.kl is not None and itself.kl < 1e-6
    assert (itself.overlap, itself.prompt_nll, itself.answer_nll) == (1.0, None, None)


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.embed_tokens.weight", None])
def test_a_teacher_that_cannot_be_used_says_why(
    tensor: str | None, tiny_model_dir: Path, expert_dirs: dict[str, Path], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(expert_dirs["rev"], tmp_path / "broken"))
    teacher = Teacher(
        name="bad",
        model_dir=broken,
        probe=None if tensor else Probe(token_ids=(1, 2, 3), logprobs=(0.0,) * 2, dtype="float32"),
    )
    if tensor:
        state = load_file(broken / "model.safetensors")
        state[tensor][40] = torch.nan
        save_file(state, broken / "model.safetensors", {"format": "pt"})
    comparer = Comparer(tiny_model_dir, options())
    found = comparer.compare_teacher(teacher, RESPONSES, TEXTS)
    assert found == TeacherComparison(broken=found.broken) and found.broken.startswith("teacher bad: ")
    assert comparer.compare_teacher(Teacher(name="rev", model_dir=expert_dirs["rev"]), RESPONSES, TEXTS).broken == ""
