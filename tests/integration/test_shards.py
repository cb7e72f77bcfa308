"""Ranks that keep their share of each weight as it is read, on the real DeepSpeed: nothing is other than if each had read the whole.

Run as a program this file is one rank.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from opd.models.weights import iterate_persistent_buffers, load_causal_lm, to_files
from opd.train.load import load_share
from opd.train.lora import LoraOptions, add_adapters
from opd.train.optimizer import AdamWOptions
from opd.train.shards import compute_part_sizes
from opd.train.zero import ZeroEngine, ZeroOptions
from tests.integration.rank_processes import run_ranks
from tests.models.families import FAMILIES, build_models

ROOT = Path(__file__).parents[2]
IDS = torch.arange(4, 40)[None]


class Says(nn.Module):
    """A loss in which every weight takes part."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.lm(input_ids=ids, use_cache=False).logits.float().square().mean()
        return loss


def build(load: Callable[[Path, torch.dtype], Any], case: dict[str, Any], dtype: torch.dtype) -> Says:
    lm = load(Path(case["model"]), dtype)
    if case["lora"]:
        add_adapters(lm, LoraOptions(r=4, alpha=8.0, targets=("q_proj", "down_proj"), seed=3))
    return Says(lm)


def engine(load: Callable[[Path, torch.dtype], Any], case: dict[str, Any], rank: int, ranks: int) -> ZeroEngine:
    options = ZeroOptions(
        name="says", world_size=ranks, dtype=case["dtype"], vocab_size=76, max_grad_norm=1e9,
        adamw=AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1),
        grad_accum_dtype="float32", gradient_checkpointing=False, timeout_s=60.0, bucket=case["bucket"],
    )  # fmt: skip
    made = ZeroEngine(options, rank, partial(build, load, case, getattr(torch, case["dtype"])))
    made.start("127.0.0.1", int(os.environ["MASTER_PORT"]))
    return made


def held(made: ZeroEngine) -> dict[str, Any]:
    """All that a rank holds: its parts of the weights, and the buffers, among them those that no file has."""
    lm = made.model.module.lm
    parts, ranks = {}, made._options.world_size
    for name, param in lm.named_parameters():
        assert param.ds_tensor.numel() == -(-param.ds_numel // ranks), name
        kept = compute_part_sizes(param.ds_numel, ranks)[made._rank]  # nothing says what the padding is
        parts[name] = (tuple(param.ds_shape), param.requires_grad, param.ds_tensor[:kept].clone())
    return parts | {name: (tuple(buffer.shape), None, buffer.clone()) for name, buffer in lm.named_buffers()}


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    def bits(tensor: Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    for name in one:
        (shape, trained, tensor), (shape_2, trained_2, tensor_2) = one[name], two[name]
        assert (shape, trained, tensor.dtype) == (shape_2, trained_2, tensor_2.dtype), name
        if bits(tensor) != bits(tensor_2):
            return False
    return one.keys() == two.keys()


def whole_export(made: ZeroEngine, path: Path) -> None:
    """Everything on one rank, then to files at once."""
    from huggingface_hub import save_torch_state_dict

    from opd.train.export import gather_parameters
    from opd.train.lora import list_plain_weights

    lm, state = made.model.module.lm, {}
    for weight in list_plain_weights(lm):
        with gather_parameters(weight.params):
            state[weight.name] = weight.read_tensor().to("cpu", made._dtype, copy=True)
    state |= {name: buffer.clone() for name, buffer in iterate_persistent_buffers(lm)}
    if made._rank == 0:
        save_torch_state_dict(to_files(lm, state), path, max_shard_size="5GB")
        lm.config.save_pretrained(path)


def compare(case: dict[str, Any], out: Path, rank: int, ranks: int) -> None:
    """Compare both ways at the start, in two steps and after them; then export both, and resume one."""
    made = [engine(load, case, rank, ranks) for load in (load_causal_lm, load_share)]
    assert same(*map(held, made)), "at the start"
    for step in (1, 2):
        norms = []
        for one in made:
            for index in range(2):
                one.add_gradients(one.model(IDS + rank + index + step), last=index == 1)
            norms.append(one.take_step(step, 1e-2))
        assert norms[0] == norms[1] > 0, norms
    assert same(*map(held, made)), "after two steps"
    names = ("plain", "shards", "of_whole")
    for name in names:
        (out / name).mkdir(exist_ok=True, parents=True)
    whole_export(made[1], out / "plain")
    made[1].export(out / "shards")
    made[0].export(out / "of_whole")
    if case["saves"]:
        (out / "saved").mkdir(exist_ok=True)
        made[1].begin_save(out / "saved")
        assert made[1].saved(60.0)
        torch.distributed.barrier()
        again = engine(load_share, case, rank, ranks)
        again.load(out / "saved")
        assert same(held(made[1]), held(again)), "resumed"


def ranks_of(ranks: int, cases: list[dict[str, Any]], out: Path) -> None:
    run_ranks(
        "tests.integration.test_shards", [[json.dumps([cases, str(out), rank, ranks])] for rank in range(ranks)], 240
    )


@pytest.fixture(scope="module")
def cases(make_model_dir: Any, make_mixture_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("models")
    tied, untied = make_model_dir(root / "tied"), make_model_dir(root / "untied", tie=False)
    both = make_model_dir(root / "both")  # says that its head is tied, and has another one in its files
    files = load_file(both / "model.safetensors")
    save_file(
        files | {"lm_head.weight": files["model.embed_tokens.weight"] + 1}, both / "model.safetensors", {"format": "pt"}
    )
    plain = {"lora": False, "dtype": "float32", "saves": False, "bucket": None}
    return [
        plain | {"model": str(tied), "saves": True},
        plain | {"model": str(both)},
        plain | {"model": str(untied), "dtype": "bfloat16", "lora": True, "bucket": 5000},
        plain | {"model": str(make_mixture_dir(root / "deepseek_v3", "deepseek_v3")), "dtype": "bfloat16"},
        plain | {"model": str(make_mixture_dir(root / "qwen3_moe", "qwen3_moe")), "saves": True},
    ]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_share_is_what_the_whole_would_have_given(ranks: int, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    cases = cases if ranks > 1 else cases[:3:2]
    ranks_of(ranks, cases, tmp_path)
    for number, case in enumerate(cases):
        out = tmp_path / str(number)
        plain, shards, of_whole = (
            {file.name: file.read_bytes() for file in (out / name).iterdir()}
            for name in ("plain", "shards", "of_whole")
        )
        assert set(plain) == {"config.json", "model.safetensors"}
        assert shards == of_whole == plain, case
        files = load_file(out / "shards" / "model.safetensors")
        assert ("lm_head.weight" in files) == ("/tied" not in case["model"])


def compare_families(root: Path) -> dict[str, str]:
    """Family -> how it is read or written otherwise in shares. At one rank a share is the whole."""
    import deepspeed
    from transformers.core_model_loading import revert_weight_conversion

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    wrong = {}
    for name, family in FAMILIES.items():
        student = build_models(family, root / name.replace(" ", "_"))["student"]
        for dtype in (torch.float32, torch.bfloat16):
            whole, share = load_causal_lm(student, dtype), load_share(student, dtype)
            params = {n: p.detach().to(dtype) for n, p in whole.named_parameters()}
            if list(params) != [n for n, _ in share.named_parameters()]:
                wrong[name] = "names"
            if any(not torch.equal(params[n].flatten(), p.ds_tensor) for n, p in share.named_parameters()):
                wrong[name] = f"weights in {dtype}"
            buffers = dict(share.named_buffers())
            if any(not torch.equal(b, buffers[n]) or b.dtype != buffers[n].dtype for n, b in whole.named_buffers()):
                wrong[name] = f"buffers in {dtype}"
            if whole.config.to_dict() != share.config.to_dict():
                wrong[name] = "config"
            state = params | dict(iterate_persistent_buffers(whole))
            files, wanted = to_files(share, state), revert_weight_conversion(whole, dict(state))
            if list(files) != list(wanted) or any(not torch.equal(files[n], wanted[n]) for n in wanted):
                wrong[name] = "files"
    return wrong


@pytest.mark.slow
def test_every_family_is_read_and_written_the_same(tmp_path: Path) -> None:
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, "-m", "tests.integration.test_shards", json.dumps(str(tmp_path))]
    done = subprocess.run(
        command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if isinstance(given, str):
        print(json.dumps(compare_families(Path(given))))
    else:
        for number, case in enumerate(given[0]):
            compare(case, Path(given[1]) / str(number), given[2], given[3])
