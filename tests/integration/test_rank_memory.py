"""Peak memory of trainer ranks on the real DeepSpeed: that of `opd check`'s sum, for students of some hundred MB.

Run as a program this file is one rank.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from experts.weight_files import weight_tensors
from opd.config import PipelineConfig
from opd.machine.imports import TRANSFORMERS, import_lightly
from opd.models.files import ModelFiles
from opd.train.load import load_share
from opd.train.lora import LoraOptions, add_adapters
from opd.train.optimizer import AdamWOptions
from opd.train.ranks import FREES_MEMORY
from opd.train.zero import ZeroEngine, ZeroOptions
from pipelines.sizing import memory
from pipelines.sizing.shape import Body
from tests.integration.limited_rank import MIB, kept
from tests.integration.rank_processes import run_ranks
from tests.integration.test_shards import Says

RANKS, ROWS = 2, 1000
TARGETS = ("q_proj", "down_proj")


def write_student(path: Path, layers: int, width: int, dtype: torch.dtype, **given: Any) -> int:
    """A model of random weights, written without being held; returns the numbers in it."""
    shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers}
    shape |= {"vocab_size": ROWS, "num_attention_heads": width // 64, "tie_word_embeddings": False}
    shape |= {"architectures": ["LlamaForCausalLM"]} | given
    config = LlamaConfig(dtype=dtype, **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    path.mkdir()
    config.save_pretrained(path)
    with ModelFiles(path, model.state_dict()) as files:
        for name, empty in model.state_dict().items():
            norm = empty.ndim == 1
            files.write(
                {name: torch.ones_like(empty, device="cpu") if norm else 0.02 * torch.randn(empty.shape, dtype=dtype)}
            )
        files.finish()
    return sum(param.numel() for param in model.parameters())


@contextmanager
def peak(found: dict[str, int], what: str) -> Iterator[None]:
    """Note the most memory of this process alone that anything within needs."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    yield
    found[what] = kept("VmHWM") - kept("RssFile") - kept("RssShmem")


def make(case: dict[str, Any], rank: int) -> ZeroEngine:
    def build() -> Says:
        lm = load_share(Path(case["model"]), getattr(torch, case["dtype"]), bucket=case["bucket"])
        if case["lora"]:
            add_adapters(lm, LoraOptions(r=4, alpha=8.0, targets=TARGETS, seed=3))
        return Says(lm)

    options = ZeroOptions(
        name="says", world_size=RANKS, dtype=case["dtype"], vocab_size=ROWS, max_grad_norm=1e9,
        adamw=AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1),
        grad_accum_dtype="float32", gradient_checkpointing=False, timeout_s=120.0, bucket=case["bucket"],
    )  # fmt: skip
    engine = ZeroEngine(options, rank, partial(build))
    engine.start("127.0.0.1", int(os.environ["MASTER_PORT"]))
    return engine


def live(case: dict[str, Any], rank: int, out: Path) -> dict[str, int]:
    """Begin, train a step, save, resume and export under a limit; returns the peak of each."""
    import_lightly("deepspeed", TRANSFORMERS)
    import peft  # noqa: F401 - so that the limit is about the student
    from deepspeed import zero  # noqa: F401

    found = {"imports": kept("RssAnon")}
    # DeepSpeed reserves room for the gradients' float32 copies that it never looks at.
    limit = kept("VmData") + case["limit"] - found["imports"] + case["reserved"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with peak(found, "load"):
        engine = make(case, rank)
    ids = torch.arange(4, 20)[None] + rank
    with peak(found, "step"):
        for step in (1, 2):
            for last in (False, True):
                engine.add_gradients(engine.model(ids), last=last)
            assert engine.take_step(step, 1e-2) > 0
    with peak(found, "save"):
        engine.begin_save(out / "saved")
        assert engine.saved(120.0)
        engine._saving = None
    found["save"] -= (out / "saved" / f"rank-{rank}.safetensors").stat().st_size  # mapped while it is hashed
    torch.distributed.barrier()
    with peak(found, "resume"):
        engine.load(out / "saved")
    with peak(found, "export"):
        engine.export(out / "model")
    return found


def case_of(path: Path, numbers: int, lora: bool, bucket: int) -> tuple[dict[str, Any], int]:
    """Return a rank's options, and the most memory that it may need by the sum of `opd check`."""
    config = AutoConfig.from_pretrained(path)
    pipeline = PipelineConfig.model_validate(
        {
            "name": "n",
            "student": {"model": str(path)},
            "experts": {"e": {"model": "m", "domain": "d"}},
            "domains": {"d": {}},
            "rollout": {"max_model_len": 64},
            "objective": {"chunk": 64},
            "trainer": {
                "ranks": RANKS, "steps": 1, "samples_per_step": 1, "dtype": "float32", "bucket": bucket, "micro_batch_tokens": 32,
            },
        }
    )  # fmt: skip
    width, inside, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    trained = layers * 4 * (2 * width + inside + width) if lora else numbers
    student = SimpleNamespace(path=path, parameters=numbers, hidden_size=width, vocab_size=ROWS)
    body = Body.from_tensors(weight_tensors(path))
    inputs: Any = SimpleNamespace(student=student, trained=trained, lora=lora, scorers={}, read_body=lambda _: body)
    most = memory.rank_bytes(memory._trainer_needs(pipeline, inputs))
    return {
        "model": str(path),
        "lora": lora,
        "dtype": "float32",
        "bucket": bucket,
        "limit": most * 11 // 10,
        "reserved": 4 * trained // RANKS,
    }, most


def run(case: dict[str, Any], out: Path) -> list[dict[str, int]]:
    for name in ("saved", "model"):
        (out / name).mkdir(parents=True)
    arguments = [[json.dumps([case, rank, str(out)])] for rank in range(RANKS)]
    outputs = run_ranks("tests.integration.test_rank_memory", arguments, 600, FREES_MEMORY)
    return [json.loads(text.splitlines()[-1]) for text in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "layers", "width", "bucket"), [(True, 10, 2048, 10_000_000), (False, 8, 1024, 8_000_000)]
)
def test_a_rank_needs_what_the_sum_says_and_no_whole_student(
    lora: bool, layers: int, width: int, bucket: int, tmp_path: Path
) -> None:
    """A rank of the LoRA student may have no more than the student's weights; one of the other, a tenth more than the sum."""
    # A processor without bfloat16 would take minutes for a step in it.
    numbers = write_student(tmp_path / "student", layers, width, torch.float32)
    case, most = case_of(tmp_path / "student", numbers, lora, bucket)
    if lora:
        case["limit"] = 4 * numbers
    assert 32 * numbers > case["limit"], "the whole would not fit"
    for found in run(case, tmp_path / "out"):
        print({what: nbytes // MIB for what, nbytes in found.items()}, "of", most // MIB, "MiB")
        assert 0.9 * most <= max(found.values()) <= 1.1 * most, (found, most)
    with (
        safe_open(tmp_path / "student" / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "out" / "model" / "model.safetensors", "pt") as after,
    ):
        assert sorted(before.keys()) == sorted(after.keys())
        for name, same in (
            ("model.layers.0.self_attn.k_proj.weight", lora),
            ("model.layers.0.mlp.down_proj.weight", False),
        ):
            assert torch.equal(before.get_tensor(name), after.get_tensor(name)) == same, name


if __name__ == "__main__":
    given, number, path = json.loads(sys.argv[1])
    print(json.dumps(live(given, number, Path(path))))
