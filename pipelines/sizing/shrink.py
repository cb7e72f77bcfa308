"""Make a merge smaller until it fits, by the measures that `opd init` takes and `opd plan` advises, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

Data = dict[str, Any]

LORA_RATE = 2e-4
"""Peak learning rate of adapters."""
ADAPTERS: Data = {"student": {"lora": {"r": 16, "alpha": 32}}, "trainer": {"lr": LORA_RATE}}
"""The change that makes a pipeline train adapters, with the learning rate that they need."""


def shrinking_steps(*, gpus: bool) -> list[tuple[str, Data]]:
    """Return the measures that make a merge smaller, in order, each in words and as a change of the pipeline. `gpus`: True if the cluster
    has GPUs, on which the number of trainer ranks is left alone."""
    bfloat16 = {section: {"dtype": "bfloat16"} for section in ("rollout", "teachers", "trainer")}
    small_batches = {"trainer": {"micro_batch_tokens": 2048}, "rollout": {"max_num_seqs": 64}}
    fewer_teachers = {"teachers": {"workers": 1, "memory": "1GiB"}}
    recomputed = {"trainer": {"micro_batch_tokens": 1024, "gradient_checkpointing": True}}
    fewer_ranks = [] if gpus else [("one trainer rank", {"trainer": {"ranks": 1}})]
    return [
        *fewer_ranks,
        ("smaller batches", small_batches),
        ("fewer experts in memory at a time", fewer_teachers),
        ("recomputed activations", recomputed),
        ("bfloat16", bfloat16),
        ("adapters in place of all weights", ADAPTERS),
    ]


def shrink_to_fit(data: Data, fits: Callable[[Data], bool], *, gpus: bool) -> tuple[Data, list[str], bool]:
    """Return the pipeline, made smaller until it fits; the measures that were needed for that, in words; and True if it fits in the end."""
    steps = shrinking_steps(gpus=gpus)
    taken = next((steps[:count] for count in range(len(steps) + 1) if fits(_apply_steps(data, steps[:count]))), None)
    if taken is None:
        return _apply_steps(data, steps), [measure for measure, _ in steps], False
    # A late measure may be enough without those before it.
    for step in taken[:-1]:
        fewer = [other for other in taken if other is not step]
        taken = fewer if fits(_apply_steps(data, fewer)) else taken
    return _apply_steps(data, taken), [measure for measure, _ in taken], True


def _apply_steps(data: Data, steps: Sequence[tuple[str, Data]]) -> Data:
    return reduce(apply_change, (change for _, change in steps), data)


def apply_change(data: Data, change: Data) -> Data:
    """Return the data with a change merged into it: mappings key by key, all else in place of the old value."""
    merged = dict(data)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = apply_change(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return merged
