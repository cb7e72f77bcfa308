"""Domains from reasoning-gym in small configurations with short answers, as chat messages.

Each row carries reasoning-gym's own entry, so that its verifier can judge any answer:
`reasoning_gym.get_score_answer_fn(row["metadata"]["task"])(answer, row["metadata"]["entry"])` is in 0..1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opd.environments.game import take_unique
from opd.environments.retry import gym_row

DRAWS_PER_ROW = 20

DOMAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "chain_sum": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "basic_arithmetic": (
        "basic_arithmetic",
        {
            "min_terms": 2,
            "max_terms": 3,
            "min_digits": 1,
            "max_digits": 1,
            "operators": ("+", "-", "*"),
            "allow_parentheses": False,
            "allow_negation": False,
        },
    ),
    "products": ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "letter_counting": ("letter_counting", {"min_words": 6, "max_words": 12}),
    "spell_backward": ("spell_backward", {"min_word_len": 3, "max_word_len": 5}),
    "word_sorting": ("word_sorting", {"min_words": 3, "max_words": 4, "min_word_length": 3, "max_word_length": 6}),
    "word_reversal": ("word_sequence_reversal", {"min_words": 3, "max_words": 5}),
    "number_sorting": (
        "number_sorting",
        {"min_numbers": 3, "max_numbers": 4, "max_decimals": 0, "min_value": 0, "max_value": 99},
    ),
    "number_filtering": (
        "number_filtering",
        {"min_numbers": 3, "max_numbers": 5, "max_decimals": 0, "min_value": 0, "max_value": 99},
    ),
    "gcd": ("gcd", {"max_value": 99}),
    "lcm": ("lcm", {"max_value": 60}),
    "caesar_cipher": ("caesar_cipher", {"delimiter": " ", "min_words": 1, "max_words": 2, "max_rotation": 3}),
    # Start at 1: reasoning-gym writes zero as an empty string and then refuses its own answer.
    "base_conversion": ("base_conversion", {"min_base": 2, "max_base": 10, "min_value": 1, "max_value": 255}),
    "count_bits": ("count_bits", {"max_n": 4095}),
    "simple_equations": (
        "simple_equations",
        {"min_terms": 2, "max_terms": 2, "max_value": 9, "operators": ("+", "-"), "operators_weights": (0.5, 0.5)},
    ),
    "fractions": ("fraction_simplification", {"max_value": 60, "max_factor": 10, "styles": ("plain",)}),
    "needle": ("needle_haystack", {"min_num_statements": 2, "max_num_statements": 4}),
    "family": ("family_relationships", {"min_family_size": 4, "max_family_size": 5}),
    "isomorphic_strings": ("isomorphic_strings", {"min_string_length": 2, "max_string_length": 5}),
    "rotation": ("rotate_matrix", {"min_n": 2, "max_n": 2, "min_rotations": 1, "max_rotations": 3}),
    "relations": ("aiw", {"max_entities": 6}),
    "complex_sums": (
        "complex_arithmetic",
        {"min_real": 1, "max_real": 9, "min_imag": 1, "max_imag": 9, "operations": ("+",), "operations_weights": [1.0]},
    ),
    "matrix": (
        "manipulate_matrix",
        {"min_rows": 2, "max_rows": 2, "min_cols": 2, "max_cols": 2, "min_transforms": 1, "max_transforms": 1},
    ),
    "kin": ("family_relationships", {"min_family_size": 3, "max_family_size": 4}),
    "decimal_sums": (
        "decimal_chain_sum",
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 1,
            "min_decimal_places": 1,
            "max_decimal_places": 1,
        },
    ),
}


def make_rows(domain: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` rows with different prompts, the same for the same arguments.

    Raises: ConfigError if the domain has fewer different prompts.
    """
    return take_unique(_sample_rows(domain, count * DRAWS_PER_ROW, seed), count, f"suite reasoning, domain {domain}")


def _sample_rows(domain: str, limit: int, seed: int) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    family, config = DOMAINS[domain]
    for entry in reasoning_gym.create_dataset(family, seed=seed, size=limit, **config):
        row = gym_row(family, entry)
        yield {**row, "completion": [{"role": "assistant", "content": row["answer"]}]}
