"""A companion as small as can be: it learns the student's distribution from the outputs of two layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from opd.files import blake3_file
from opd.records.types import WrittenFile
from opd.train.batch import MicroBatch


@dataclass(frozen=True)
class GuesserSpec:
    """Settings of a `Guesser`."""

    name: str = "guesser"
    vocab_size: int = 76

    def start(self, options: Any, rank: int, student: Any, device: torch.device) -> Guesser:
        return Guesser(self, rank, options.world_size, student.lm.config.hidden_size, device)


class Guesser:
    """One matrix, the same on every rank: L = -sum_n w_n sum_v p_v log g_v, p the student's distribution at each token."""

    layers = (0, 1)

    def __init__(self, spec: GuesserSpec, rank: int, ranks: int, width: int, device: torch.device) -> None:
        self._name, self._rank, self._ranks = spec.name, rank, ranks
        self._weight = torch.zeros(spec.vocab_size, 2 * width, device=device, requires_grad=True)
        self._optimizer = torch.optim.AdamW([self._weight], lr=0.01)
        self._p: list[Tensor] = []
        self._loss = torch.zeros(())
        self._files: tuple[WrittenFile, ...] = ()

    def begin_batch(self, batch: MicroBatch) -> None:
        self._p = []

    def read_logits(self, rows: slice, logits_C_V: Tensor) -> None:
        assert rows.stop - rows.start == len(logits_C_V) and not logits_C_V.requires_grad
        self._p.append(logits_C_V.float().softmax(-1))

    def add_gradients(self, batch: MicroBatch, hidden: Mapping[int, Tensor], weight_N: Tensor) -> None:
        p_N_V = torch.cat(self._p) if self._p else torch.zeros(0, len(self._weight))
        self._p = []
        states = [hidden[layer] for layer in self.layers]
        assert not any(state.requires_grad for state in states)
        states_N_D = torch.cat([state[batch.predict_N] for state in states], -1)
        log_N_V = (states_N_D @ self._weight.T).log_softmax(-1)
        loss = -((p_N_V * log_N_V).sum(-1) * weight_N).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss = self._loss + loss.detach()

    def take_step(self, step: int, share: float) -> dict[str, float]:
        assert self._weight.grad is not None
        if self._ranks > 1:
            distributed.all_reduce(self._weight.grad)
            distributed.all_reduce(self._loss)
        self._weight.grad /= share
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss, self._loss = float(self._loss) / share, torch.zeros(())
        return {"loss": loss}

    def begin_save(self, path: Path) -> None:
        if self._rank == 0:
            file = path / f"{self._name}.safetensors"
            state = {f"moment/{k}": v for k, v in self._optimizer.state[self._weight].items()}
            save_file({"weight": self._weight.detach()} | state, file)
            size, digest = file.stat().st_size, blake3_file(file)
            self._files = (WrittenFile(name=file.name, blake3=digest, size=size, seconds=0.0),)

    def saved(self, wait_s: float) -> tuple[WrittenFile, ...]:
        return self._files

    def load(self, path: Path) -> None:
        state = load_file(path / f"{self._name}.safetensors")
        self._weight.data.copy_(state.pop("weight"))
        moments = {name.partition("/")[2]: tensor for name, tensor in state.items()}
        self._optimizer.state[self._weight] = moments  # type: ignore[assignment]

    def serving_weights(self) -> dict[str, Tensor]:
        return {"weight": self._weight.detach().clone()}

    def export(self, path: Path) -> None:
        if self._rank == 0:
            save_file({"weight": self._weight.detach()}, path / "model.safetensors")
