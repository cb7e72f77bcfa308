"""Layouts: ways to put several token sequences into one forward pass, and the proof that the sequences do not see each other.

    shared           like packed, but sequences that begin alike are a tree: their prompt once, then the responses to it. A mask
                     of four dimensions lets each token see its own way to the root. Used for several responses to a prompt
    packed           sequences side by side in rows of one width; position ids begin again at 0 with each sequence
    packed_varlen    all sequences in one row, which only a kernel of attention tells apart, by their lengths: no mask. On GPUs
    packed_indexed   all sequences in one row; sequence indices and cumulative lengths also tell them apart
    padded           one sequence in each row, padding on its right, and an attention mask

Packing is the fastest (padding costs 1.9x on mixed lengths), but it is right only if a model builds its mask from the position
ids. With recurrent layers, short convolutions, ALiBi and learned positions a sequence changes its neighbour's hidden states by
0.002 to 0.89 of their size, and no error tells. So every model is tried before it trains or scores: three sequences laid out
together must give the states that each gives alone, and other neighbours must change nothing. The first layout that passes is
taken. In a causal model padding on the right cannot reach back, so `padded` is tried last and fails for few models.

A tree also needs layers that attend to everything that the mask allows (`opd.models.weights.obeys_masks`). The trial cannot show
that, because a layer's window may be longer than the sequences of the trial. The gradient of a shared prompt is the sum over its
responses; attention's backward pass adds it up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from opd.errors import RunError
from opd.models.packing import SHARED, build_trees, pack_into_rows
from opd.records.types import LayoutProof, Rollout

PACKED_VARLEN = "packed_varlen"
"""Name of the layout for `opd.models.varlen`."""
PROBE_LENGTHS = (37, 29, 43)
"""Tokens of the sequences of the trial: longer than a short convolution, short enough to share a row."""
ALONE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference between a sequence among others and the same alone that rounding explains, relative to the largest hidden
state. Measured: 2e-6 in float32 and 0.01 in bfloat16 on tiny models, 5e-5 in float32 with thirty layers. Positions that go on
where they should begin again show 0.4 and more. The bound below finds smaller leaks."""
NEIGHBOUR_TOLERANCE = 1e-4
"""Largest change that is allowed when only the neighbours' tokens change, relative in the same way. The shapes stay the same, so a
model that keeps its sequences apart shows 0 in every type. The smallest leak that we know shows 2e-3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Token sequences laid out for one forward pass."""

    input_ids_B_T: Tensor
    position_ids_B_T: Tensor | None
    """Position of each token in its sequence, from 0; None: the model counts positions itself."""
    offsets: tuple[int, ...]
    """Flat index (row * T + column) of each sequence's first token."""
    paths: Sequence[tuple[int, ...]] = ()
    """For each sequence, the flat index of every token. Empty if each sequence's tokens lie side by side, as in all layouts but
    trees."""
    ends_B_T: Tensor | None = None
    """For each column of a tree, the first column to its right that does not see it. None: the model makes its own mask."""
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

        The mask of a tree is additive, in the model's type `dtype`. With a boolean mask torch would make an additive one in every
        layer, and keep all of these for the backward pass. With None the mask stays boolean.
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
    """Return [B, 1, T, T] True where a column (third axis) sees another one (fourth axis): itself, and those to its left that are
    on its way to the root."""
    column_T = torch.arange(ends_B_T.shape[1], device=ends_B_T.device)
    return ((column_T <= column_T[:, None]) & (column_T[:, None] < ends_B_T[:, None, :]))[:, None]


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where the mask is True, and minus infinity elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def lay_out_trees(sequences: Sequence[Sequence[int]]) -> Packed:
    """Lay out trees side by side in rows, each depth first. A column after the last tree of a row sees only itself."""
    trees = build_trees(sequences)
    packing = pack_into_rows([tree.size for tree in trees])
    ids_N = torch.zeros(packing.num_rows * packing.width, dtype=torch.long)
    positions_N = torch.zeros_like(ids_N)
    # At first no later column sees any column. For padding this stays so.
    ends_N = torch.arange(1, packing.width + 1).repeat(packing.num_rows)
    paths: list[tuple[int, ...]] = [()] * len(sequences)
    for slot in packing.slots:
        tree = trees[slot.index]
        start = slot.row * packing.width
        # `free` is the next free flat index, as in `paths`. `ends_N` counts columns within the row, so `start` is subtracted there.
        free = start + slot.start
        path: tuple[int, ...] = ()
        ends_N[free : free + tree.size] = slot.start + tree.size
        for index, common in zip(tree.members, tree.shared, strict=True):
            new = sequences[index][common:]
            if path:
                # The member before shares only its first `common` tokens; no column from here on sees the others.
                ends_N[torch.tensor(path[common:], dtype=torch.long)] = free - start
            ids_N[free : free + len(new)] = torch.tensor(new, dtype=torch.long)
            positions_N[free : free + len(new)] = torch.arange(common, len(sequences[index]))
            path = paths[index] = (*path[:common], *range(free, free + len(new)))
            free += len(new)
    shape = (packing.num_rows, packing.width)
    return Packed(
        input_ids_B_T=ids_N.view(shape),
        position_ids_B_T=positions_N.view(shape),
        offsets=tuple(path[0] for path in paths),
        paths=paths,  # a list, because `to_device` would go through every number of a tuple
        ends_B_T=ends_N.view(shape),
    )


def lay_out_packed(sequences: Sequence[Sequence[int]]) -> Packed:
    """Lay sequences side by side in rows; each column after the last sequence of a row is a sequence of one token."""
    packing = pack_into_rows([len(s) for s in sequences])
    size = packing.num_rows * packing.width
    ids, positions, offsets = [0] * size, [0] * size, [0] * len(sequences)
    for slot in packing.slots:  # into lists, because one slice of a tensor costs as much time as a hundred tokens here
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
    """Lay all sequences in one row without a gap, with all arguments by which transformers can tell the sequences of a row apart."""
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


def lay_out_packed_varlen(sequences: Sequence[Sequence[int]]) -> Packed:
    """Lay out as `lay_out_packed_indexed`, with an attention mask that hides nothing.

    Without one transformers would make a mask of [T, T] from the position ids. With this one it makes none, and takes the row for
    one sequence, as it would be for attention that does not go by the lengths.
    """
    laid_out = lay_out_packed_indexed(sequences)
    return replace(laid_out, mask_B_T=torch.ones_like(laid_out.input_ids_B_T))


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
    PACKED_VARLEN: lay_out_packed_varlen,
    "packed": lay_out_packed,
    "packed_indexed": lay_out_packed_indexed,
    "padded": lay_out_padded,
}
"""Name of a layout -> function that makes it, in the order in which layouts are tried: the fastest first."""


def list_candidate_layouts(share: bool, varlen: bool = False) -> tuple[str, ...]:
    """Return the names of the layouts to try, in order. `share`: include trees, because a step has several responses to a prompt.
    `varlen`: include `PACKED_VARLEN`, because the model is on a GPU."""
    conditions = {SHARED: share, PACKED_VARLEN: varlen}
    return tuple(name for name in LAYOUTS if conditions.get(name, True))


def lay_out_single(sequence: Sequence[int]) -> Packed:
    """Lay out one sequence alone, with ids only. Every layout has to give the same states as this."""
    return Packed(input_ids_B_T=torch.tensor([list(sequence)]), position_ids_B_T=None, offsets=(0,))


def find_positions_before(laid_out: Packed, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the flat indices of the positions that predict tokens `start` to `stop` - 1 of each sequence: those before each token."""
    positions = [laid_out.flat_index(i, t - 1) for i, (start, stop) in enumerate(spans) for t in range(start, stop)]
    return torch.tensor(positions, dtype=torch.long)


def find_positions_before_trained(laid_out: Packed, rollouts: Sequence[Rollout]) -> Tensor:
    """Return [N] the flat indices of the positions that predict the trained tokens; the rollouts are the sequences of `laid_out`."""
    positions = [
        laid_out.flat_index(i, len(r.prompt_ids) - 1 + index)
        for i, r in enumerate(rollouts)
        for index in r.trained_positions
    ]
    return torch.tensor(positions, dtype=torch.long)


Body = Callable[[Packed], Tensor]
"""A model's forward pass without its output head: returns [B*T, D] the last hidden states."""


def layout_error(
    body: Body,
    layout: str,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    masks_decide: bool = True,
    lengths_decide: bool = True,
) -> float:
    """Measure the error of a layout for a model; a layout with an error of at most 1 passes.

    Two differences of hidden states are measured: a sequence among others against the same alone, and among some neighbours
    against among others. Each is divided by its bound, and the larger quotient is the error. It is NaN if the model's states
    are not finite. It is infinite for trees if `masks_decide` is False (see `opd.models.weights.obeys_masks`), and for
    `PACKED_VARLEN` if `lengths_decide` is False (see `opd.models.weights.takes_lengths`).
    """
    if (layout == SHARED and not masks_decide) or (layout == PACKED_VARLEN and not lengths_decide):
        return math.inf
    alone, neighbour = measure_layout_differences(body, layout, vocab_size)
    # torch's `max` is NaN if one of the two is NaN; Python's `max` may lose the NaN.
    worst = torch.tensor([alone / ALONE_TOLERANCE[dtype], neighbour / NEIGHBOUR_TOLERANCE]).max()
    return float(worst)


def measure_layout_differences(body: Body, layout: str, vocab_size: int) -> tuple[float, float]:
    """Return two differences, relative to the largest hidden state: of sequences among others from the same alone, and of sequences
    among some neighbours from the same among others."""
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
    """Make sequences of random tokens, and others of the same lengths for their places. For trees both have the same prefixes."""
    gen = torch.Generator().manual_seed(0)
    pairs = [torch.randint(0, vocab_size, (2, n), generator=gen).tolist() for n in PROBE_LENGTHS]
    if layout != SHARED:
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    stem, fork, apart = (torch.randint(0, vocab_size, (n,), generator=gen).tolist() for n in (16, 8, 40))
    # The tree must fork here: below, a token from 0 to 3 follows each prefix, and this one must differ from it.
    fork[0] = vocab_size - 1
    starts = [stem, [*stem, *fork], [*stem, *fork]]
    # The token behind a prefix tells the sequences apart, so that the tree has the same shape, whichever sequences are in it:
    # another shape would round differently. A fourth sequence is a tree of its own beside the first tree.
    kinds = [
        [[*start, kind + 2 * (i == 2), *pair[kind]] for i, (start, pair) in enumerate(zip(starts, pairs, strict=True))]
        for kind in (0, 1)
    ]
    alone = [[(stem[0] + 1) % vocab_size, *tokens] for tokens in (apart, apart[::-1])]
    return [*kinds[0], alone[0]], [*kinds[1], alone[1]]


def _hidden_states(body: Body, laid_out: Packed, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return [T, D] the hidden states of each sequence, float64."""
    flat_N_D = body(laid_out).double().cpu()
    return [flat_N_D[[laid_out.flat_index(i, position) for position in range(len(s))]] for i, s in enumerate(sequences)]


def prove_layout(
    error: Callable[[str], float], label: str, *, share: bool = False, varlen: bool = False
) -> LayoutProof:
    """Return the first layout with an error of at most 1. `error` measures a layout's `layout_error`; `share` and `varlen` as for
    `list_candidate_layouts`.

    If a model's states are not finite, nothing can be proven. It gets the padded layout, in which causal sequences cannot see each
    other; code that uses the states later judges them row by row. Raises: RunError if no layout is right.
    """
    tried: dict[str, float] = {}
    for layout in list_candidate_layouts(share, varlen):
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
