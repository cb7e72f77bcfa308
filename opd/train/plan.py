"""Plan which rank trains on which rows: decided once per step in the driver, before anything is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opd.models.packing import make_packing_units
from opd.records.types import Rollout


@dataclass(frozen=True, slots=True)
class RowSize:
    """Size of a row, or of rows that lie in one tree, from which the plan is made."""

    sample_id: str
    domain: str
    length: int
    """Prompt and response tokens; of a tree, those that are computed."""
    siblings: tuple[str, ...] = ()
    """The other samples of the tree, which stay beside this one."""


def measure_row_sizes(rollouts: Sequence[Rollout], *, share: bool = False) -> list[RowSize]:
    """Return the rows of a step; with `share`, rows of a domain that begin alike are one entry, a tree."""
    sizes = []
    for unit in make_packing_units(rollouts, share=share):
        rollout, *siblings = unit.rollouts
        sizes.append(RowSize(rollout.sample_id, rollout.domain, unit.size, tuple(r.sample_id for r in siblings)))
    return sizes


def plan_micro_batches(
    rows: Sequence[RowSize], ranks: int, micro_batch_tokens: int, *, padded: bool = False
) -> list[list[list[str]]]:
    """Return [rank][micro-batch] the sample ids. Every rank gets the same number of micro-batches, some perhaps empty.

    ZeRO-3 gathers parameters in every forward, so ranks must run in step. Rows are dealt out longest first to the rank
    with the fewest tokens, then put into the order in which teachers score: by domain, the shortest first. So the first
    micro-batches can be trained while the last teachers score, and each touches few heads. Where rows are `padded` to the
    longest of their micro-batch, that padding counts.
    """
    shares: list[list[RowSize]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=lambda r: (-r.length, r.sample_id)):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += row.length
    shares = [sorted(share, key=lambda r: (r.domain, r.length, r.sample_id)) for share in shares]
    num = max(1, -(-max(loads) // micro_batch_tokens))
    most = max(micro_batch_tokens, max((row.length for row in rows), default=0))
    # Padding fills a micro-batch to its longest row, so equal tokens may still be too large: cut finer until all fit.
    while padded and max(_padded_size(part) for share in shares for part in _split_runs(share, num)) > most:
        num += max(1, num // 4)
    return [
        [[i for row in part for i in (row.sample_id, *row.siblings)] for part in _split_runs(s, num)] for s in shares
    ]


def _padded_size(part: Sequence[RowSize]) -> int:
    return len(part) * max((row.length for row in part), default=0)


def _split_runs(rows: Sequence[RowSize], num: int) -> list[list[RowSize]]:
    """Cut into `num` consecutive runs of about equal tokens."""
    total = sum(row.length for row in rows)
    parts: list[list[RowSize]] = [[] for _ in range(num)]
    tokens_before = 0
    for row in rows:
        # The middle of a row decides to which part it belongs, so a long last row does not open a part of its own.
        parts[min(num - 1, int((tokens_before + row.length / 2) * num / total))].append(row)
        tokens_before += row.length
    return parts
