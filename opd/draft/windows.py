"""Choice of the positions from which a draft guesses in a micro-batch, and where it finds what it reads there.

A draft learns from a few windows of consecutive positions rather than from all of them: that bounds its time and memory, whatever the
micro-batch's size, and other windows come in the next step.

Shapes: N trained tokens of the micro-batch, S sequences with a window, L positions of the longest, I windows, W starts of a window, K
guesses of a start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opd.draft.head import Windows
from opd.train.batch import MicroBatch


@dataclass(frozen=True)
class DraftBatch:
    """Windows of a micro-batch. Starts beyond a window's last trained token are filled up and not judged."""

    column_S_L: Tensor
    """Flat index of each position of the sequences; 0 beyond their ends."""
    windows: Windows
    row_I_W_K: Tensor
    """Index, among the N trained tokens, of the one that each guess is about; 0 where `valid_I_W_K` is False."""
    valid_I_W_K: Tensor
    """True where there is a trained token to judge the guess by; a start's first guesses, without a gap."""
    domains: tuple[str, ...]
    """Domain of each window."""


def choose_windows(batch: MicroBatch, steps: int, width: int, limit: int, offset: int) -> DraftBatch | None:
    """Return windows of `width` starts, `limit` starts at most, spread evenly over the trained tokens; None if there is none.

    `steps`: guesses of a start. `offset`: another one chooses other windows where not all fit.
    """
    packed, positions = batch.packed, _find_positions(batch)
    candidates: list[tuple[int, int, int]] = []
    """Sequence, first row, number of rows."""
    first = 0
    for sequence, trained in enumerate(batch.trained_lengths):
        for begin in range(first, first + trained, width):
            candidates.append((sequence, begin, min(width, first + trained - begin)))
        first += trained
    # The first guess after a position is about the token after the next: position 0 has no start before it.
    usable = [c for c in candidates if any(positions[row] > 0 for row in range(c[1], c[1] + c[2]))]
    count = max(1, limit // width)
    if len(usable) > count:
        usable = [usable[(offset + index * len(usable) // count) % len(usable)] for index in range(count)]
    if not usable:
        return None
    ends = _last_rows(batch.trained_lengths)
    chosen = sorted({sequence for sequence, _, _ in usable})
    length = max(int(positions[ends[sequence]]) for sequence in chosen) + 1 + steps
    column_S_L = torch.zeros(len(chosen), length, dtype=torch.long)
    for line, sequence in enumerate(chosen):
        size = int(positions[ends[sequence]]) + 1
        column_S_L[line, :size] = (
            torch.tensor(packed.paths[sequence][:size])
            if packed.paths
            else torch.arange(packed.offsets[sequence], packed.offsets[sequence] + size)
        )
    row_I_W_K = torch.zeros(len(usable), width, steps, dtype=torch.long)
    valid_I_W_K = torch.zeros(len(usable), width, steps, dtype=torch.bool)
    start_I_W = torch.zeros(len(usable), width, dtype=torch.long)
    for line, (sequence, begin, size) in enumerate(usable):
        for place in range(size):
            row, position = begin + place, int(positions[begin + place])
            if position == 0:
                continue
            start_I_W[line, place] = position - 1
            for step in range(min(steps, ends[sequence] - row + 1)):
                if int(positions[row + step]) != position + step:
                    break  # a message of the environment, which nobody guesses, stands in between
                row_I_W_K[line, place, step], valid_I_W_K[line, place, step] = row + step, True
    windows = Windows(torch.tensor([chosen.index(sequence) for sequence, _, _ in usable]), start_I_W)
    return DraftBatch(
        column_S_L, windows, row_I_W_K, valid_I_W_K, tuple(batch.domains[sequence] for sequence, _, _ in usable)
    )


def _last_rows(trained_lengths: tuple[int, ...]) -> list[int]:
    """Return the index of each sequence's last trained token."""
    return (torch.tensor(trained_lengths).cumsum(0) - 1).tolist()


def _find_positions(batch: MicroBatch) -> list[int]:
    """Return [N] the position in its sequence that predicts each trained token."""
    packed, flat_N = batch.packed, batch.predict_N
    parts = flat_N.split(list(batch.trained_lengths))
    positions: list[int] = []
    for sequence, flat in enumerate(parts):
        if packed.paths:
            # A path's flat indices grow, because a tree is laid out depth first.
            found = torch.searchsorted(torch.tensor(packed.paths[sequence]), flat.cpu())
        else:
            found = flat.cpu() - packed.offsets[sequence]
        positions += found.tolist()
    return positions
