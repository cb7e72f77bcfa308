"""The slopes of `benchmarks.draft`."""

from __future__ import annotations

import pytest
import torch

from benchmarks.draft import fit_slope


def test_a_slope_has_an_interval_by_texts() -> None:
    entropy = torch.rand(400, generator=torch.Generator().manual_seed(0)).double()
    noise = torch.randn(400, generator=torch.Generator().manual_seed(1)).double()
    text = torch.arange(400)
    assert fit_slope(entropy, 2.0 - 0.3 * entropy, text) == pytest.approx((-0.3, 0.0), abs=1e-12)
    slope, half = fit_slope(entropy, noise, text)
    # The textbook's error of a slope, of residuals of equal size.
    centred = entropy - entropy.mean()
    residual = noise - noise.mean() - slope * centred
    assert half == pytest.approx(1.96 * float((residual**2).mean().sqrt() / centred.norm()), rel=0.1)
    # Starts that say the same as others of their text do not narrow it.
    copies = fit_slope(entropy.repeat(4), noise.repeat(4), text.repeat(4))
    assert copies == pytest.approx((slope, half))
    assert fit_slope(entropy.repeat(4), noise.repeat(4), torch.arange(1600))[1] == pytest.approx(half / 2)
