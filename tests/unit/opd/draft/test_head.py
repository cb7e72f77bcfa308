"""The draft's model: all starts at once give what an engine computes one guess at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opd.draft.head import Context, DraftHead, Windows
from opd.draft.shape import DraftKind, DraftShape

L, D, K = 11, 16, 3


def make_head(kind: DraftKind) -> DraftHead:
    torch.manual_seed(0)
    model = {
        "hidden_size": D,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 13,
    }
    return DraftHead(DraftShape(model=model, kind=kind, layers=(0, 1, 2), vocab=tuple(range(13)))).double()


def guess_one_by_one(head: DraftHead, features_L_F: Tensor, embeds_L_D: Tensor, start: int) -> Tensor:
    """Return [K, D] a start's guesses as an engine makes them: a cache of keys, one position at a time, attention by its formula."""
    layer = head.midlayer
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def run(state: Tensor, embed: Tensor, position: int, keep: bool = True) -> Tensor:
        joined = layer.join_inputs(embed, state)
        where = torch.tensor([[position]])
        query = head._rotate(head._split_heads(layer.self_attn.q_proj(joined)[None, None]), where)[0, :, 0]
        if keep:
            keys.append(head._rotate(head._split_heads(layer.self_attn.k_proj(joined)[None, None]), where)[0, :, 0])
            values.append(layer.self_attn.v_proj(joined).view(2, 4))
        mixed = []
        for i in range(4):
            weights = torch.stack([query[i] @ key[i // 2] / 2 for key in keys]).softmax(0)
            mixed.append(sum(w * value[i // 2] for w, value in zip(weights, values, strict=True)))
        residual = state + layer.self_attn.o_proj(torch.cat(mixed))  # type: ignore[arg-type]
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    for position in range(start + 1):
        output = run(head.fc(features_L_F[position]), embeds_L_D[position + 1], position)
    outputs = [head.norm(output)]
    for step in range(1, K):
        output = run(output, embeds_L_D[start + step + 1], start + step, keep=head.kind == "eagle3")
        outputs.append(head.norm(output))
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", ["eagle3", "shared_kv"])
def test_all_starts_at_once_are_each_start_alone(kind: DraftKind) -> None:
    head = make_head(kind)
    features, embeds = torch.randn(2, L, 3 * D).double(), torch.randn(2, L, D).double()
    context = head.read_context(features, embeds)
    windows = Windows(torch.tensor([0, 1, 1]), torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [1, 2, 3, 4]]))
    guesses = head.guess_tokens(context, windows, K).states_I_W_K_D
    assert guesses.shape == (3, 4, K, D)
    for window, (sequence, starts) in enumerate(zip(windows.sequence_I, windows.start_I_W, strict=True)):
        for place, start in enumerate(starts):
            alone = guess_one_by_one(head, features[sequence], embeds[sequence], int(start))
            torch.testing.assert_close(guesses[window, place], alone)


def test_a_guess_reads_nothing_behind_its_own_tokens() -> None:
    head = make_head("eagle3")
    features, embeds = torch.randn(1, L, 3 * D).double(), torch.randn(1, L, D).double()
    windows = Windows(torch.tensor([0]), torch.tensor([[4]]))

    def guess(context: Context) -> Tensor:
        return head.guess_tokens(context, windows, K).states_I_W_K_D[0, 0]

    before = guess(head.read_context(features, embeds))
    features[:, 5:] += 1.0  # the student's states behind the start
    embeds[:, 8:] += 1.0  # tokens behind the last guess's
    torch.testing.assert_close(guess(head.read_context(features, embeds)), before)
    embeds[:, 7] += 1.0
    after = guess(head.read_context(features, embeds))
    torch.testing.assert_close(after[:2], before[:2])
    assert (after[2] - before[2]).abs().max() > 1e-3
