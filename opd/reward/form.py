"""Length and form of answers, and what is left of a score when they are taken out of it: M s, with M = I - X (X'X)^+ X'.

Shapes: F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Doubles = NDArray[np.float64]

Controls = Literal["none", "length", "form"]


def measure_features(texts: Sequence[str], tokens: Sequence[int], controls: Controls) -> Doubles:
    """Return [answers, F] what the preference must not depend on: a constant, number of tokens and its logarithm, lines, and the share
    of characters that are neither letters, digits nor blanks."""
    columns = [np.ones(len(texts))]
    if controls != "none":
        columns += [np.array(tokens, np.float64), np.log1p(np.array(tokens, np.float64))]
    if controls == "form":
        columns.append(np.array([text.count("\n") for text in texts], np.float64))
        marks = [sum(not (c.isalnum() or c.isspace()) for c in text) / max(1, len(text)) for text in texts]
        columns.append(np.array(marks, np.float64))
    return np.stack(columns, axis=1)


def remove_explained(features: Doubles, values: Doubles) -> Doubles:
    """Return [answers] what is left of the values after a linear regression on the features, [answers, F]: M times the values."""
    scale = np.abs(features).max(axis=0)
    scaled = features / np.where(scale > 0, scale, 1.0)
    left: Doubles = values - scaled @ np.linalg.lstsq(scaled, values, rcond=1e-9)[0]
    return left
