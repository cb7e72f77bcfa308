"""The worker that generates with transformers: its weights, and that it can stand where a `VLLMWorker` stands."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opd.models.buckets import Bucket, BucketWriter, count_padded_bytes
from opd.rollouts.transformers_worker import TransformersWorker
from opd.rollouts.worker import EngineOptions, GenerateRequest, VLLMWorker
from tests.conftest import build_model_dir, build_tokenizer
from tests.sparse_models import build_sparse_model_dir

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20, 21, 22]]


def options(model_dir: Path) -> EngineOptions:
    return EngineOptions(
        model_dir=model_dir,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        gpu_memory_utilization=0.5,
        vocab_size=len(build_tokenizer()),
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "first": build_sparse_model_dir(root / "first", layers=2, seed=0),
        "second": build_sparse_model_dir(root / "second", layers=2, seed=1),
        "llama": build_model_dir(root / "llama", seed=3),  # with a tied head
    }


def bucket_of(tensors: dict[str, torch.Tensor]) -> Bucket:
    writer = BucketWriter(sum(count_padded_bytes(tensor) for tensor in tensors.values()))
    writer.add(tensors)
    return writer.finish_bucket()


def stream(worker: TransformersWorker, model_dir: Path, tensors: dict[str, torch.Tensor], *, whole: bool) -> None:
    worker.begin_stream(model_dir, whole=whole)
    names = sorted(tensors)
    for part in (names[::2], names[1::2]):
        worker.take_bucket(bucket_of({name: tensors[name] for name in part}))
    worker.finish_stream()


@torch.no_grad()
def plain_logprobs(model_dir: Path) -> list[list[float]]:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = []
    for ids in SEQUENCES:
        logprobs = lm(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        answers.append(logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    return answers


def assert_holds(worker: TransformersWorker, model_dir: Path) -> None:
    for ours, theirs in zip(worker.logprobs(SEQUENCES), plain_logprobs(model_dir), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(("start", "pushed"), [("first", "second"), ("first", "llama"), ("llama", "first")])
@pytest.mark.parametrize("way", ["files", "stream"])
def test_new_weights_arrive(models: dict[str, Path], start: str, pushed: str, way: str) -> None:
    worker = TransformersWorker(options(models[start]), [2])
    assert_holds(worker, models[start])
    if way == "files":
        worker.load(models[pushed])
    else:
        stream(worker, models[pushed], load_file(models[pushed] / "model.safetensors"), whole=True)
    assert_holds(worker, models[pushed])
    (out,) = worker.generate([GenerateRequest(token_ids=(5, 6), max_tokens=3, temperature=1.0, seed=1)])
    assert len(out.token_ids) <= 3


@pytest.mark.parametrize("way", ["files", "stream"])
def test_weights_that_do_not_come_are_those_of_the_base(models: dict[str, Path], tmp_path: Path, way: str) -> None:
    """As of a LoRA student, whose adapted weights alone are pushed."""
    changed = {
        name: tensor
        for name, tensor in load_file(models["second"] / "model.safetensors").items()
        if "self_attn.q_b_proj" in name
    }
    mixed = tmp_path / "mixed"
    shutil.copytree(models["first"], mixed)
    save_file(load_file(mixed / "model.safetensors") | changed, mixed / "model.safetensors", {"format": "pt"})
    worker = TransformersWorker(options(models["second"]), [2])
    if way == "files":
        shutil.copytree(models["first"], tmp_path / "part", ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(changed, tmp_path / "part" / "model.safetensors", {"format": "pt"})
        worker.load(tmp_path / "part", base=models["first"])
    else:
        stream(worker, models["first"], changed, whole=False)
    assert_holds(worker, mixed)


def test_a_stream_that_broke_off_is_forgotten(models: dict[str, Path]) -> None:
    worker = TransformersWorker(options(models["first"]), [2])
    worker.begin_stream(models["second"], whole=True)
    worker.take_bucket(bucket_of({"lm_head.weight": torch.zeros(3)}))
    stream(worker, models["second"], load_file(models["second"] / "model.safetensors"), whole=True)
    assert_holds(worker, models["second"])
    worker.finish_stream()  # nothing is coming


@pytest.mark.parametrize(
    "name", ["generate", "logprobs", "load", "begin_stream", "take_bucket", "finish_stream", "__init__"]
)
def test_methods_are_called_like_those_of_vllm(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (TransformersWorker, VLLMWorker))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_the_engine_spawns_these_workers(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from opd import cluster
    from opd.rollouts.transformers import TransformersRolloutEngine
    from opd.rollouts.vllm import RolloutSpec

    spawned: list[Any] = []
    monkeypatch.setattr(cluster, "spawn_worker", lambda cls, *_, **__: spawned.append(cls))
    spec = RolloutSpec(
        engine=options(models["first"]),
        stop_token_ids=(2,),
        workers=2,
        max_new_tokens=4,
        max_answer_tokens=4,
        start_timeout_s=1.0,
        timeout_s=1.0,
    )
    TransformersRolloutEngine(spec, build_tokenizer())
    assert spawned == [TransformersWorker, TransformersWorker]
