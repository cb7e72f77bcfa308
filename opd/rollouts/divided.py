"""Parts of a model that several processes can divide among them. vLLM would refuse the rest later, in processes of a worker."""

from __future__ import annotations

from typing import Any

from opd.rollouts.served import Refusal

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
"""Keys of config.json that vLLM divides by the number of processes, and that have to be a multiple of it."""


def find_indivisible_part(config: Any, size: int, key: str) -> Refusal | None:
    """Return the first part of a model that `size` processes cannot divide; None if they can. `config` is an object of
    transformers, `key` the pipeline's key with the size."""
    text = config.get_text_config(decoder=True)
    for name in DIVIDED:
        part_size = getattr(text, name, None)
        if isinstance(part_size, int) and part_size % size:
            return _make_error(name, part_size, f"a multiple of {key} {size}", key)
    heads = getattr(text, "num_key_value_heads", None)
    # Fewer heads than processes: some hold the same one.
    if isinstance(heads, int) and heads and max(heads, size) % min(heads, size):
        return _make_error("num_key_value_heads", heads, f"a multiple or a divisor of {key} {size}", key)
    return None


def _make_error(name: str, part_size: int, requirement: str, key: str) -> Refusal:
    return Refusal(
        name, found=str(part_size), wanted=f"{requirement}, so that its processes can divide them", fix=f"change {key}"
    )
