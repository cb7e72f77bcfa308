"""Division of a step's rows among scoring workers.

A batch, the rows of one forward pass, is never divided, because the last bits of a row's states depend on what shares its pass. Which
worker takes a batch changes nothing: every worker cuts the rows that it gets into the same batches again (`split_batches`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from opd.records.types import Rollout, Teacher
from teachers.weight_keys import base_key, weight_key

TeacherRows = tuple[Teacher, float, tuple[Rollout, ...]]
"""A teacher, its weight in the domain of these rows, and the rows: with its own prompt in each, if it has one."""


def assign_rows(
    groups: Sequence[TeacherRows], workers: int, cut: Callable[[TeacherRows], Sequence[Sequence[Rollout]]]
) -> list[list[TeacherRows]]:
    """Return each worker's share of the groups. `cut` returns a group's batches, in the order in which a scorer computes them.

    In a share, groups of the same teacher stand side by side, and so do teachers with the same base, so that each is loaded once.
    Apart from that the groups keep their order, which is the order of the trainer's micro-batches.
    """
    ordered = _sort_by_weights(groups)
    batches = [(number, batch) for number, group in enumerate(ordered) for batch in cut(group)]
    owners = assign_batches(
        [base_key(ordered[number][0]) for number, _ in batches],
        [sum(len(r.prompt_ids) + len(r.response_ids) for r in batch) for _, batch in batches],
        workers,
    )
    shares: list[dict[int, list[Rollout]]] = [defaultdict(list) for _ in range(workers)]
    for (number, batch), owner in zip(batches, owners, strict=True):
        shares[owner][number] += batch
    return [
        [(ordered[number][0], ordered[number][1], tuple(rows)) for number, rows in share.items()] for share in shares
    ]


def assign_batches(bases: Sequence[str], tokens: Sequence[int], workers: int) -> list[int]:
    """Return the worker of each batch. `bases`: key of the weights that a batch needs, equal ones side by side; `tokens`: its size.

    Workers get equal numbers of tokens, give or take a batch or two. Each base goes to as few workers as that allows, since a worker
    has to load it: worker after worker is filled up, so `workers` - 1 bases at most are divided once more than they must be. The
    batches of a base are dealt out in order, so that all its workers are at the same place of the trainer's order.
    """
    sizes: dict[str, int] = defaultdict(int)
    for base, size in zip(bases, tokens, strict=True):
        sizes[base] += size
    capacity = -(-sum(sizes.values()) // workers)  # rounded up
    room, worker = capacity, 0
    quotas: dict[str, dict[int, int]] = {}
    """Base -> worker -> tokens that it is to take."""
    for base, left in sizes.items():
        quotas[base] = {}
        while left > 0:
            quotas[base][worker] = min(left, room)
            left, room = left - quotas[base][worker], room - quotas[base][worker]
            if room == 0:
                room, worker = capacity, worker + 1
    owners = []
    for base, size in zip(bases, tokens, strict=True):
        quota = quotas[base]
        owners.append(max(quota, key=lambda index: (quota[index], -index)))
        quota[owners[-1]] -= size
    return owners


def _sort_by_weights(groups: Sequence[TeacherRows]) -> list[TeacherRows]:
    """Return the groups with equal teachers side by side, and teachers of equal bases."""
    by_base: dict[str, dict[str, list[TeacherRows]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        by_base[base_key(group[0])][weight_key(group[0])].append(group)
    return [group for teachers in by_base.values() for part in teachers.values() for group in part]
