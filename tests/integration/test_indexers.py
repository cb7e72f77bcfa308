"""Indexers that learn in the student's steps, on the real DeepSpeed; and a whole merge in which sharing begins.

Run as a program this file is one rank.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from opd.config.sections import MAX_UNSHARDED
from opd.losses.reverse_kl import ReverseKL
from opd.train.batch import MicroBatch
from opd.train.load import load_share
from opd.train.optimizer import AdamWOptions
from opd.train.shards import Shards
from opd.train.student import Student
from opd.train.zero import ZeroEngine, ZeroOptions
from tests.integration.rank_processes import run_ranks
from tests.integration.test_merge import assert_the_same_merge, kill_when_logged, opd, records, write
from tests.models.row import write_prompts
from tests.sparse_models import build_sparse_model_dir
from tests.unit.opd.indexers.test_student import SHARED, SPEC, make_batch, make_inputs

WIDE = 4096
RANKS = 2


def build_student(model_dir: Path, *, share: bool) -> Student:
    from opd.models.weights import load_causal_lm

    lm = load_share(model_dir, torch.float32) if share else load_causal_lm(model_dir, torch.float32)
    return Student(lm, ReverseKL(), chunk=8, vocab_size=70, indexers=SPEC)


def compare(model_dir: Path, rank: int, recompute: bool) -> None:
    """Each rank has a sample in the first micro-batch, and one alone has one in the second. Their gradients are those of a student
    that is whole, and has all samples."""
    options = ZeroOptions(
        name="student", world_size=RANKS, dtype="float32", vocab_size=70, max_grad_norm=1e9,
        adamw=AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1), grad_accum_dtype="float32",
        gradient_checkpointing=recompute, timeout_s=60.0,
    )  # fmt: skip
    engine = ZeroEngine(options, rank, partial(build_student, model_dir, share=True))
    engine.start("127.0.0.1", int(os.environ["MASTER_PORT"]))
    batches = [["a", "b"], ["b", ""]]
    for index, samples in enumerate(batches):
        loss, _ = engine.model(*make_step_inputs(samples[rank], RANKS))
        engine.add_gradients(loss, last=index == len(batches) - 1)
    found = engine.local_gradients()
    whole = build_student(model_dir, share=False)
    for samples in ("a", "b", "b"):
        whole(*make_step_inputs(samples, 1))[0].backward()
    names = [name for name, _ in engine._trained_parameters()]
    params = dict(whole.lm.named_parameters())
    for name, part in zip(names, found, strict=True):
        gradient = params[name].grad
        assert gradient is not None and (gradient.norm() > 0 or ".mlp." in name), name
        own = torch.cat([gradient.flatten(), torch.zeros(part.numel())])[rank * part.numel() :][: part.numel()]
        assert (own - part).abs().max() <= 1e-5 * gradient.abs().max(), name


def make_step_inputs(samples: str, ranks: int) -> tuple[MicroBatch, dict[str, Any], dict[str, Tensor]]:
    batch = make_batch(samples=samples, dtype=torch.float32)
    heads, weight_N = make_inputs(batch)
    return batch, heads, {"divergence": weight_N * ranks}


def test_ranks_add_up_the_gradients_of_indexers(tmp_path: Path) -> None:
    """In layers that DeepSpeed gathers as one, and in wide ones that it gathers module by module; kept and recomputed."""
    assert 48 * 32 < MAX_UNSHARDED < WIDE * 32
    settings = {"indexer_types": SHARED, "mlp_layer_types": ["dense"] * 4}
    for width in (48, WIDE):
        build_sparse_model_dir(tmp_path / str(width), layers=4, intermediate_size=width, **settings)
    cases = [(str(tmp_path / str(width)), recompute) for width in (48, WIDE) for recompute in (False, True)]
    run_ranks("tests.integration.test_indexers", [[json.dumps([cases, rank])] for rank in range(RANKS)], 240)


def make_pipeline(root: Path) -> dict[str, Any]:
    """A student with four indexers, which keeps two, and the same model as it was before some noise as its expert."""
    expert = build_sparse_model_dir(root / "expert", layers=4)
    student = build_sparse_model_dir(root / "student", layers=4)
    weights = load_file(student / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            weights[name] = tensor + 0.03 * torch.randn(tensor.shape, generator=generator)
    save_file(weights, student / "model.safetensors", {"format": "pt"})
    prompts = write_prompts(root / "d.jsonl", "say")
    rows = [json.loads(line) | {"answer": "a"} for line in prompts.read_text().splitlines()]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "shared",
        "student": {"model": str(student), "indexers": {"pattern": "FSFS"}},
        "experts": {"e": {"model": str(expert), "domain": "d"}},
        "domains": {"d": {"prompts": str(prompts), "eval": {"holdout": 0.2, "verifier": "exact_match"}}},
        "rollout": {"engine": "transformers", "max_new_tokens": 12, "max_model_len": 64},
        "trainer": {"ranks": 2, "steps": 6, "samples_per_step": 16, "lr": 4.0e-3, "micro_batch_tokens": 256},
        "checkpoint": {"every": 2},
        "logging": {"tensorboard": False},
    }


@torch.no_grad()
def read_trainer(student: Path, run: Path) -> Any:
    """The weights of the last checkpoint, in a model that plain transformers loads from `student`."""
    lm = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    with Shards(max((run / "checkpoints").glob("step-*"))) as shards:
        for name, param in lm.named_parameters():
            param.copy_(shards.read_slice(f"param/{name}", param.numel(), 0, param.numel()).view_as(param))
    return lm.eval()


@pytest.mark.slow
@torch.no_grad()
def test_a_merge_in_which_sharing_begins(tmp_path: Path) -> None:
    """A whole one; and one that is killed and resumed, which ends with the same bits."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    file = write(tmp_path, make_pipeline(tmp_path))
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = records(whole)
    for key in ("loss", "indexer_loss"):
        assert 0 < steps[-1][key] < 0.9 * steps[0][key], key
    assert max(record["probe_gap"] for record in steps) < 1e-4
    curve = json.loads((whole / "report.json").read_text())["curves"]["indexer_loss"]
    assert curve == pytest.approx([record["indexer_loss"] for record in steps])

    config = json.loads((whole / "model" / "config.json").read_text())
    assert config["index_topk_pattern"] == "FSFS" and config["indexer_types"] == ["full", "shared"] * 2
    model, info = AutoModelForCausalLM.from_pretrained(whole / "model", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    ids = torch.randint(4, 70, (2, 40), generator=torch.Generator().manual_seed(1))
    assert model(ids).logits.equal(read_trainer(whole / "student", whole)(ids).logits)
    indexers = [name for name in load_file(whole / "student" / "model.safetensors") if ".indexer." in name]
    start, merged = (load_file(d / "model.safetensors") for d in (whole / "student", whole / "model"))
    assert len(indexers) == 2 * 5 and not any(start[name].equal(merged[name]) for name in indexers)

    kill_when_logged(file, broken, 4)
    resumed = opd("merge", "--resume", broken, cwd=tmp_path)
    assert resumed.returncode == 0 and "resumed from step 2" in resumed.stderr, resumed.stderr
    assert_the_same_merge(whole, broken)
    assert [r["indexer_loss"] for r in records(broken)] == [r["indexer_loss"] for r in steps]

    done = opd("evaluate", "--matrix", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    matrix = json.loads((whole / "evaluation" / "matrix.json").read_text())["models"]
    for name, taken in (("before", "student before"), ("after", "merged")):
        exam = json.loads((whole / "evaluation" / f"{name}.json").read_text())
        assert matrix[taken]["weights"] == exam["weights"], "the same student takes the exam"
    assert matrix["student before"]["weights"] != matrix["e"]["weights"] != matrix["merged"]["weights"]


@pytest.mark.slow
def test_a_second_round_goes_on_with_the_pattern(tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path)
    pipeline["trainer"] |= {"ranks": 1, "steps": 2}
    file, run = write(tmp_path, pipeline | {"rounds": 2}), tmp_path / "run"
    checked = opd("check", file, cwd=tmp_path)
    # Untrained experts are worth no merge, which is what exit code 1 says here.
    assert checked.returncode == 1 and "1 teachers compared with the student" in checked.stderr, checked.stderr
    done = opd("merge", file, "--run-dir", run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (run / f"round-{number}" for number in (1, 2))
    assert (first / "student").is_dir() and not (second / "student").exists()
    assert all(record["indexer_loss"] > 0 for folder in (first, second) for record in records(folder))
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["index_topk_pattern"] == "FSFS"
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (first, second)]
    indexers = [name for name in weights[0] if ".indexer." in name]
    assert len(indexers) == 2 * 5 and not any(weights[0][name].equal(weights[1][name]) for name in indexers)


if __name__ == "__main__":
    every_case, own_rank = json.loads(sys.argv[1])
    for model, recomputes in every_case:
        compare(Path(model), own_rank, recomputes)
