"""Check that the processes of an engine can divide a model among them. vLLM would refuse one that they cannot divide only later, in these
processes."""

from __future__ import annotations

from typing import Any

from opd.rollouts.served_families import Refusal

DIVIDED = (
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_n_heads",
    "mamba_num_heads",
)
"""Keys of config.json whose numbers vLLM divides by the number of processes, so that they have to be multiples of it."""


def find_indivisible_part(config: Any, size: int, key: str) -> Refusal | None:
    """Return the refusal of the first part of a model that `size` processes cannot divide; None if they can divide all. `config` is a
    config object of transformers, `key` the pipeline's key for the number of processes."""
    text = config.get_text_config(decoder=True)
    for name in DIVIDED:
        part_size = getattr(text, name, None)
        if isinstance(part_size, int) and part_size % size:
            return _make_refusal(name, part_size, f"a multiple of {key} {size}", key)
    heads = getattr(text, "num_key_value_heads", None)
    # If there are fewer of these heads than processes, several processes hold the same head, so the number may also be a divisor.
    if isinstance(heads, int) and heads and max(heads, size) % min(heads, size):
        return _make_refusal("num_key_value_heads", heads, f"a multiple or a divisor of {key} {size}", key)
    return None


def _make_refusal(name: str, part_size: int, requirement: str, key: str) -> Refusal:
    return Refusal(
        name, found=str(part_size), wanted=f"{requirement}, so that its processes can divide them", fix=f"change {key}"
    )
