"""Measure what the machine gives to each part of a step alone: the rates that no loop around these parts can pass.

    python -m benchmarks.merging.limits CASE DESCRIPTOR engine
    python -m benchmarks.merging.limits CASE DESCRIPTOR body
    python -m benchmarks.merging.limits CASE DESCRIPTOR sharded

Both sides' parts are the same: a rollout engine that does nothing else, a matrix product, the model's body forward and
forward and backward over rows without padding, the loss over response tokens, AdamW over float32 weights. The last is no
limit but an explanation: the same body and AdamW inside our ZeRO engine, at one rank and without a loop around it. With
`trainer.compile` forward and backward are those of compiled layers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.merging.case import BODY, ENGINE, SHARDED, Case
from benchmarks.merging.turns import started

MATMUL_ROWS = 512
WARM_UP_TOKENS = 4


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the second call."""
    work()
    began = time.monotonic()
    work()
    return time.monotonic() - began


def engine(case: Case) -> dict[str, float]:
    """Response tokens a second of our rollout engine, all responses of a step at once."""
    from benchmarks.merging.ours import kv_cache_gib
    from experts.model_dir import inspect_model
    from opd.rollouts.processes import ENGINE_ENV

    os.environ.update(ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib(case))})
    from opd.rollouts.worker import EngineOptions, GenerateRequest, VLLMWorker

    vocab_size = inspect_model(case.student, hash_weights=False).vocab_size
    options = EngineOptions(
        model_dir=case.student,
        dtype=case.dtype,
        max_model_len=case.prompt_tokens + case.new_tokens,
        max_num_seqs=case.responses,
        gpu_memory_utilization=0.5,
        vocab_size=vocab_size,
    )
    worker = VLLMWorker(options, ())

    def requests(start: int, new_tokens: int) -> list[GenerateRequest]:
        prompts = [
            tuple((start + 7919 * i + j) % vocab_size for j in range(case.prompt_tokens)) for i in range(case.responses)
        ]
        return [
            GenerateRequest(token_ids=p, max_tokens=new_tokens, temperature=1.0, seed=i) for i, p in enumerate(prompts)
        ]

    worker.generate(requests(1, min(case.new_tokens, WARM_UP_TOKENS)))
    began = time.monotonic()
    written = worker.generate(requests(2, case.new_tokens))  # other prompts, which are in no prefix cache
    return {"engine_tokens_s": sum(len(w.token_ids) for w in written) / (time.monotonic() - began)}


def body(case: Case) -> dict[str, float]:
    """Rates of everything that a trainer and a scorer compute, a micro-batch at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_pretrained(case.student, dtype=getattr(torch, case.dtype)).train()
    found = _matmul(lm) | _loss(case, lm)
    if case.lora:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(**case.adapters), lm)
    return found | _passes(case, lm) | _optimizer(lm) | {"real_share_of_packed_rows": _real_share(case)}


def _matmul(lm: Any) -> dict[str, float]:
    import torch

    head_V_D = lm.get_output_embeddings().weight.detach()
    hidden_N_D = torch.randn(MATMUL_ROWS, head_V_D.shape[1]).to(head_V_D.dtype)
    seconds = timed(lambda: hidden_N_D @ head_V_D.T)
    return {"matmul_gflops": 2 * MATMUL_ROWS * head_V_D.numel() / seconds / 1e9}


def _passes(case: Case, lm: Any) -> dict[str, float]:
    import torch

    tokens = case.rows * (case.prompt_tokens + case.new_tokens)
    ids_B_T = torch.randint(lm.config.vocab_size, (case.rows, tokens // case.rows))

    def hidden() -> Any:
        return lm.base_model(input_ids=ids_B_T, use_cache=False).last_hidden_state

    def forward() -> None:
        with torch.no_grad():
            hidden()

    def forward_backward() -> None:
        hidden().sum().backward()
        lm.zero_grad()

    rates = {"forward": tokens / timed(forward)}
    if case.compiled:
        _compile(case, lm)
    rates["forward_backward"] = tokens / timed(forward_backward)
    layers = sum(p.numel() for p in lm.base_model.parameters()) - lm.get_input_embeddings().weight.numel()
    operations = 4 if case.lora else 6  # frozen weights need no gradient of their own
    return {f"{name}_tokens_s": rate for name, rate in rates.items()} | {
        "forward_gflops": 2e-9 * layers * rates["forward"],
        "forward_backward_gflops": 1e-9 * operations * layers * rates["forward_backward"],
    }


def _compile(case: Case, lm: Any) -> None:
    """Compile the layers as the trainer does on a CPU."""
    from benchmarks.merging.ours import pipeline
    from opd.train.compiled_layers import compile_layers
    from pipelines.api import load_pipeline
    from pipelines.specs import eager_attention

    if eager_attention(load_pipeline(pipeline(case), case.options)):
        lm.set_attn_implementation("eager")
    compile_layers(lm)


def _loss(case: Case, lm: Any) -> dict[str, float]:
    """Forward and backward of exact reverse KL, with gradients for hidden states and head."""
    import torch

    from opd.losses.chunked import Loss, LossHead, Tokens
    from opd.losses.reverse_kl import ReverseKLConfig
    from opd.payloads.hidden_states import TeacherBlock

    head_V_D = lm.get_output_embeddings().weight
    num, width = case.rows * case.new_tokens, head_V_D.shape[1]
    section = ReverseKLConfig(kind="reverse_kl")
    loss = Loss(objective=section.build(), chunk=section.chunk, vocab_size=len(head_V_D))
    loss_head = LossHead(head_V_D, loss)
    hidden_N_D = torch.randn(num, width).to(head_V_D.dtype)
    token_N, weight_N = torch.randint(len(head_V_D), (num,)), torch.full((num,), 1 / num)
    teacher = TeacherBlock(hidden_N_D.roll(1, 0), head_V_D.detach().clone())

    def once() -> None:
        leaf = hidden_N_D.detach().requires_grad_()
        value, _ = loss_head(leaf, Tokens(token_N, weight_N, torch.zeros(num)), [teacher])
        value.backward()
        lm.zero_grad()

    return {"loss_tokens_s": num / timed(once)}


def _optimizer(lm: Any) -> dict[str, float]:
    import torch

    numbers = sum(p.numel() for p in lm.parameters() if p.requires_grad)
    weights = torch.zeros(numbers, requires_grad=True)
    weights.grad = torch.ones(numbers)
    return {"optimizer_s": timed(torch.optim.AdamW([weights], lr=1e-6, fused=True).step)}


def _real_share(case: Case) -> float:
    """Share of the tokens in our packed rows that are not padding."""
    from opd.models.packing import pack_into_rows

    length = case.prompt_tokens + case.new_tokens
    packing = pack_into_rows([length] * case.rows)
    return case.rows * length / (packing.num_rows * packing.width)


def sharded(case: Case) -> dict[str, float]:
    """Seconds of a micro-batch, of a step's last one, and of the optimiser's step in our ZeRO engine."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    from opd.models.weights import load_causal_lm
    from opd.train.optimizer import AdamWOptions
    from opd.train.zero import ZeroEngine, ZeroOptions

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = load_causal_lm(case.student, getattr(torch, case.dtype))

        def forward(self, ids_B_T: Any) -> Any:
            return self.lm.base_model(input_ids=ids_B_T, use_cache=False).last_hidden_state.mean()

    options = ZeroOptions(
        name="student",
        world_size=1,
        dtype=case.dtype,
        vocab_size=1,  # of log-probs, which nobody asks for
        adamw=AdamWOptions(betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0),
        max_grad_norm=1.0,
        grad_accum_dtype="float32",
        gradient_checkpointing=False,
        timeout_s=600,
    )
    zero = ZeroEngine(options, 0, Mean)
    zero.start(*zero.open_meeting_point("127.0.0.1"))
    ids_B_T = torch.zeros(case.rows, case.prompt_tokens + case.new_tokens, dtype=torch.long)
    found = {}
    for _ in range(2):  # the first time warms up
        for name, work in (
            ("micro", lambda: zero.add_gradients(zero.model(ids_B_T), last=False)),
            ("last", lambda: zero.add_gradients(zero.model(ids_B_T), last=True)),
            ("step", lambda: zero.take_step(1, 1e-6)),
        ):
            began = time.monotonic()
            work()
            found[f"sharded_{name}_s"] = time.monotonic() - began
    return found


MEASURES = {ENGINE: engine, BODY: body, SHARDED: sharded}


def main() -> None:
    case, turns = started()
    turns.over(MEASURES[sys.argv[3]](case))


if __name__ == "__main__":
    main()
