"""Who trains on which rows: decided once per step in the driver, from lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowSize:
    """What planning needs to know of a row."""

    sample_id: str
    domain: str
    length: int
    """Prompt and response tokens."""


def plan_micro_batches(rows: Sequence[RowSize], ranks: int, micro_batch_tokens: int) -> list[list[list[str]]]:
    """[rank][micro-batch] -> sample ids. Every rank gets the same number of micro-batches, some perhaps empty.

    ZeRO-3 gathers parameters in every forward, so ranks must run in step. Rows are dealt out longest first to the rank
    with the fewest tokens, then put into the order in which teachers score: by domain, the shortest first. So the first
    micro-batches can be trained while the last teachers score, and each touches few heads.
    """
    shares: list[list[RowSize]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=lambda r: (-r.length, r.sample_id)):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += row.length
    num = max(1, -(-max(loads) // micro_batch_tokens))
    return [_split(sorted(share, key=lambda r: (r.domain, r.length, r.sample_id)), num) for share in shares]


def _split(rows: Sequence[RowSize], num: int) -> list[list[str]]:
    """Cut into `num` consecutive runs of about equal tokens."""
    total = sum(row.length for row in rows)
    parts: list[list[str]] = [[] for _ in range(num)]
    done = 0
    for row in rows:
        # The middle of the row decides, so a long last row does not open a part of its own.
        parts[min(num - 1, int((done + row.length / 2) * num / total))].append(row.sample_id)
        done += row.length
    return parts
