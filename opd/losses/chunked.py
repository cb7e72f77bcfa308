"""The computation that all objectives share: it makes the logits of a few tokens at a time, and computes gradients in the forward pass.

Every objective is a function f of the student's distribution p at fixed states: L = sum_n w_n f(p_n). An objective returns its
value, and p_v f'_v with f'_v = df/dp_v for every vocabulary id v. From these the gradient by the logits z follows by the softmax:

    dL/dz_v = w p_v (f'_v - sum_u p_u f'_u),     z = rule(h W^T)

Only [chunk, V] logits exist at a time. The gradient by the logits overwrites the logits. The gradients are ready when the forward
pass ends, so the backward pass needs no head, and under ZeRO-3 the student's head is gathered only once. What comes from teachers
has no gradient.

Two devices want two things. A CPU wants pieces that fit its cache: the float32 numbers made from logits exist for a few rows at a
time, and the head's gradient is made a tile at a time. A GPU wants few kernels, because starting one costs as long as a small one
takes: a chunk is one piece there, its elementwise part is compiled to one kernel or a few, which keep the float32 numbers in
registers, and one product adds the chunk's part of the head's gradient. `_runs_on_gpu` chooses.

Shapes: N response tokens, C tokens of a chunk, D student width, E a teacher's width, V vocabulary rows, K of a top-k.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opd.interfaces import Objective
from opd.losses.blocks import Block, BlockChunk, DomainBlock
from opd.losses.logits import pad_rows, token_logprobs, top_logprobs, upcast_for_loss
from opd.losses.none import NoDivergence
from opd.losses.objective import Slope, StudentChunk, TeacherChunk, likeliest_token, token_entropy
from opd.losses.policy_gradient import PolicyGradient
from opd.machine.compiler import can_compile
from opd.models.heads import OWN_HEAD, Head
from opd.models.logit_rule import IDENTITY, LogitRule

SLICE_VALUES = 1 << 18
"""Numbers in a [rows, V] slice, on which a CPU does the elementwise part at a time; a GPU takes the whole chunk."""
TILE_VALUES = 1 << 20
"""Numbers of the head's gradient that one matrix product makes at a time on a CPU: a product for all of it would need its size
again."""


Columns = tuple[Tensor, ...]
"""The tensors token_C, behaviour_C, weight_C; with a reward also advantage_C and the policy gradient's weight_C. In this order."""


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Numbers for each trained token, detached, float32 (or float64); NaN where payload and objective do not give one."""

    kl_N: Tensor
    """The objective's value, nats; KL(student || teacher) for `reverse_kl`."""
    logprob_N: Tensor
    """Student's log-prob of the sampled token at the temperature that it was sampled at."""
    entropy_N: Tensor
    """Student's entropy, nats."""
    teacher_entropy_N: Tensor
    """Nats; for a mixture that of its normalised product prod_k q_k^w_k."""
    agree_N: Tensor
    """1 where student and teacher rank the same token first, else 0."""
    teacher_top1_N: Tensor
    """1 where the sampled token is the teacher's first."""
    clipped_N: Tensor
    """1 where the objective clipped the token."""
    student_mass_N: Tensor
    """Student's probability of the tokens that the teacher gave (top-k): what an objective on them can see."""
    teacher_mass_N: Tensor
    """Teacher's probability of the same tokens."""


@dataclass(frozen=True, slots=True)
class RewardedStats(TokenStats):
    """The numbers of a micro-batch in which tokens have advantages. The policy gradient's come last: `_sum_totals` needs that."""

    policy_N: Tensor
    """-f(r) A log p, see `opd.losses.policy_gradient`."""
    masked_N: Tensor
    """1 where the ratio is outside of the band, so that the token has no gradient."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Data of N trained tokens that the loss needs beside the teachers' answers."""

    token_N: Tensor
    """Sampled ids."""
    weight_N: Tensor
    """Weight in the divergence. Where it is 0, the teacher's answer has no effect, even if it is NaN."""
    behaviour_N: Tensor
    """Log-prob of the sampled ids when they were sampled."""
    advantage_N: Tensor | None = None
    """Advantage of the sampled ids; None without a reward."""
    policy_weight_N: Tensor | None = None
    """Weight in the policy gradient; 0 where a token has no advantage. None without a reward."""

    def select_tokens(self, rows: slice, dtype: torch.dtype) -> Columns:
        """Return the columns of some tokens, with log-probs and weights in the type that the loss computes in."""
        own = (self.token_N[rows], self.behaviour_N[rows].to(dtype), self.weight_N[rows].to(dtype))
        if self.advantage_N is None or self.policy_weight_N is None:
            return own
        return *own, self.advantage_N[rows].to(dtype), self.policy_weight_N[rows].to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An objective with all settings of its computation."""

    objective: Objective
    chunk: int
    """Tokens whose logits exist at one time."""
    vocab_size: int
    """Rows to which the heads of student and teachers are cut. Rows beyond the tokenizer's ids are padding without probability."""
    rule: LogitRule = IDENTITY
    """The student's logit rule."""
    policy: PolicyGradient | None = None
    """Policy gradient for tokens with an advantage; None without a reward."""
    compiled: bool | Literal["auto"] = False
    """Fuse the elementwise part with torch.compile, which needs a C++ compiler at the first call. `auto`: on a GPU only."""
    temperature: float = 1.0
    """Temperature at which the tokens were sampled. It applies only to log-probs that are compared with `Tokens.behaviour_N`, to
    measure how far the policy moved since then. Objectives are about the student at temperature 1."""

    def __post_init__(self) -> None:
        assert self.chunk > 0


class LossHead(nn.Module):
    """Owns an output head, and computes from the hidden states before it the loss, or plain log-probs.

    It is a module of its own, because under ZeRO-3 a weight is whole only while the module that owns it runs.
    """

    def __init__(self, weight_V_D: Tensor, loss: Loss, own_losses: Mapping[str, Loss] = MappingProxyType({})) -> None:
        """`own_losses`: domain -> loss, for domains with an objective of their own, whose tokens come as `DomainBlock`."""
        super().__init__()
        self.weight = weight_V_D
        self._loss = loss
        self._own_losses = own_losses

    def forward(
        self,
        hidden_N_D: Tensor,
        tokens: Tokens | Tensor | int,
        teachers: Sequence[Block] = (),
        heads: Mapping[str, Head] | None = None,
        show_logits: Callable[[slice, Tensor], None] | None = None,
    ) -> Any:
        """Return the loss (a scalar, with gradients by hidden states and head) and the `TokenStats`; or log-probs, see `tokens`.

        The loss is sum_n weight_n f(p_n), plus the policy gradient's sum if tokens have advantages. If no block has an answer of
        a teacher, the divergence is 0. It is computed in float32, or in float64 if the student's hidden states are float64.

        `tokens`: if these are ids instead of `Tokens`, only their log-probs [N] are returned; if it is a number K, the ids [N, K] and the
        log-probs [N, K] of the K likeliest tokens. `teachers`: blocks that cover the N tokens in order. `heads`: content hash -> output
        head that the blocks need, except for the student's own.
        `show_logits` is called with the place of C tokens among the N, and their logits [C, v] under the student.
        Raises: ValueError if hidden states and their head differ in width.
        """
        loss, head_v_D = self._choose_loss(teachers), self._cut_padding()
        if isinstance(tokens, Tensor):
            return token_logprobs(hidden_N_D, head_v_D, tokens, loss.rule)
        if isinstance(tokens, int):
            return top_logprobs(hidden_N_D, head_v_D, tokens, loss.rule)
        teachers = self._with_heads(teachers, heads or {})
        _check_shapes(loss, hidden_N_D, self.weight, teachers, tokens)
        acc = torch.float64 if hidden_N_D.dtype == torch.float64 else torch.float32
        stats_class = TokenStats if tokens.advantage_N is None else RewardedStats
        # NaN stays where neither payload nor objective gives a number.
        stats = [hidden_N_D.new_full((len(hidden_N_D),), torch.nan, dtype=acc) for _ in fields(stats_class)]
        gradients = _GradientSums(hidden_N_D, self.weight, acc)
        # Autograd would keep the logits of every chunk; the gradients are formed by hand below.
        with torch.no_grad():
            for block, part, span in _chunk_spans(teachers, loss.chunk):
                h_C_D = hidden_N_D[span]
                raw_C_V = h_C_D @ head_v_D.T
                if show_logits is not None:
                    show_logits(span, loss.rule.apply(raw_C_V))
                own_loss = self._own_losses[block.domain] if isinstance(block, DomainBlock) else loss
                block_chunk, values_of = _prepare_elementwise(own_loss, block, part, on_gpu=_runs_on_gpu(raw_C_V))
                for rows in _iterate_row_slices(raw_C_V, loss.chunk):
                    token_rows = slice(span.start + rows.start, span.start + rows.stop)
                    # The gradient by the student's raw products overwrites the products themselves.
                    values, raw_C_V[rows] = values_of(
                        own_loss, raw_C_V[rows], block_chunk.select_rows(rows), tokens.select_tokens(token_rows, acc)
                    )
                    for column, value in zip(stats, values, strict=True):
                        if value is not None:
                            column[token_rows] = value
                del block_chunk  # frees the teacher's logits, because the products below need memory
                gradients.add(span, raw_C_V, h_C_D, head_v_D)
                del raw_C_V  # frees it before the next chunk's products are made
            value = _sum_totals(stats, tokens)
        return _PrecomputedGradients.apply(hidden_N_D, self.weight, value, gradients), stats_class(*stats)

    def _choose_loss(self, teachers: Sequence[Block]) -> Loss:
        """Return the loss's settings; if no block has an answer of a teacher, with `NoDivergence` as objective."""
        has_answers = any(block.says_something for block in teachers)
        return self._loss if has_answers else replace(self._loss, objective=NoDivergence())

    def _cut_padding(self) -> Tensor:
        """Return [v, D] the rows of the head that stand for tokens; those beyond are padding."""
        return self.weight[: self._loss.vocab_size]

    def _with_heads(self, teachers: Sequence[Block], heads: Mapping[str, Head]) -> list[Block]:
        """Return the blocks with these heads and the student's own filled in; the latter is whole only in this module's forward."""
        all_heads = {**heads, OWN_HEAD: Head(self.weight.detach(), self._loss.rule)}
        return [block.with_heads(all_heads) for block in teachers]


def _prepare_elementwise(loss: Loss, block: Block, part: slice, *, on_gpu: bool) -> tuple[BlockChunk, Any]:
    """Return a chunk of a block, and the function that computes its values and gradients: `_compute_chunk_loss` or a compiled one."""
    block_chunk = block.select_chunk(part, loss.vocab_size)
    wanted = on_gpu if loss.compiled == "auto" else loss.compiled
    if not (wanted and block_chunk.compiles and can_compile("objective.compile", "the loss runs", on_gpu=on_gpu)):
        return block_chunk, _compute_chunk_loss
    return block_chunk, _run_compiled if on_gpu else _run_compiled_padded


def _sum_totals(stats: Sequence[Tensor], tokens: Tokens) -> Tensor:
    """Return the divergence's weighted sum plus the policy gradient's."""
    value = _weighted_sum(stats[0], tokens.weight_N)
    if tokens.policy_weight_N is not None:
        # The columns of `RewardedStats` end with policy_N and masked_N.
        value += _weighted_sum(stats[-2], tokens.policy_weight_N)
    return value


def _weighted_sum(value_N: Tensor, weight_N: Tensor) -> Tensor:
    # A plain product would be NaN where a token without weight has the value NaN.
    return torch.where(weight_N != 0, value_N * weight_N.to(value_N.dtype), 0).sum()


def _check_shapes(loss: Loss, hidden_N_D: Tensor, head_V_D: Tensor, teachers: Sequence[Block], tokens: Tokens) -> None:
    """Check that all arguments fit together. Raises: ValueError if hidden states and their head differ in width."""
    assert loss.objective.mixes or not any(block.is_mixture for block in teachers)
    assert sum(map(len, teachers)) == len(hidden_N_D) == len(tokens.weight_N) == len(tokens.token_N)
    pairs = [(hidden_N_D, head_V_D, "student")]
    pairs += [(hidden, head, "teacher") for block in teachers for hidden, head in block.products()]
    for hidden, head, role in pairs:
        if hidden.shape[-1] != head.shape[-1]:
            raise ValueError(
                f"{role}: hidden states of width {hidden.shape[-1]}, output head of width {head.shape[-1]}"
            )


def _chunk_spans(teachers: Sequence[Block], chunk: int) -> Iterator[tuple[Block, slice, slice]]:
    """Yield each block, a part of at most `chunk` of its tokens, and the same part as a slice of the N tokens."""
    start = 0
    for block in teachers:
        for begin in range(0, len(block), chunk):
            end = min(begin + chunk, len(block))
            yield block, slice(begin, end), slice(start + begin, start + end)
        start += len(block)


class _GradientSums:
    """The loss's gradients by hidden states and by the head, to which chunks add. A gradient that autograd does not need is None."""

    def __init__(self, hidden_N_D: Tensor, head_V_D: Tensor, acc: torch.dtype) -> None:
        enabled = torch.is_grad_enabled()
        self.hidden_N_D = torch.zeros_like(hidden_N_D) if enabled and hidden_N_D.requires_grad else None
        self.head_V_D = torch.zeros_like(head_V_D, dtype=acc) if enabled and head_V_D.requires_grad else None

    def add(self, span: slice, grad_C_V: Tensor, h_C_D: Tensor, head_v_D: Tensor) -> None:
        """Add what a chunk contributes. `span`: its place among the N tokens; `grad_C_V`: gradient by h W^T, before the logit rule."""
        if self.hidden_N_D is not None:
            self.hidden_N_D[span] = grad_C_V @ head_v_D
        if self.head_V_D is not None:
            _add_head_gradient(self.head_V_D, grad_C_V, h_C_D)


class _PrecomputedGradients(torch.autograd.Function):
    """Hands autograd a value whose gradients are computed already."""

    @staticmethod
    def forward(ctx: Any, hidden_N_D: Tensor, head_V_D: Tensor, value: Tensor, gradients: _GradientSums) -> Tensor:
        # They are not stored by `save_for_backward`, because the backward pass, which runs once, changes them in place.
        ctx.gradients = (gradients.hidden_N_D, gradients.head_V_D)
        ctx.head_dtype = head_V_D.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:
        assert ctx.gradients is not None, "the loss was differentiated a second time"
        (hidden_N_D, head_V_D), ctx.gradients = ctx.gradients, None
        if hidden_N_D is not None:
            hidden_N_D.mul_(grad_loss.to(hidden_N_D.dtype))
        if head_V_D is not None:
            head_V_D = _round_in_place(head_V_D.mul_(grad_loss), ctx.head_dtype)
        # One gradient for each input of `forward`; `value` and `gradients` have none.
        return hidden_N_D, head_V_D, None, None


def _runs_on_gpu(values: Tensor) -> bool:
    """Return True if kernels have to be few, False if numbers have to fit a CPU's cache."""
    return values.is_cuda


def _slice_rows(raw_C_V: Tensor, chunk: int) -> int:
    """Return how many rows the elementwise part takes at a time: few enough for a CPU's cache, or the whole chunk on a GPU."""
    return chunk if _runs_on_gpu(raw_C_V) else min(chunk, max(1, SLICE_VALUES // raw_C_V.shape[1]))


def _iterate_row_slices(raw_C_V: Tensor, chunk: int) -> Iterator[slice]:
    """Yield the rows of a chunk, a slice of `_slice_rows` at a time."""
    num, step = len(raw_C_V), _slice_rows(raw_C_V, chunk)
    return (slice(start, min(start + step, num)) for start in range(0, num, step))


def _add_head_gradient(grad_V_D: Tensor, grad_C_V: Tensor, h_C_D: Tensor) -> None:
    """Add grad_C_V^T h_C_D to grad_V_D; rows beyond grad_C_V's width are padding."""
    num_rows = grad_C_V.shape[1]
    step = num_rows if _runs_on_gpu(grad_C_V) else max(1, TILE_VALUES // h_C_D.shape[1])
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        sum_v_D, grad_v_C = grad_V_D[rows], grad_C_V[:, rows].T
        if grad_C_V.dtype == grad_V_D.dtype:
            sum_v_D.addmm_(grad_v_C, h_C_D)
        elif _runs_on_gpu(grad_C_V):
            # Only CUDA's product can add what it makes of bfloat16 to a float32 sum. With the sum as `out` too, nothing is copied.
            torch.addmm(sum_v_D, grad_v_C, h_C_D, out_dtype=grad_V_D.dtype, out=sum_v_D)
        else:
            sum_v_D += grad_v_C @ h_C_D


def _round_in_place(grad_V_D: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the gradient to the head's type within its own memory: a copy would be the largest tensor of the whole step."""
    if grad_V_D.dtype == dtype:
        return grad_V_D
    assert 2 * dtype.itemsize <= grad_V_D.dtype.itemsize
    values, rounded = grad_V_D.view(-1), grad_V_D.view(-1).view(dtype)
    rounded[:1] = values[:1].to(dtype)
    start = 1
    while start < len(values):
        # The new values have half the size. So these end where the old ones begin, and no old value is overwritten unread.
        stop = min(2 * start, len(values))
        rounded[start:stop] = values[start:stop]
        start = stop
    return rounded[: len(values)].view(grad_V_D.shape)


def _run_compiled(
    loss: Loss, raw_C_V: Tensor, block_chunk: BlockChunk, columns: Columns
) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Run the compiled `_compute_chunk_loss` on a GPU, where one code for any number of rows is as fast as one for each."""
    # torch compiles views that begin with their memory and views that do not apart, so all are made to begin with it.
    own = tuple(column.clone() for column in columns)
    result: tuple[tuple[Tensor | None, ...], Tensor] = _compile_elementwise(any_rows=True)(
        loss, raw_C_V, block_chunk, own
    )
    return result


def _run_compiled_padded(
    loss: Loss, raw_C_V: Tensor, block_chunk: BlockChunk, columns: Columns
) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Run the compiled `_compute_chunk_loss` on a CPU.

    A last slice with fewer rows is padded, so that every (chunk, V, dtype) has one shape and is compiled once.
    """
    num = len(raw_C_V)
    num_padding = _slice_rows(raw_C_V, loss.chunk) - num
    padded = tuple(pad_rows(column, num_padding) for column in columns)
    values, grad_C_V = _compile_elementwise(any_rows=False)(
        loss, pad_rows(raw_C_V, num_padding), block_chunk.pad_rows(num_padding), padded
    )
    return tuple(None if v is None else v[:num] for v in values), grad_C_V[:num]


@functools.cache
def _compile_elementwise(*, any_rows: bool) -> Any:
    """Return the compiled `_compute_chunk_loss`. `any_rows`: when a second number of rows comes, compile it once more for any number;
    else compile it for each."""
    return torch.compile(_compute_chunk_loss, dynamic=None if any_rows else False)


def _compute_chunk_loss(
    loss: Loss, raw_C_V: Tensor, block_chunk: BlockChunk, columns: Columns
) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Return the numbers of each token in the order of `TokenStats` or `RewardedStats`, and the gradient by the raw products.

    The raw products are h W^T, before the logit rule. The gradient has their type.
    """
    token_C, behaviour_C, weight_C, *rewarded = columns
    rule = loss.rule
    logits_C_V = upcast_for_loss(rule.apply(raw_C_V))
    logp_C_V = logits_C_V.log_softmax(-1)
    if rule.softcap is None:
        logits_C_V = raw_C_V  # frees the logits: `pull_back` below reads them only if there is a cap
    logp_C = logp_C_V.gather(1, token_C[:, None])[:, 0]
    sampling_C = _scale_by_temperature(logp_C_V, logp_C, loss.temperature)
    student = StudentChunk(logp_C_V, logp_C_V.exp(), token_C, logp_C, sampling_C, behaviour_C)
    teacher = block_chunk.view_chunk(token_C, logp_C_V.dtype)
    slope = loss.objective(student, teacher)
    stats = _token_stats(student, teacher, slope)
    # In place from here on: [chunk, V] temporaries are what the loss costs in memory.
    grad_C_V = slope.p_slope_C_V
    grad_C_V.addcmul_(student.p_C_V, grad_C_V.sum(-1, keepdim=True), value=-1.0).mul_(weight_C[:, None])
    # A token without weight may have a NaN from the teacher, and 0 * NaN is NaN; so its gradient is set to 0.
    grad_C_V.masked_fill_((weight_C == 0)[:, None], 0.0)
    if rewarded:
        assert loss.policy is not None
        stats = (*stats, *loss.policy.add(grad_C_V, student, *rewarded))
    return stats, rule.pull_back(grad_C_V, logits_C_V).to(raw_C_V.dtype)


def _scale_by_temperature(logp_C_V: Tensor, logp_C: Tensor, temperature: float) -> Tensor:
    """Return [C] the sampled tokens' log-probs under logits / temperature.

    Log-probs may stand in for the logits: they differ by a constant of each row, which a softmax ignores.
    """
    return logp_C if temperature == 1 else logp_C / temperature - (logp_C_V / temperature).logsumexp(-1)


def _token_stats(student: StudentChunk, teacher: TeacherChunk, slope: Slope) -> tuple[Tensor | None, ...]:
    """Return each token's numbers in the order of `TokenStats`; None for those that payload or objective do not give."""
    first_C = teacher.first_C()
    return (
        slope.value_C,
        student.sampling_C,
        token_entropy(student.p_C_V, student.logp_C_V),
        teacher.entropy_C(),
        None if first_C is None else first_C == likeliest_token(student.logp_C_V),
        None if first_C is None else first_C == student.token_C,
        slope.clipped_C,
        slope.student_mass_C,
        slope.teacher_mass_C,
    )
