"""Token sequences laid out for one forward pass, and the proof that they cannot see each other.

    shared           packed, but sequences that begin alike are a tree: a prompt once, then the responses to it; a mask of
                     four dimensions lets each token see its own way to the root. For several responses a prompt
    packed           side by side in rows of one width; position ids that begin again at 0 tell them apart
    packed_indexed   all of them in one row; also told apart by sequence indices and cumulative lengths
    padded           one sequence a row, padding on its right, an attention mask

Packing is the fastest (padding costs 1.9x on mixed lengths), but it is right only where a model builds its mask from the
position ids. Recurrent layers, short convolutions, ALiBi and learned positions let a neighbour in, by 0.002 to 0.89 of the
hidden states' size, and nothing else notices. So every model is asked before it trains or scores: three sequences laid
out together must give what each gives alone, and another neighbour must change nothing. The first layout that passes is
taken. Padding on the right cannot reach back in a causal model, so the last one is always worth a try.

A tree also needs layers that attend to whatever the mask lets them (`opd.models.weights.obeys_masks`): a window is longer than
what is tried here. The gradient of a shared prompt is the sum over its responses, which attention adds up by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from opd.errors import RunError
from opd.models.packing import SHARED, build_trees, pack_into_rows
from opd.records.types import LayoutProof, Rollout

PROBE_LENGTHS = (37, 29, 43)
"""Lengths of the sequences that are tried: longer than a short convolution, short enough to share a row."""
ALONE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference from each sequence alone, relative to the largest hidden state, that rounding explains. Measured: 2e-6
in float32 and 0.01 in bfloat16 on tiny models, 5e-5 in float32 on thirty layers; positions that go on where they should
begin again show 0.4 and more. Small leaks are for the bound below to find."""
NEIGHBOUR_TOLERANCE = 1e-4
"""Largest change, relative in the same way, when only the neighbours' tokens change. Shapes stay the same, so a model that
keeps its sequences apart shows 0 in every type; the smallest leak that is known shows 2e-3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Token sequences laid out for one forward pass."""

    input_ids_B_T: Tensor
    position_ids_B_T: Tensor | None
    """Restarts at 0 with each sequence; None leaves positions to the model."""
    offsets: tuple[int, ...]
    """Flat index (row * T + column) of each sequence's first token."""
    paths: Sequence[tuple[int, ...]] = ()
    """Flat index of every token of each sequence; empty where a sequence's tokens lie side by side."""
    ends_B_T: Tensor | None = None
    """First column to the right of each one that does not see it; None leaves the mask to the model."""
    mask_B_T: Tensor | None = None
    """1 on tokens, 0 on padding; None where there is no padding."""
    seq_idx_B_T: Tensor | None = None
    """Number of the sequence that a column belongs to."""
    cu_seq_lens: Tensor | None = None
    """First column of each sequence of the one row, and the row's end: int32, one more than there are sequences."""
    longest: int = 0
    """Tokens of the longest sequence."""

    def inputs(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return keyword arguments for the body of a transformers model.

        A tree's mask is additive in `dtype`, that of the model: from a boolean mask torch would make an additive one for every
        layer, and keep all of them for the backward pass.
        """
        arguments: dict[str, Any] = {"input_ids": self.input_ids_B_T, "use_cache": False}
        if self.position_ids_B_T is not None:
            arguments["position_ids"] = self.position_ids_B_T
        if self.mask_B_T is not None:
            arguments["attention_mask"] = self.mask_B_T
        if self.ends_B_T is not None:
            seen_B_1_T_T = _tree_mask(self.ends_B_T)
            arguments["attention_mask"] = seen_B_1_T_T if dtype is None else _additive_mask(seen_B_1_T_T, dtype)
        if self.cu_seq_lens is not None:
            arguments |= {
                "seq_idx": self.seq_idx_B_T,
                "cu_seq_lens_q": self.cu_seq_lens,
                "cu_seq_lens_k": self.cu_seq_lens,
            }
            arguments |= {"max_length_q": self.longest, "max_length_k": self.longest}
        return arguments

    def flat_index(self, sequence: int, position: int) -> int:
        """Return the flat index of a token of a sequence."""
        return self.paths[sequence][position] if self.paths else self.offsets[sequence] + position


def _tree_mask(ends_B_T: Tensor) -> Tensor:
    """Return [B, 1, T, T] True where a column (third axis) sees another: one to its left, on its way to the root."""
    column_T = torch.arange(ends_B_T.shape[1], device=ends_B_T.device)
    return ((column_T <= column_T[:, None]) & (column_T[:, None] < ends_B_T[:, None, :]))[:, None]


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def lay_out_trees(sequences: Sequence[Sequence[int]]) -> Packed:
    """Lay out trees side by side in rows, each depth first; a column after the last tree of a row sees itself alone."""
    trees = build_trees(sequences)
    packing = pack_into_rows([tree.size for tree in trees])
    ids_N = torch.zeros(packing.num_rows * packing.width, dtype=torch.long)
    positions_N = torch.zeros_like(ids_N)
    # At first each column ends behind itself. Padding stays so, and sees itself alone.
    ends_N = torch.arange(1, packing.width + 1).repeat(packing.num_rows)
    paths: list[tuple[int, ...]] = [()] * len(sequences)
    for slot in packing.slots:
        tree = trees[slot.index]
        start = slot.row * packing.width
        # A flat index, like the paths; `ends_N` counts columns within the row, so `start` is taken off there.
        free = start + slot.start
        path: tuple[int, ...] = ()
        ends_N[free : free + tree.size] = slot.start + tree.size
        for index, common in zip(tree.members, tree.shared, strict=True):
            new = sequences[index][common:]
            if path:
                ends_N[torch.tensor(path[common:], dtype=torch.long)] = free - start  # no later member is behind them
            ids_N[free : free + len(new)] = torch.tensor(new, dtype=torch.long)
            positions_N[free : free + len(new)] = torch.arange(common, len(sequences[index]))
            path = paths[index] = (*path[:common], *range(free, free + len(new)))
            free += len(new)
    shape = (packing.num_rows, packing.width)
    return Packed(
        input_ids_B_T=ids_N.view(shape),
        position_ids_B_T=positions_N.view(shape),
        offsets=tuple(path[0] for path in paths),
        paths=paths,  # a list: `to_device` does not look through its numbers
        ends_B_T=ends_N.view(shape),
    )


def lay_out_packed(sequences: Sequence[Sequence[int]]) -> Packed:
    """Lay sequences side by side in rows; each column after the last sequence of a row is a sequence of one token."""
    packing = pack_into_rows([len(s) for s in sequences])
    size = packing.num_rows * packing.width
    ids, positions, offsets = [0] * size, [0] * size, [0] * len(sequences)
    for slot in packing.slots:  # in lists: a tensor's slice costs as much as a hundred tokens
        sequence = sequences[slot.index]
        start = offsets[slot.index] = slot.row * packing.width + slot.start
        ids[start : start + len(sequence)] = sequence
        positions[start : start + len(sequence)] = range(len(sequence))
    shape = (packing.num_rows, packing.width)
    return Packed(
        input_ids_B_T=torch.tensor(ids, dtype=torch.long).view(shape),
        position_ids_B_T=torch.tensor(positions, dtype=torch.long).view(shape),
        offsets=tuple(offsets),
    )


def lay_out_packed_indexed(sequences: Sequence[Sequence[int]]) -> Packed:
    """Lay all sequences in one row without a gap, with everything by which transformers tells sequences of a row apart."""
    lengths = [len(s) for s in sequences]
    ends = [0, *accumulate(lengths)]
    number_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Packed(
        input_ids_B_T=torch.tensor([t for s in sequences for t in s])[None],
        position_ids_B_T=torch.cat([torch.arange(n) for n in lengths])[None],
        offsets=tuple(ends[:-1]),
        seq_idx_B_T=number_T.int()[None],
        cu_seq_lens=torch.tensor(ends, dtype=torch.int32),
        longest=max(lengths),
    )


def lay_out_padded(sequences: Sequence[Sequence[int]]) -> Packed:
    """Lay out one sequence a row, padded on its right to the longest."""
    lengths_B = torch.tensor([len(s) for s in sequences])
    width = int(lengths_B.max())
    positions_B_T = torch.arange(width).expand(len(sequences), width)
    return Packed(
        input_ids_B_T=torch.tensor([[*s, *[0] * (width - len(s))] for s in sequences]),
        position_ids_B_T=positions_B_T.contiguous(),
        offsets=tuple(row * width for row in range(len(sequences))),
        mask_B_T=(positions_B_T < lengths_B[:, None]).long(),
    )


LAYOUTS: Mapping[str, Callable[[Sequence[Sequence[int]]], Packed]] = {
    SHARED: lay_out_trees,
    "packed": lay_out_packed,
    "packed_indexed": lay_out_packed_indexed,
    "padded": lay_out_padded,
}
"""Name -> function, in the order in which they are tried: the fastest first."""


def list_candidate_layouts(share: bool) -> tuple[str, ...]:
    """Return the layouts to try; `share` if several responses to a prompt are in a step."""
    return tuple(name for name in LAYOUTS if share or name != SHARED)


def lay_out_single(sequence: Sequence[int]) -> Packed:
    """Lay out one sequence alone, as plain transformers takes it: every layout has to give the same states."""
    return Packed(input_ids_B_T=torch.tensor([list(sequence)]), position_ids_B_T=None, offsets=(0,))


def find_positions_before(laid_out: Packed, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return flat positions that predict tokens [start, stop) of each sequence: one to the left of each token."""
    positions = [laid_out.flat_index(i, t - 1) for i, (start, stop) in enumerate(spans) for t in range(start, stop)]
    return torch.tensor(positions, dtype=torch.long)


def find_positions_before_trained(laid_out: Packed, rollouts: Sequence[Rollout]) -> Tensor:
    """Return [N] flat positions that predict the trained tokens of these rollouts, the sequences that were laid out."""
    positions = [
        laid_out.flat_index(i, len(r.prompt_ids) - 1 + index)
        for i, r in enumerate(rollouts)
        for index in r.trained_positions
    ]
    return torch.tensor(positions, dtype=torch.long)


Body = Callable[[Packed], Tensor]
"""Function that returns [B*T, D] the last hidden states of sequences that are laid out."""


def layout_error(body: Body, layout: str, vocab_size: int, dtype: torch.dtype, *, masks_decide: bool = True) -> float:
    """Measure the error of a layout for this model: at most 1 passes.

    Two differences are measured relative to the largest hidden state: sequences laid out together against each alone, and
    with these neighbours against with others. Each is divided by its bound, and the larger ratio is the result. NaN where
    the model's states are not finite. Infinite for trees if `masks_decide` is false: see `opd.models.weights.obeys_masks`.
    """
    if layout == SHARED and not masks_decide:
        return math.inf
    alone, neighbour = measure_layout_differences(body, layout, vocab_size)
    # torch's `max` is NaN if one of the two is; Python's may lose it.
    worst = torch.tensor([alone / ALONE_TOLERANCE[dtype], neighbour / NEIGHBOUR_TOLERANCE]).max()
    return float(worst)


def measure_layout_differences(body: Body, layout: str, vocab_size: int) -> tuple[float, float]:
    """Return two differences, relative to the largest hidden state: together against alone, other neighbours against these."""
    probes, other_probes = _make_probes(layout, vocab_size)
    with torch.no_grad():
        together = _hidden_states(body, LAYOUTS[layout](probes), probes)
        alone = [_hidden_states(body, lay_out_single(sequence), [sequence])[0] for sequence in probes]
        # Each sequence in turn keeps its tokens while all of its neighbours get others.
        changed = [
            _hidden_states(body, LAYOUTS[layout](mixed), mixed)[i]
            for i, mixed in enumerate(
                [*other_probes[:i], probes[i], *other_probes[i + 1 :]] for i in range(len(probes))
            )
        ]
    size = torch.stack([states.abs().max() for states in alone]).max()

    def measure_difference(hidden_states: Sequence[Tensor]) -> float:
        return float(
            torch.stack([(a - b).abs().max() for a, b in zip(together, hidden_states, strict=True)]).max() / size
        )

    return measure_difference(alone), measure_difference(changed)


def _make_probes(layout: str, vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Make sequences, and others in their places: random tokens, for trees behind prefixes that the two have in common."""
    gen = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, vocab_size, (2, n), generator=gen).tolist() for n in PROBE_LENGTHS]
    if layout != SHARED:
        return [pair[0] for pair in drawn], [pair[1] for pair in drawn]
    stem, fork, apart = (torch.randint(0, vocab_size, (n,), generator=gen).tolist() for n in (16, 8, 40))
    # Unlike each of the tokens 0 to 3 that stand behind a prefix below.
    fork[0] = vocab_size - 1
    starts = [stem, [*stem, *fork], [*stem, *fork]]
    # The first token behind a prefix says whose it is, so that the tree has one shape, whoever takes which place: other
    # shapes round otherwise. The fourth sequence is a tree of its own beside it.
    kinds = [
        [[*start, kind + 2 * (i == 2), *pair[kind]] for i, (start, pair) in enumerate(zip(starts, drawn, strict=True))]
        for kind in (0, 1)
    ]
    alone = [[(stem[0] + 1) % vocab_size, *tokens] for tokens in (apart, apart[::-1])]
    return [*kinds[0], alone[0]], [*kinds[1], alone[1]]


def _hidden_states(body: Body, laid_out: Packed, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return [T, D] the hidden states of each sequence, float64."""
    flat_N_D = body(laid_out).double().cpu()
    return [flat_N_D[[laid_out.flat_index(i, position) for position in range(len(s))]] for i, s in enumerate(sequences)]


def prove_layout(error: Callable[[str], float], label: str, *, share: bool = False) -> LayoutProof:
    """Return the first layout whose `error`, a `layout_error`, is at most 1; trees are tried only with `share`.

    A model whose states are not finite proves nothing. It gets the padded layout, which is safe by construction; whoever
    uses the states later judges them row by row. Raises: RunError if no layout is right.
    """
    tried: dict[str, float] = {}
    for layout in list_candidate_layouts(share):
        tried[layout] = error(layout)
        if math.isnan(tried[layout]):
            return LayoutProof(layout="padded", tried=tried)
        if tried[layout] <= 1:
            return LayoutProof(layout=layout, tried=tried)
    shown = ", ".join(f"{layout} {value:.1e}" for layout, value in tried.items())
    raise RunError(
        f"{label}: sequences of one forward pass see each other in every layout (error over what rounding explains: {shown}); "
        "this architecture cannot be trained or scored in batches"
    )
