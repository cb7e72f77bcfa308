"""The plan that says which rank trains on which rows. The driver makes it once per step, before anything is scored."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from opd.models.packing import make_packing_units
from opd.records.types import Rollout

FIRST_SHARE = 32
"""A short first round has this part of a rank's tokens at most, so that training begins when few rows are scored."""
MANY_ROUNDS = 4
"""Rounds of micro-batches from which on the first is made short. It costs one round more, which is much for a step of fewer."""


@dataclass(frozen=True, slots=True)
class RowSize:
    """Size of a row, or of several rows that are computed together as a tree (`opd.models.packing.Tree`)."""

    sample_id: str
    domain: str
    length: int
    """Prompt and response tokens; in a tree, tokens that several samples share count once."""
    siblings: tuple[str, ...] = ()
    """The other samples of the tree, which are trained in the same micro-batch."""


def measure_row_sizes(rollouts: Sequence[Rollout], *, share: bool = False) -> list[RowSize]:
    """Return the sizes of a step's rows; with `share`, rows of a domain that begin alike are one entry, a tree."""
    sizes = []
    for unit in make_packing_units(rollouts, share=share):
        rollout, *siblings = unit.rollouts
        sizes.append(RowSize(rollout.sample_id, rollout.domain, unit.size, tuple(r.sample_id for r in siblings)))
    return sizes


def plan_micro_batches(
    rows: Sequence[RowSize], ranks: int, micro_batch_tokens: int, *, padded: bool = False, short_first: bool = False
) -> list[list[list[str]]]:
    """Return [rank][micro-batch] the sample ids. Every rank gets the same number of micro-batches, some of which may be empty.

    The number is the same because ZeRO-3's ranks gather weights together in every forward pass. Each row, longest first, goes
    to the rank with the fewest tokens. Then each rank's rows are put into the order in which teachers score: by domain, the
    shortest first. So the first micro-batches can be trained while the last teachers score, and a micro-batch needs few output
    heads. A micro-batch has about `micro_batch_tokens` tokens at most; with `padded` it has no more than these, or than its
    longest row, even if each row is filled up to the longest one beside it.

    `short_first`: cut the first of at least `MANY_ROUNDS` micro-batches in two, so that the first round needs few scored rows. The
    step then has one more forward and backward pass, of no more tokens.
    """
    shares: list[list[RowSize]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=lambda r: (-r.length, r.sample_id)):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += row.length
    shares = [sorted(share, key=lambda r: (r.domain, r.length, r.sample_id)) for share in shares]
    num = max(1, -(-max(loads) // micro_batch_tokens))  # rounded up
    most = max(micro_batch_tokens, max((row.length for row in rows), default=0))
    # Padding fills every row to the longest one of its micro-batch, which may make it too large: cut finer until all fit.
    while padded and max(_padded_size(part) for share in shares for part in _split_runs(share, num)) > most:
        num += max(1, num // 4)
    plan = [_split_runs(share, num) for share in shares]
    if short_first and num >= MANY_ROUNDS:
        plan = _shorten_first_round(plan)
    return [[[i for row in part for i in (row.sample_id, *row.siblings)] for part in parts] for parts in plan]


def _padded_size(part: Sequence[RowSize]) -> int:
    """Return the tokens of these rows if each is padded to the longest of them."""
    return len(part) * max((row.length for row in part), default=0)


def _split_runs(rows: Sequence[RowSize], num: int) -> list[list[RowSize]]:
    """Cut the rows into `num` consecutive runs with about equally many tokens."""
    total = sum(row.length for row in rows)
    parts: list[list[RowSize]] = [[] for _ in range(num)]
    tokens_before = 0
    for row in rows:
        # The middle of a row decides to which part it belongs, so a long last row does not open a part of its own.
        parts[min(num - 1, int((tokens_before + row.length / 2) * num / total))].append(row)
        tokens_before += row.length
    return parts


def _shorten_first_round(plan: list[list[list[RowSize]]]) -> list[list[list[RowSize]]]:
    """Cut the first micro-batch of each rank in two. The first of both has 1 / `FIRST_SHARE` of the rank's tokens, but at least a row.

    Returns the plan as it is if that is no less than every rank's first micro-batch.
    """
    cuts = []
    for parts in plan:
        most = sum(row.length for part in parts for row in part) / FIRST_SHARE
        cuts.append(max(1, bisect_right(list(accumulate(row.length for row in parts[0])), most)))
    if all(cut >= len(parts[0]) for cut, parts in zip(cuts, plan, strict=True)):
        return plan
    return [[parts[0][:cut], parts[0][cut:], *parts[1:]] for cut, parts in zip(cuts, plan, strict=True)]
