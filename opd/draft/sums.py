"""Numbers of a draft's step that people look at: its loss, and how many tokens a pass of the student would write with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed


class DraftSums:
    """Sums over the windows of a step, for all domains and for each. Guesses count as much as the token of their start's first."""

    def __init__(self, domains: Sequence[str], steps: int) -> None:
        self._domains = list(domains)
        self._steps = steps
        self._sums = torch.zeros(1 + len(self._domains), 3 + 3 * steps, dtype=torch.float64)
        """Row 0 of all domains, then a row of each: loss, weight of the starts, and for each guess the weight, the probability that it is
        kept, and the probability that it and all before it are. The last column has, in row 0, the loss of the draft's indexer."""

    @property
    def weight(self) -> float:
        """Weight of all starts."""
        return float(self._sums[0, 1])

    def add(
        self,
        loss_I_W: Tensor,
        weight_I_W: Tensor,
        overlap_I_W_K: Tensor,
        kept_I_W_K: Tensor,
        valid_I_W_K: Tensor,
        domains: Sequence[str],
    ) -> None:
        """Add windows: losses, weights of their starts, overlaps of their guesses, and what `opd.losses.draft.estimate_kept` says of these;
        `domains`: the domain of each window."""
        weight_I_W_K = (weight_I_W[..., None] * valid_I_W_K).double()
        kept_I_W_K = kept_I_W_K.double()
        columns_I = torch.cat(
            [
                (loss_I_W.double() * weight_I_W).sum(1)[:, None],
                weight_I_W.double().sum(1)[:, None],
                weight_I_W_K.sum(1),
                (weight_I_W_K * overlap_I_W_K.double()).sum(1),
                (weight_I_W_K * kept_I_W_K.cumprod(-1)).sum(1),
                torch.zeros(len(loss_I_W), 1, dtype=torch.float64, device=loss_I_W.device),
            ],
            1,
        ).cpu()
        self._sums[0] += columns_I.sum(0)
        for columns, domain in zip(columns_I, domains, strict=True):
            if domain in self._domains:
                self._sums[1 + self._domains.index(domain)] += columns

    def add_indexer(self, loss_I_W: Tensor, weight_I_W: Tensor) -> None:
        """Add the indexer's losses in windows, with the weights of their starts."""
        self._sums[0, -1] += (loss_I_W.double() * weight_I_W).sum().cpu()

    def add_ranks(self, device: torch.device) -> None:
        """Add the sums of all ranks."""
        moved = self._sums.to(device)
        distributed.all_reduce(moved)
        self._sums = moved.cpu()

    def summarise(self) -> dict[str, float]:
        """Return loss, tokens per pass of the student, the same by domain, and the share that is kept of each guess that is reached."""
        numbers = {"loss": float(self._sums[0, 0] / self._sums[0, 1])} if self.weight else {}
        if self._sums[0, -1]:
            numbers["indexer_loss"] = float(self._sums[0, -1] / self._sums[0, 1])
        for row, name in zip(self._sums, ("", *(f"/{domain}" for domain in self._domains)), strict=True):
            weight_K, kept_K, reached_K = row[2:-1].view(3, self._steps)
            if weight_K[0] > 0:
                numbers[f"accepted_length{name}"] = 1 + float((reached_K / weight_K.clamp(min=1e-300)).sum())
                if not name:
                    numbers |= {
                        f"acceptance_{step + 1}": float(kept_K[step] / weight_K[step])
                        for step in range(self._steps)
                        if weight_K[step] > 0
                    }
        return numbers
