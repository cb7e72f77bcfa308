"""A draft that learns beside the student, from the states and logits of the student's own forward pass.

The student's probabilities of the chosen tokens are copied before the loss overwrites its logits; states are the layers' outputs. The
draft's weights and its optimiser are whole on every rank, and ranks add up their gradients.

Shapes: as in `opd.draft.head` and `opd.draft.windows`; M trained tokens whose probabilities are copied, V the draft's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from opd.config.draft import DraftLoss
from opd.draft.export import name_weights, write_draft
from opd.draft.head import DraftHead, Windows, build_draft
from opd.draft.shape import GROUP_VALUES, DraftShape, DraftWeights
from opd.draft.sums import DraftSums
from opd.draft.windows import DraftBatch, choose_windows
from opd.files import blake3_file
from opd.losses.draft import compute_draft_loss, compute_overlaps, estimate_kept
from opd.machine.devices import to_device
from opd.records.step import DRAFT
from opd.records.types import WrittenFile
from opd.train.batch import MicroBatch
from opd.train.companions import EMBEDDING

if TYPE_CHECKING:
    from opd.train.zero import ModelOptions

STRIDE = 7919
"""Added to the offset of the windows with every micro-batch: a prime, so that all windows have their turn."""


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """Settings of a draft that is trained beside the student."""

    shape: DraftShape
    steps: int
    """Guesses of a start, K."""
    loss: DraftLoss
    decay: float
    """Weight of a guess beside that of the guess before."""
    lr: float
    warmup_steps: int = 0
    """Steps by `log_overlap` before `loss`."""
    tokens: int
    """Starts in a micro-batch at most."""
    temperature: float = 1.0
    """Temperature of the samples for which the draft guesses."""
    width: int = 16
    """Starts of a window, W."""
    max_grad_norm: float = 1.0
    seed: int = 0
    domains: tuple[str, ...] = ()
    """Domains whose numbers are told apart."""
    name: str = DRAFT

    @property
    def read_layers(self) -> tuple[int, ...]:
        """Layers of the student that the draft reads, see `opd.train.companions.Companion.layers`."""
        return (*self.shape.layers, EMBEDDING)

    def start(self, options: ModelOptions, rank: int, student: Any, device: torch.device) -> DraftCompanion:
        """Start the draft on a rank. Its last norm and output head begin as the student's, and its input as the states of the last
        depth."""
        from deepspeed import zero

        head = build_draft(self.shape, self.seed)
        weight_V_D: Tensor = student.lm.get_output_embeddings().weight
        norm_D: Tensor = student.lm.base_model.norm.weight
        # All ranks take part, because each holds a share of the student's weights.
        with zero.GatheredParameters([weight_V_D, norm_D]), torch.no_grad():
            head.lm_head.weight.copy_(weight_V_D.detach()[torch.tensor(self.shape.vocab)].float())
            # The rows of the head belong to states of this scale: with a norm of ones log overlap fails at the default rate
            # (docs/results/drafts.md).
            head.norm.weight.copy_(norm_D.detach().float())
        return DraftCompanion(self, head.to(device), rank, options.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessedWindows:
    """Windows of a micro-batch with the draft's guesses there."""

    row_I_W_K: Tensor
    """Index of the trained token that each guess is about, as in `DraftBatch`."""
    valid_I_W_K: Tensor
    """True where there is a trained token to judge the guess by."""
    column_I_W_K: Tensor
    """The draft's column of that token, -1 for one that the draft lacks."""
    p_I_W_K_V: Tensor
    """The student's probabilities of the draft's tokens."""
    logits_I_W_K_V: Tensor
    """The draft's logits."""
    indexer_loss_I_W: Tensor | None
    """Loss of the draft's indexer at each start, nats; None if it has none."""
    domains: tuple[str, ...]
    """Domain of each window."""


class DraftCompanion:
    """Implements `opd.train.companions.Companion`."""

    def __init__(self, spec: DraftSpec, draft: DraftHead, rank: int, ranks: int) -> None:
        self.layers = spec.read_layers
        self._spec, self.draft, self._rank, self._ranks = spec, draft, rank, ranks
        self._device = draft.fc.weight.device
        self._vocab_V = torch.tensor(spec.shape.vocab, device=self._device)
        self._optimizer = torch.optim.AdamW(draft.parameters(), lr=spec.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._steps_taken = 0
        self._micro_batches = 0
        self._chosen: DraftBatch | None = None
        self._place_N = torch.zeros(0, dtype=torch.long)
        """For each trained token its index among the M copied ones; -1 for one that is not copied."""
        self._p: list[Tensor] = []
        self._sums = DraftSums(spec.domains, spec.steps)
        self._files: tuple[WrittenFile, ...] = ()

    def begin_batch(self, batch: MicroBatch) -> None:
        """Choose the windows of a micro-batch."""
        spec = self._spec
        offset = (self._steps_taken * 131 + self._micro_batches) * STRIDE
        self._micro_batches += 1
        self._chosen = choose_windows(batch, spec.steps, spec.width, spec.tokens, offset)
        self._p = []
        self._place_N = torch.full((len(batch.token_N),), -1)
        if self._chosen is not None:
            rows_M = self._chosen.row_I_W_K[self._chosen.valid_I_W_K].unique()
            self._place_N[rows_M] = torch.arange(len(rows_M))

    def needs_logits(self, rows: slice) -> bool:
        """Return True if a window of the micro-batch needs the logits of one of these trained tokens."""
        return bool((self._place_N[rows] >= 0).any())

    def read_logits(self, rows: slice, logits_C_V: Tensor) -> None:
        """Copy the student's probabilities of the draft's tokens, where a window needs them."""
        needed_C = (self._place_N[rows] >= 0).to(logits_C_V.device)
        if needed_C.any():
            logits = logits_C_V[needed_C].float() / self._spec.temperature
            whole = len(self._spec.shape.vocab) == logits.shape[1]
            # Tokens that the draft lacks still count in the sum over all tokens.
            probs = logits.softmax(-1)
            self._p.append(probs if whole else probs[:, self._vocab_V])

    def add_gradients(self, batch: MicroBatch, hidden: Mapping[int, Tensor], weight_N: Tensor) -> None:
        """Run the draft on the windows, a few at a time."""
        for loss in self._compute_losses(batch, hidden, weight_N):
            loss.backward()

    def measure(self, batch: MicroBatch, hidden: Mapping[int, Tensor], weight_N: Tensor) -> None:
        """Add the windows of the micro-batch to the numbers, and learn nothing. Arguments: as in `add_gradients`."""
        with torch.no_grad():
            for _ in self._compute_losses(batch, hidden, weight_N):
                pass

    def take_numbers(self) -> dict[str, float]:
        """Return the numbers since the last step, and begin anew."""
        sums, self._sums = self._sums, DraftSums(self._spec.domains, self._spec.steps)
        return sums.summarise()

    def _compute_losses(self, batch: MicroBatch, hidden: Mapping[int, Tensor], weight_N: Tensor) -> Iterator[Tensor]:
        """Yield the summed loss of a few windows at a time, after adding their numbers to the step's sums."""
        spec = self._spec
        kind: DraftLoss = "log_overlap" if self._steps_taken < spec.warmup_steps else spec.loss
        for guessed in self.guess_batch(batch, hidden):
            valid_I_W_K, column_I_W_K = guessed.valid_I_W_K, guessed.column_I_W_K
            # A start counts as much as the token of its first guess.
            weight_I_W = weight_N[guessed.row_I_W_K[..., 0]] * valid_I_W_K[..., 0]
            p_C_K_V, logits_C_K_V = guessed.p_I_W_K_V.flatten(0, 1), guessed.logits_I_W_K_V.flatten(0, 1)
            column_C_K = column_I_W_K.flatten(0, 1)
            loss_I_W = compute_draft_loss(
                kind, p_C_K_V, logits_C_K_V, column_C_K, valid_I_W_K.flatten(0, 1), spec.decay
            ).view_as(weight_I_W)
            with torch.no_grad():
                overlap_I_W_K = compute_overlaps(p_C_K_V, logits_C_K_V).view_as(column_I_W_K)
                kept_I_W_K = estimate_kept(p_C_K_V, logits_C_K_V, column_C_K).view_as(column_I_W_K)
            self._sums.add(loss_I_W.detach(), weight_I_W, overlap_I_W_K, kept_I_W_K, valid_I_W_K, guessed.domains)
            if guessed.indexer_loss_I_W is not None:
                self._sums.add_indexer(guessed.indexer_loss_I_W.detach(), weight_I_W)
                loss_I_W = loss_I_W + guessed.indexer_loss_I_W
            yield (loss_I_W * weight_I_W).sum()

    def guess_batch(self, batch: MicroBatch, hidden: Mapping[int, Tensor]) -> Iterator[GuessedWindows]:
        """Yield the guesses in the windows that `begin_batch` chose, a few windows at a time."""
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            return
        p_M_V, self._p = torch.cat(self._p), []
        token_N = self._find_columns(batch.token_N.to(self._device))
        place_N = self._place_N.to(self._device)
        for group in self._split_windows(chosen):
            windows, row_I_W_K, valid_I_W_K, column_S_L = to_device(
                (group.windows, group.row_I_W_K, group.valid_I_W_K, group.column_S_L), self._device
            )
            features = torch.cat([hidden[layer][column_S_L].float() for layer in self._spec.shape.layers], -1)
            context = self.draft.read_context(features, hidden[EMBEDDING][column_S_L].float())
            guesses = self.draft.guess_tokens(context, windows, self._spec.steps)
            yield GuessedWindows(
                row_I_W_K=row_I_W_K,
                valid_I_W_K=valid_I_W_K,
                column_I_W_K=token_N[row_I_W_K],
                p_I_W_K_V=p_M_V[place_N[row_I_W_K]],
                logits_I_W_K_V=self.draft.lm_head(guesses.states_I_W_K_D) / self._spec.temperature,
                indexer_loss_I_W=guesses.indexer_loss_I_W,
                domains=group.domains,
            )

    def _find_columns(self, token_N: Tensor) -> Tensor:
        """Return [N] the draft's column of each token, -1 for a token that it lacks."""
        column_N = torch.searchsorted(self._vocab_V, token_N).clamp(max=len(self._vocab_V) - 1)
        return column_N.where(self._vocab_V[column_N] == token_N, -1)

    def _split_windows(self, chosen: DraftBatch) -> Iterator[DraftBatch]:
        """Yield the windows in groups of bounded size, each with its own sequences alone."""
        spec, (_, length) = self._spec, chosen.column_S_L.shape
        size = max(
            1,
            GROUP_VALUES
            // (spec.width * max(spec.steps * len(spec.shape.vocab), self.draft.config.num_attention_heads * length)),
        )
        for first in range(0, len(chosen.domains), size):
            part = slice(first, first + size)
            sequences, index_I = chosen.windows.sequence_I[part].unique(return_inverse=True)
            yield replace(
                chosen,
                column_S_L=chosen.column_S_L[sequences],
                windows=Windows(index_I, chosen.windows.start_I_W[part]),
                row_I_W_K=chosen.row_I_W_K[part],
                valid_I_W_K=chosen.valid_I_W_K[part],
                domains=chosen.domains[part],
            )

    def take_step(self, step: int, share: float) -> dict[str, float]:
        """Step the optimiser with the mean over all ranks' starts. `share` is not needed: only scored tokens were seen."""
        params = list(self.draft.parameters())
        sums, self._sums = self._sums, DraftSums(self._spec.domains, self._spec.steps)
        if self._ranks > 1:
            sums.add_ranks(self._device)
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if self._ranks > 1:
                distributed.all_reduce(param.grad)
            param.grad /= max(sums.weight, 1e-30)
        norm = torch.nn.utils.clip_grad_norm_(params, self._spec.max_grad_norm)
        if torch.isfinite(norm):  # numbers that are none would make an engine's samples none of the student's
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps_taken, self._micro_batches = step, 0
        return {"grad_norm": float(norm), **sums.summarise()}

    def begin_save(self, path: Path) -> None:
        if self._rank == 0:
            file = path / f"{self._spec.name}.safetensors"
            state = {f"weight/{name}": tensor for name, tensor in self.draft.state_dict().items()}
            for name, param in self.draft.named_parameters():
                for key, value in self._optimizer.state[param].items():
                    state[f"{key}/{name}"] = value
            save_file(
                {key: value.contiguous().cpu() for key, value in state.items()}, file, {"steps": str(self._steps_taken)}
            )
            size, digest = file.stat().st_size, blake3_file(file)
            self._files = (WrittenFile(name=file.name, blake3=digest, size=size, seconds=0.0),)

    def saved(self, wait_s: float) -> tuple[WrittenFile, ...]:
        return self._files

    def load(self, path: Path) -> None:
        from safetensors import safe_open

        file = path / f"{self._spec.name}.safetensors"
        with safe_open(file, "pt") as opened:
            self._steps_taken = int(opened.metadata()["steps"])
        state = load_file(file, device=str(self._device))
        self.draft.load_state_dict({k[7:]: v for k, v in state.items() if k.startswith("weight/")})
        for name, param in self.draft.named_parameters():
            self._optimizer.state[param] = {
                key: state[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in state
            }

    def export(self, path: Path) -> None:
        if self._rank == 0:
            write_draft(self._spec.shape, name_weights(self.draft, self._spec.shape), path)

    def serving_weights(self) -> DraftWeights:
        """Return a copy of the weights in the names of the draft's file."""
        return {name: tensor.cpu().clone() for name, tensor in name_weights(self.draft, self._spec.shape).items()}
