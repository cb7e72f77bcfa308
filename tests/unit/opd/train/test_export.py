"""Buckets carry what the files would have, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opd.models.buckets import ALIGNMENT
from opd.models.weights import load_causal_lm
from opd.train import export
from opd.train.export import FileTensors, WeightSender, write_model
from opd.train.lora import list_plain_weights

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is sharded. Notes how many parameters are whole at a time."""
    together: list[int] = []

    def gathered(params: Any) -> Any:
        together.append(len(params))
        return nullcontext()

    monkeypatch.setattr(export, "gather_parameters", gathered)
    return together


def sent(lm: Any, nbytes: int, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    sending = WeightSender(FileTensors(lm, list_plain_weights(lm), dtype, complete=True), nbytes)
    count = sending.count
    buckets = [sending.gather_bucket(sends=True) for _ in range(count)]
    return [dict(bucket.tensors()) for bucket in buckets if bucket is not None]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm4_moe"])
def test_buckets_have_the_tensors_of_the_files(
    tmp_path: Path, make_model_dir: Make, make_mixture_dir: Make, family: str
) -> None:
    """Also those of fused experts, and the bias of a router, which is no parameter."""
    student = tmp_path / "student"
    made = make_model_dir(student) if family == "llama" else make_mixture_dir(student, family)
    lm = load_causal_lm(made, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        written = tmp_path / str(dtype)
        written.mkdir()
        write_model(FileTensors(lm, list_plain_weights(lm), dtype, complete=True), written)
        wanted = load_file(written / "model.safetensors")
        for nbytes in (1, 50_000, 1 << 30):
            found = {name: tensor for bucket in sent(lm, nbytes, dtype) for name, tensor in bucket.items()}
            assert set(found) == set(wanted)
            for name, tensor in wanted.items():
                assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def bytes_of(bucket: dict[str, torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in bucket.values())


@pytest.mark.parametrize("limit", [1, 40_000])
def test_a_bucket_is_no_larger_than_it_may_be_or_than_the_largest_tensor(
    tmp_path: Path, make_model_dir: Make, one_process: list[int], limit: int
) -> None:
    lm = load_causal_lm(make_model_dir(tmp_path / "student"), torch.float32)
    buckets = sent(lm, limit)
    sizes = [bytes_of(bucket) for bucket in buckets]
    room = max(limit, *(tensor.nbytes for bucket in buckets for tensor in bucket.values()))
    assert max(sizes) <= room
    assert any(len(bucket) > 1 for bucket in buckets) and len(buckets) > 2
    pairs = zip(sizes[:-1], buckets[1:], strict=True)
    assert all(size + next(iter(bucket.values())).nbytes > room for size, bucket in pairs), "as full as they may be"
    assert set(one_process) == {1}, "no more is whole than what is copied"


def test_experts_that_lie_in_one_weight_are_gathered_once_and_sent_in_several_buckets(
    tmp_path: Path, make_mixture_dir: Make, one_process: list[int]
) -> None:
    lm = load_causal_lm(make_mixture_dir(tmp_path / "student", "qwen3_moe"), torch.float32)
    fused = [param for name, param in lm.named_parameters() if name.endswith("experts.gate_up_proj")]
    limit = fused[0].nbytes // 2
    tensors = FileTensors(lm, list_plain_weights(lm), torch.float32, complete=True)
    sending = WeightSender(tensors, limit)
    buckets = [bucket for _ in range(sending.count) if (bucket := sending.gather_bucket(sends=True)) is not None]
    assert len(one_process) == len(tensors.groups), "each weight is gathered once"
    names = [[place.name for place in bucket.slots] for bucket in buckets]
    first = [any("layers.0" in name and "experts.0.gate_proj" in name for name in held) for held in names].index(True)
    assert len(buckets[first].data) <= limit and "experts" in names[first + 1][0], "the next one has the rest of them"
    files = [name for group in tensors.planned_tensors() for name in group]
    assert [name for held in names for name in held] == files, "in the order of the files"


def test_a_rank_that_only_gathers_has_no_bucket(tmp_path: Path, make_model_dir: Make, one_process: list[int]) -> None:
    lm = load_causal_lm(make_model_dir(tmp_path / "student"), torch.float32)
    tensors = FileTensors(lm, list_plain_weights(lm), torch.float32, complete=True)
    sending = WeightSender(tensors, 40_000)
    assert [sending.gather_bucket(sends=False) for _ in range(sending.count)] == [None] * sending.count
    assert len(one_process) == len(tensors.groups), "it takes part in every one"
