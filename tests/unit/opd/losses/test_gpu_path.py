"""The loss's path on a GPU, without one: how many kernels a chunk starts, what it holds in memory, and that it computes the same.

`chunked._runs_on_gpu` chooses the path, so it runs here on CPU tensors. What only CUDA has, a product that adds to a float32 sum
what it makes of bfloat16, gets a kernel for CPUs meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from opd.interfaces import Objective
from opd.losses import chunked
from opd.losses.adaptive_kl import AdaptiveKL
from opd.losses.blocks import Block
from opd.losses.chunked import Loss, LossHead, Tokens
from opd.losses.forward_kl import ForwardKL
from opd.losses.jsd import JSD
from opd.losses.none import NoDivergence
from opd.losses.policy_gradient import PolicyGradient
from opd.losses.reverse_kl import ReverseKL
from opd.losses.sampled import SampledKL
from opd.losses.skew import Skew
from opd.losses.top_k import TopK
from opd.payloads.hidden_states import MixtureBlock, TeacherBlock
from opd.payloads.none import UnscoredBlock
from opd.payloads.sampled_logprobs import SampledBlock
from opd.payloads.top_k import TopKBlock
from tests.unit.opd.losses.test_chunked import Memory
from tests.unit.opd.losses.test_objectives import V, assert_is, every_setup, run

MOST_KERNELS = 30
"""Kernels that a chunk may start, whatever the vocabulary."""
MOST_COMPILED = 6
"""Those of them that are made of the elementwise part."""
NO_KERNEL = {
    "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty", "permute", "select", "slice",
    "split", "squeeze", "t", "transpose", "unsqueeze", "view", "lift_fresh",
}  # fmt: skip
"""Operations that look at memory or take it, and compute nothing; the last makes a number a scalar on the CPU."""
OBJECTIVES = [ReverseKL(), ForwardKL(), AdaptiveKL(), JSD(), Skew(), SampledKL(), TopK(k=4), NoDivergence()]
every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
MIXTURES = (2, 3, 4, 8)
SETS = [(o, 1) for o in OBJECTIVES] + [(o, k) for o in (ReverseKL(), AdaptiveKL()) for k in MIXTURES]
every_set = pytest.mark.parametrize(("objective", "teachers"), SETS, ids=str)
"""An objective, and the number of its teachers."""


class Kernels(TorchDispatchMode):
    """Keeps the names of the operations that start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in NO_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Case:
    """The arguments of a loss."""

    objective: Objective
    hidden_N_D: Tensor
    head_V_D: Tensor
    teacher: TeacherBlock
    block: Block
    """The teacher's answers, in the payload of the objective."""
    tokens: Tokens

    def loss(self, chunk: int, *, compiled: Any = False) -> Tensor:
        """Run the forward pass."""
        policy = None if self.tokens.advantage_N is None else PolicyGradient(low=0.2, high=0.2)
        vocab = len(self.head_V_D)
        loss = Loss(objective=self.objective, chunk=chunk, vocab_size=vocab, policy=policy, compiled=compiled)
        value: Tensor = LossHead(self.head_V_D, loss)(self.hidden_N_D, self.tokens, [self.block])[0]
        return value


def make_case(
    objective: Objective,
    tokens: int,
    vocab: int,
    *,
    teachers: int = 1,
    width: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Random numbers that bfloat16 can hold, in any type. Without a divergence there is a policy gradient. `teachers`: of a mixture."""
    gen, device = torch.Generator().manual_seed(0), torch.get_default_device()
    hidden, head, states, teacher_head = (
        torch.randn(rows, width, generator=gen, device="cpu").mul(0.5).bfloat16().to(device, dtype)
        for rows in (tokens, vocab, tokens, vocab)
    )
    token = torch.randint(vocab, (tokens,), generator=gen, device="cpu").to(device)
    logp, logq = ((h.double() @ w.double().T).log_softmax(-1) for h, w in ((hidden, head), (states, teacher_head)))
    teacher = TeacherBlock(states, teacher_head)
    block: Block = teacher
    if teachers > 1:
        others = [TeacherBlock(hidden.roll(k, 1), teacher_head) for k in range(1, teachers)]
        block = MixtureBlock((teacher, *others), (1 - len(others) / 16, *[1 / 16] * len(others)))
    elif isinstance(objective, NoDivergence):
        block = UnscoredBlock(tokens)
    elif isinstance(objective, SampledKL):
        block = SampledBlock(logq.gather(1, token[:, None])[:, 0])
    elif isinstance(objective, TopK):
        block = TopKBlock(*reversed(logq.topk(objective.k)))
    weight = torch.linspace(0, 1, tokens)
    rewards = (1 - weight, weight) if isinstance(objective, NoDivergence) else ()
    columns = Tokens(token, weight, logp.gather(1, token[:, None])[:, 0] - 0.1, *rewards)
    return Case(objective, hidden.requires_grad_(), head.requires_grad_(), teacher, block, columns)


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def add_product(
        sum_v_D: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, beta: int = 1, alpha: int = 1, out: Tensor
    ) -> Tensor:
        assert sum_v_D is out, "another tensor would be copied"
        assert left.dtype == right.dtype == torch.bfloat16 and dtype == out.dtype == torch.float32
        return out.add_(left.float() @ right.float())

    monkeypatch.setattr(chunked, "_runs_on_gpu", lambda values: True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", add_product, "CPU")
    yield
    library._destroy()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what would be compiled as it is, unseen by any dispatch mode."""

    def unseen(*args: Any) -> Any:
        with _disable_current_modes():
            return chunked._compute_chunk_loss(*args)

    monkeypatch.setattr(chunked, "can_compile", lambda *_, **__: True)
    monkeypatch.setattr(chunked, "_compile_elementwise", lambda any_rows: unseen)


# Equal to the path of a CPU


@every_setup
def test_it_computes_what_a_cpu_computes(setup: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    c, objective, blocks = setup()
    loss, stats = run(c, objective, blocks)
    monkeypatch.setattr(chunked, "_runs_on_gpu", lambda values: False)
    monkeypatch.setattr(chunked, "SLICE_VALUES", 2 * V)
    monkeypatch.setattr(chunked, "TILE_VALUES", 8)
    want, numbers = run(c, objective, blocks)
    assert_is(c, loss, want, 1e-12)
    for name in stats.__slots__:
        torch.testing.assert_close(getattr(stats, name), getattr(numbers, name), rtol=1e-12, atol=1e-12, equal_nan=True)


@every_set
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.025), (torch.float32, 3e-6)], ids=str)
def test_gradients_are_those_of_float64(objective: Objective, teachers: int, dtype: torch.dtype, bound: float) -> None:
    grads = []
    for kind in (dtype, torch.float64):
        c = make_case(objective, 43, 211, teachers=teachers, dtype=kind)
        with Kernels() as kernels:
            c.loss(16).backward()
        assert kernels.names.count("addmm" if kind == torch.bfloat16 else "addmm_") == 3, "one for each chunk"
        grads.append((c.hidden_N_D.grad, c.head_V_D.grad))
    for found, want in zip(*grads, strict=True):
        assert found is not None and want is not None and found.dtype == dtype
        assert float((found.double() - want).norm() / want.norm()) < bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@every_set
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.025), (torch.float32, 3e-6)], ids=str)
def test_gradients_of_a_gpu_are_those_of_float64(
    objective: Objective, teachers: int, dtype: torch.dtype, bound: float
) -> None:
    exact = make_case(objective, 43, 211, teachers=teachers, dtype=torch.float64)
    exact.loss(16).backward()
    with torch.device("cuda"):
        c = make_case(objective, 43, 211, teachers=teachers, dtype=dtype)
        c.loss(16, compiled="auto").backward()
    for found, want in ((c.hidden_N_D.grad, exact.hidden_N_D.grad), (c.head_V_D.grad, exact.head_V_D.grad)):
        assert found is not None and want is not None
        assert float((found.double().cpu() - want).norm() / want.norm()) < bound


# Kernels


def count_per_chunk(count: Callable[[int], int]) -> float:
    """Return what a chunk of 16 tokens adds to the count for a number of tokens; the last chunk has 11."""
    return (count(4 * 16 + 11) - count(11)) / 4


def count_around(objective: Objective, teachers: int, vocab: int, compiled: bool, tokens: int) -> int:
    """Count the kernels outside of what is compiled."""
    c = make_case(objective, tokens, vocab, teachers=teachers)
    with Kernels() as kernels:
        c.loss(16, compiled=compiled)
    return len(kernels.names)


@every_set
def test_around_the_elementwise_part_a_chunk_starts_few_kernels_whatever_the_vocabulary(
    objective: Objective, teachers: int, elsewhere: None
) -> None:
    counts = [
        count_per_chunk(functools.partial(count_around, objective, teachers, vocab, True)) for vocab in (101, 5003)
    ]
    assert counts[0] == counts[1] <= MOST_KERNELS - MOST_COMPILED


@every_set
def test_without_a_compiler_there_are_more_kernels_but_no_more_for_a_larger_vocabulary(
    objective: Objective, teachers: int
) -> None:
    counts = [
        count_per_chunk(functools.partial(count_around, objective, teachers, vocab, False)) for vocab in (101, 5003)
    ]
    assert MOST_KERNELS < counts[0] == counts[1] < 70 + 5 * max(0, teachers - 2)


@pytest.fixture
def gpu_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor makes Triton kernels of what is compiled, as if for an H200. None of them is built or run."""
    backends = pytest.importorskip("triton.backends.compiler")
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from triton.runtime import driver  # type: ignore[import-untyped]

    class H200:
        def get_current_target(self) -> Any:
            return backends.GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

        def is_active(self) -> bool:
            return True

    class NotRun:
        def run(self, *args: Any, **kwargs: Any) -> None:
            """Leave the results as they are."""

    monkeypatch.setattr(driver, "_active", H200())
    monkeypatch.setattr(AsyncCompile, "triton", lambda *args, **kwargs: NotRun())
    with config.patch(cpu_backend="triton", force_disable_caches=True):
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


@every_set
def test_the_elementwise_part_is_a_few_kernels(objective: Objective, teachers: int, gpu_compiler: None) -> None:
    """One for most objectives: student's and teacher's logits in, the gradient and each token's numbers out."""
    from torch._inductor import metrics

    metrics.reset()
    make_case(objective, 16, 151_936, teachers=teachers, width=8).loss(16, compiled=True)
    assert 0 < metrics.generated_kernel_count <= MOST_COMPILED
    if isinstance(objective, ReverseKL | ForwardKL | AdaptiveKL | JSD | Skew):
        assert metrics.generated_kernel_count == 1


def test_other_weights_of_a_mixture_are_not_compiled_once_more(gpu_compiler: None) -> None:
    from torch._inductor import metrics

    metrics.reset()
    c = make_case(ReverseKL(), 16, 151_936, teachers=2, width=8)
    assert isinstance(c.block, MixtureBlock)
    for weights in ((0.5, 0.5), (0.25, 0.75), (1.0, 0.0)):
        replace(c, block=MixtureBlock(c.block.teachers, weights)).loss(16, compiled=True)
    assert metrics.generated_kernel_count == 1


@every_objective
def test_the_backward_pass_starts_few_kernels_whatever_the_vocabulary(objective: Objective) -> None:
    """It scales gradients, and rounds the head's in place."""
    counts = []
    for vocab in (501, 5003):
        loss = make_case(objective, 16, vocab).loss(16)
        with Kernels() as kernels:
            loss.backward()
        counts.append(len(kernels.names))
    assert counts[0] <= counts[1] < 30


# Memory


@every_set
def test_a_quarter_of_the_memory_of_all_logits_at_once(objective: Objective, teachers: int, elsewhere: None) -> None:
    """At the proportions of 8,192 tokens, width 4,096 and a chunk of 1,024; what is compiled keeps its numbers in registers."""
    c = make_case(objective, 128, 2003, teachers=teachers, width=64)
    states, teacher_head = c.teacher.hidden_N_E, c.teacher.head_V_E
    with Memory() as chunks:
        c.loss(16, compiled=True).backward()
    c.hidden_N_D.grad = c.head_V_D.grad = None
    with Memory() as at_once:
        logp_N_V = (c.hidden_N_D @ c.head_V_D.T).float().log_softmax(-1)
        with torch.no_grad():
            logq_N_V = (states @ teacher_head.T).float().log_softmax(-1)
        (logp_N_V.exp() * (logp_N_V - logq_N_V)).sum(-1).mean().backward()
    # Each teacher's logits wait for the one kernel that adds them up: with eight teachers these are a little more than a quarter.
    assert chunks.peak < at_once.peak * (0.25 if teachers <= 4 else 0.28)
