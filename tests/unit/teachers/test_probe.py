"""A worker knows a registered teacher again by a few log-probs, whatever its payload tells."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from experts.adapter import inspect_expert
from experts.model_dir import inspect_model
from experts.probe import measure_probe
from opd.errors import RunError
from opd.models.heads import head_key
from opd.records.types import Teacher
from teachers.scorers import ScorerOptions
from teachers.worker import TeacherWorker

PAYLOADS = ["hidden_states", "sampled_logprobs", "top_k", "aligned_states"]


def worker(payload: str, dtype: str = "float32", top_k: int = 8) -> TeacherWorker:
    options = ScorerOptions(dtype=dtype, payload=payload, top_k=top_k, vocab_size=76, memory_bytes=1 << 30)
    return TeacherWorker("transformers", options)


@pytest.fixture
def teacher(expert_dirs: dict[str, Path]) -> Teacher:
    """With the probe of its registration."""
    record = measure_probe(inspect_model(expert_dirs["rev"]))
    assert record is not None
    return Teacher(name="rev", model_dir=expert_dirs["rev"], probe=record.probe)


def changed(teacher: Teacher, path: Path, scale: float) -> Teacher:
    """A copy with noise of `scale` times its own size on one matrix."""
    shutil.copytree(teacher.model_dir, path)
    state = load_file(path / "model.safetensors")
    weight = state["model.layers.0.mlp.down_proj.weight"]
    weight += scale * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    save_file(state, path / "model.safetensors", {"format": "pt"})
    return dataclasses.replace(teacher, model_dir=path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_registered_teacher_is_known_again(payload: str, dtype: str, teacher: Teacher) -> None:
    head = worker(payload, dtype).describe_head(teacher)
    assert head.file is not None
    head_V_D = head.file.read()
    assert head_V_D is not None and head_key(head_V_D, head.rule) == head.key


def test_the_head_of_an_untied_model_lies_under_its_own_name(make_model_dir: Any, tmp_path: Path) -> None:
    untied = Teacher(name="untied", model_dir=make_model_dir(tmp_path / "untied", seed=5, tie=False))
    head = worker("hidden_states").describe_head(untied)
    assert head.file is not None and head.file.names == ("lm_head.weight",)
    head_V_D = head.file.read()
    assert head_V_D is not None and head_key(head_V_D, head.rule) == head.key


@pytest.mark.parametrize("payload", PAYLOADS)
def test_another_teacher_in_its_place_stops_the_run(
    payload: str, teacher: Teacher, expert_dirs: dict[str, Path]
) -> None:
    swapped = dataclasses.replace(teacher, model_dir=expert_dirs["up"])
    with pytest.raises(RunError, match=r"teacher rev: log-probs differ by \d+\.\d+ nats .*garbled or swapped"):
        worker(payload).describe_head(swapped)
    worker(payload).describe_head(dataclasses.replace(swapped, probe=None))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_one_garbled_matrix_stops_the_run(payload: str, teacher: Teacher, tmp_path: Path) -> None:
    worker(payload).describe_head(changed(teacher, tmp_path / "hardly", 1e-3))
    with pytest.raises(RunError, match="teacher rev: log-probs differ"):
        worker(payload).describe_head(changed(teacher, tmp_path / "garbled", 3.0))


@pytest.mark.parametrize("shift", [0.04, 0.06, 0.19, 0.21, float("nan")])
@pytest.mark.parametrize(("registered", "dtype"), [("float32", "float32"), ("bfloat16", "float32")])
def test_the_coarser_type_decides_how_near_is_near(registered: str, dtype: str, shift: float, teacher: Teacher) -> None:
    assert teacher.probe is not None
    probe = dataclasses.replace(
        teacher.probe, logprobs=tuple(x + shift for x in teacher.probe.logprobs), dtype=registered
    )
    other = dataclasses.replace(teacher, probe=probe)
    if shift < (0.05 if registered == "float32" else 0.2):
        worker("sampled_logprobs", dtype).describe_head(other)
    else:
        with pytest.raises(RunError, match="teacher rev: log-probs differ by"):
            worker("sampled_logprobs", dtype).describe_head(other)


def test_states_that_are_not_finite_name_the_teacher(teacher: Teacher, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(teacher.model_dir, tmp_path / "broken"))
    state = load_file(broken / "model.safetensors")
    state["model.norm.weight"][3] = torch.nan
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match="teacher rev: hidden states are not finite on the probe"):
        worker("hidden_states").describe_head(dataclasses.replace(teacher, model_dir=broken))


def test_a_top_k_payload_counts_only_what_its_bounds_exclude(teacher: Teacher) -> None:
    # Far too unlikely is within the bound "at most the last of the likeliest"; far too likely is not.
    assert teacher.probe is not None
    for shift, refused in ((-50.0, False), (50.0, True)):
        one = min(range(31), key=lambda i: teacher.probe.logprobs[i])  # not among its likeliest
        logprobs = [x + shift * (i == one) for i, x in enumerate(teacher.probe.logprobs)]
        other = dataclasses.replace(teacher, probe=dataclasses.replace(teacher.probe, logprobs=tuple(logprobs)))
        if refused:
            with pytest.raises(RunError, match="differ"):
                worker("top_k").describe_head(other)
        else:
            worker("top_k").describe_head(other)


# Adapters


@pytest.fixture
def lora(tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> Teacher:
    """An adapter with the probe of its registration."""
    adapter = make_adapter(tmp_path / "adapter", tiny_model_dir)
    record = measure_probe(*inspect_expert(adapter))
    assert record is not None
    return Teacher(name="lora", model_dir=tiny_model_dir, adapter_dir=adapter, probe=record.probe)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_registered_adapter_is_known_again(payload: str, dtype: str, lora: Teacher) -> None:
    worker(payload, dtype).describe_head(lora)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_another_base_or_adapter_in_its_place_stops_the_run(
    payload: str,
    lora: Teacher,
    tiny_model_dir: Path,
    expert_dirs: dict[str, Path],
    make_adapter: Callable[..., Path],
    tmp_path: Path,
) -> None:
    scoring = worker(payload, top_k=60)  # eight tell too little of so small a difference
    other = make_adapter(tmp_path / "other", tiny_model_dir, seed=7)
    scaled = make_adapter(tmp_path / "scaled", tiny_model_dir, lora_alpha=-8)
    for swap in (
        {"model_dir": expert_dirs["up"]},
        {"adapter_dir": other},
        {"adapter_dir": scaled},
        {"adapter_dir": None},
    ):
        with pytest.raises(RunError, match=r"teacher lora: log-probs differ by \d+\.\d+ nats .*garbled or swapped"):
            scoring.describe_head(dataclasses.replace(lora, **swap))
    with pytest.raises(RunError, match=f"under {tiny_model_dir} or {other}$"):
        scoring.describe_head(dataclasses.replace(lora, adapter_dir=other))
    scoring.describe_head(lora)
