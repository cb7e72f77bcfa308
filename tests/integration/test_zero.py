"""A ZeRO engine of one rank on the real DeepSpeed: what it leaves out, and that its steps are plain AdamW's all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opd.models.linear_kernels import use_quick_products
from opd.train.optimizer import AdamWOptions, build_adamw
from opd.train.zero import ZeroEngine, ZeroOptions

ADAMW = AdamWOptions(betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
WIDTH, STEPS, MICRO_BATCHES = 96, 3, 2
ROOT = Path(__file__).parents[2]


class Body(nn.Module):
    """One layer below DeepSpeed's bound for weights that stay whole, one above."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1200, bias=False)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) / 9)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = Body()

    def forward(self, input_N_D: Tensor) -> Tensor:
        loss: Tensor = self.lm.large(self.lm.small(input_N_D).tanh()).square().mean()
        return loss


def batches(step: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(step)
    return [torch.randn(7, WIDTH, generator=gen) for _ in range(MICRO_BATCHES)]


def by_zero() -> dict[str, Tensor]:
    """The weights after a few steps, and what must hold between them."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from opd.train.export import gather_parameters

    engine = ZeroEngine(
        ZeroOptions(
            name="squares", world_size=1, dtype="float32", vocab_size=9, adamw=ADAMW, max_grad_norm=1e9,
            grad_accum_dtype="float32", gradient_checkpointing=False, timeout_s=60.0,
        ),
        0,
        Squares,
    )  # fmt: skip
    engine.start(*engine.open_meeting_point("127.0.0.1"))
    optimizer = engine.model.optimizer
    handed: set[int] = set()

    def note(stepped: Any, *_: Any) -> None:
        handed.update(p.grad.untyped_storage().data_ptr() for group in stepped.param_groups for p in group["params"])

    optimizer.optimizer.register_step_pre_hook(note)
    for step in range(1, STEPS + 1):
        for index, batch in enumerate(batches(step)):
            engine.add_gradients(engine.model(batch), last=index == MICRO_BATCHES - 1)
        engine.take_step(step, 1e-2)
    summed_in = optimizer.grad_partitions_flat_buffer.untyped_storage().data_ptr()
    assert handed == {summed_in}, "AdamW reads gradients where they were summed"
    lm = engine.model.module.lm
    before = {name: param.ds_status for name, param in lm.named_parameters()}
    assert before["small.weight"] is ZeroParamStatus.AVAILABLE, "it stays whole between steps"
    assert before["large.weight"] is ZeroParamStatus.NOT_AVAILABLE
    found = {}
    for name, param in lm.named_parameters():
        with gather_parameters([param]):
            found[name] = param.detach().clone()
    assert {name: param.ds_status for name, param in lm.named_parameters()} == before
    return found


def by_hand() -> dict[str, Tensor]:
    module = Squares()
    # As every rank does; without it the last bits differ on some cores.
    use_quick_products(module.lm, torch.device("cpu"))
    optimizer = build_adamw(module, ADAMW, lr=1e-2)
    for step in range(1, STEPS + 1):
        for batch in batches(step):
            module(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in module.lm.named_parameters()}


def test_one_rank_takes_the_steps_of_plain_adamw_and_compiles_nothing(tmp_path: Path) -> None:
    """In a process of its own, without a compiler to be found and with torch's directory of compiled code watched."""
    env = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled"),
        "PATH": str(Path(sys.executable).parent),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.integration.test_zero", str(tmp_path / "weights.pt")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found, wanted = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items()), "bit for bit"
    assert not (tmp_path / "compiled").exists()
    assert "deepspeed_shm_comm" not in done.stdout + done.stderr


if __name__ == "__main__":
    torch.save((by_zero(), by_hand()), sys.argv[1])
