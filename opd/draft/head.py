"""The draft's model: one decoder layer that reads the student's hidden states, in the format of EAGLE-3 (arXiv 2503.01840), which vLLM loads.

    states of three depths ─▶ fc ─┐
    embedding of the next token ──┴▶ one layer ─▶ norm ─▶ lm_head: the token after the next
                                        └▶ in the place of the states: the guess after that, and so on

The first guess after position t reads the student's states at t and the embedding of token t + 1. Guess k reads the layer's output of
guess k - 1 and the embedding of token t + k. In training the tokens are those that were written, so all starts are guessed at once.

The two kinds differ in what later guesses attend to. `eagle3`: the keys of what the student wrote, and the draft's own keys of the
guesses in between. `shared_kv`: what the student wrote alone, so the keys and values of the first guess serve all. If the student's layers
have indexers, so has this layer, and the positions that the first guess chooses serve all, too (`opd.draft.indexer`).

Shapes: S sequences, L positions of the longest, I windows, W starts of a window, K guesses, D the student's width, F = D times the number
of depths, H heads, G heads of keys, E width of a head, V the draft's tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from opd.draft.indexer import Choice, build_indexer, choose_positions
from opd.draft.shape import DraftShape, IndexerShape


@dataclass(frozen=True)
class Context:
    """Tensors of the student's sequences that the draft reads."""

    states_S_L_D: Tensor
    """States of all depths after `fc`."""
    embeds_S_L_D: Tensor
    """Embedding of the token at each position."""
    key_S_G_L_E: Tensor
    """Keys of the first guess after each position, turned by the position."""
    value_S_G_L_E: Tensor
    joined_S_L_J: Tensor
    """Input of attention for the first guess after each position."""


@dataclass(frozen=True)
class Guesses:
    """The draft's guesses in windows."""

    states_I_W_K_D: Tensor
    """States before `lm_head` of the guesses after each start."""
    indexer_loss_I_W: Tensor | None
    """Loss of the layer's indexer, nats; None without one."""


@dataclass(frozen=True)
class Windows:
    """Starts of guesses: W consecutive positions of a sequence each."""

    sequence_I: Tensor
    """Index of the window's sequence."""
    start_I_W: Tensor
    """Position of each start. Beyond a sequence's end: any position with K more behind it; its guesses are not judged."""


class DraftLayer(nn.Module):
    """A Llama decoder layer whose attention reads an embedding beside the hidden states."""

    def __init__(self, config: LlamaConfig, indexer: IndexerShape | None) -> None:
        super().__init__()
        width, head = config.hidden_size, config.head_dim
        self.self_attn = nn.Module()
        for name, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
            ("v_proj", config.num_key_value_heads),
        ):
            self.self_attn.add_module(name, nn.Linear(2 * width, heads * head, bias=False))
        self.self_attn.o_proj = nn.Linear(config.num_attention_heads * head, width, bias=False)
        self.self_attn.add_module("indexer", build_indexer(indexer, 2 * width, head) if indexer else None)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)

    def join_inputs(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Return [..., 2D] what attention reads."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(states)], -1)


class DraftHead(nn.Module):
    """A draft. Its parameters have the names of vLLM's `LlamaForCausalLMEagle3`; the embedding is the student's own."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.config, self.kind = LlamaConfig(**shape.model), shape.kind
        config = self.config
        self.fc = nn.Linear(len(shape.layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config, shape.indexer)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(shape.vocab), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def read_context(self, features_S_L_F: Tensor, embeds_S_L_D: Tensor) -> Context:
        """Return what later guesses need of the sequences. The token after the last position is not there: its key is that of a zero
        embedding, which no start reads."""
        states_S_L_D = self.fc(features_S_L_F)
        next_embeds_S_L_D = torch.cat([embeds_S_L_D[:, 1:], torch.zeros_like(embeds_S_L_D[:, :1])], 1)
        joined = self.midlayer.join_inputs(next_embeds_S_L_D, states_S_L_D)
        attention: Any = self.midlayer.self_attn
        position_S_L = torch.arange(joined.shape[1], device=joined.device).expand(joined.shape[:2])
        key = self._split_heads(attention.k_proj(joined))
        return Context(
            states_S_L_D,
            embeds_S_L_D,
            self._rotate(key, position_S_L),
            self._split_heads(attention.v_proj(joined)),
            joined,
        )

    def guess_tokens(self, context: Context, windows: Windows, steps: int) -> Guesses:
        """Return the `steps` guesses after each start."""
        layer: Any = self.midlayer
        sequence_I_1, start_I_W = windows.sequence_I[:, None], windows.start_I_W
        key_I_G_L_E = context.key_S_G_L_E[windows.sequence_I]
        value_I_G_L_E = context.value_S_G_L_E[windows.sequence_I]
        # [I, 1, W, L]: a start attends to positions up to its own.
        seen = (torch.arange(key_I_G_L_E.shape[2], device=start_I_W.device) <= start_I_W[..., None])[:, None]
        choice = self._choose_positions(context, windows, seen[:, 0])
        read = seen if choice is None else choice.chosen_I_W_L[:, None]
        attention_I_W_L = torch.zeros_like(seen[:, 0], dtype=key_I_G_L_E.dtype)
        hidden_I_W_D = context.states_S_L_D[sequence_I_1, start_I_W]
        own: list[tuple[Tensor, Tensor]] = []
        guesses = []
        for step in range(steps):
            joined = layer.join_inputs(context.embeds_S_L_D[sequence_I_1, start_I_W + step + 1], hidden_I_W_D)
            position_I_W = start_I_W + step
            query_I_H_W_E = self._rotate(self._split_heads(layer.self_attn.q_proj(joined)), position_I_W)
            if step and self.kind == "eagle3":
                key = self._rotate(self._split_heads(layer.self_attn.k_proj(joined)), position_I_W)
                own.append((key, self._split_heads(layer.self_attn.v_proj(joined))))
            mixed = self._attend(query_I_H_W_E, key_I_G_L_E, value_I_G_L_E, read, own)
            if choice is not None:
                attention_I_W_L += self._average_attention(query_I_H_W_E, key_I_G_L_E, seen) / steps
            residual = hidden_I_W_D + layer.self_attn.o_proj(mixed)
            hidden_I_W_D = residual + layer.mlp(layer.post_attention_layernorm(residual))
            guesses.append(self.norm(hidden_I_W_D))
        indexer_loss_I_W = None if choice is None else choice.compute_loss(attention_I_W_L)
        return Guesses(torch.stack(guesses, 2), indexer_loss_I_W)

    def _choose_positions(self, context: Context, windows: Windows, seen_I_W_L: Tensor) -> Choice | None:
        """Return what the first guess after each start chooses to read; None if the layer has no indexer."""
        indexer: Any = self.midlayer.self_attn.indexer
        if indexer is None:
            return None
        joined = context.joined_S_L_J
        position_S_L = torch.arange(joined.shape[1], device=joined.device).expand(joined.shape[:2])
        return choose_positions(indexer, joined, self.rotary(joined, position_S_L), windows, seen_I_W_L)

    @torch.no_grad()
    def _average_attention(self, query_I_H_W_E: Tensor, key_I_G_L_E: Tensor, seen: Tensor) -> Tensor:
        """Return [I, W, L] the mean of the heads' attention to all positions."""
        key_I_H_L_E = repeat_kv(key_I_G_L_E, query_I_H_W_E.shape[1] // key_I_G_L_E.shape[1])
        scores = (query_I_H_W_E @ key_I_H_L_E.mT).masked_fill(~seen, -math.inf) / math.sqrt(query_I_H_W_E.shape[-1])
        return scores.softmax(-1).mean(1)

    def _attend(
        self, query_I_H_W_E: Tensor, key: Tensor, value: Tensor, seen: Tensor, own: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return [I, W, H*E] the values, mixed over the student's positions and, for each start, its own guesses in between."""
        groups = query_I_H_W_E.shape[1] // key.shape[1]
        scores = query_I_H_W_E @ repeat_kv(key, groups).mT
        scores = scores.masked_fill(~seen, -math.inf)
        own_scores = [(query_I_H_W_E * repeat_kv(k, groups)).sum(-1, keepdim=True) for k, _ in own]
        weights = (torch.cat([scores, *own_scores], -1) / math.sqrt(query_I_H_W_E.shape[-1])).softmax(-1)
        length = key.shape[2]
        mixed = weights[..., :length] @ repeat_kv(value, groups)
        for index, (_, v) in enumerate(own):
            mixed = mixed + weights[..., length + index, None] * repeat_kv(v, groups)
        return mixed.transpose(1, 2).flatten(2)

    def _split_heads(self, x_S_L_HE: Tensor) -> Tensor:
        """Return [S, H, L, E]."""
        return x_S_L_HE.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _rotate(self, x_S_H_L_E: Tensor, position_S_L: Tensor) -> Tensor:
        """Turn keys or queries by their positions."""
        cos, sin = self.rotary(x_S_H_L_E, position_S_L)
        turned, _ = apply_rotary_pos_emb(x_S_H_L_E, x_S_H_L_E[:, :1], cos, sin)
        return turned


def build_draft(shape: DraftShape, seed: int) -> DraftHead:
    """Return a new draft, the same on every rank. Its input begins as the states of the last depth."""
    with torch.random.fork_rng():  # the student's own numbers must not change
        torch.manual_seed(seed)
        draft = DraftHead(shape)
        for param in draft.parameters():
            if param.dim() > 1:
                torch.nn.init.normal_(param, std=0.02)
    width = draft.config.hidden_size
    with torch.no_grad():
        draft.fc.weight.zero_()
        draft.fc.weight[:, -width:] = torch.eye(width)
    return draft
