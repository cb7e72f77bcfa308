"""A draft's layer with an indexer: the first guess after a start chooses for all, and the indexer learns what guesses attend to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opd.config.draft import DraftConfig
from opd.draft.alone import FrozenModel, measure_draft, train_draft
from opd.draft.companion import DraftSpec
from opd.draft.export import write_draft
from opd.draft.head import Context, DraftHead, Windows, build_draft
from opd.draft.shape import DraftShape, IndexerShape
from opd.models.weights import load_causal_lm
from pipelines.draft import draft_shape
from pipelines.sizing.draft import count_draft_parameters
from tests.rows import make_rollout
from tests.sparse_models import TOPK, build_sparse_model_dir
from tests.unit.opd.draft.test_head import D, K, L, make_head

CHOSEN = 3
WINDOWS = Windows(torch.tensor([0, 1]), torch.tensor([[4, 5, 6, 7], [1, 2, 6, 7]]))


def make_sparse_head(topk: int = CHOSEN) -> DraftHead:
    """The head of `make_head`, with an indexer."""
    dense = make_head("shared_kv")
    indexer = IndexerShape(topk=topk, heads=8, head_dim=8)
    shape = DraftShape(
        model=dense.config.to_dict(), kind="shared_kv", layers=(0, 1, 2), vocab=tuple(range(13)), indexer=indexer
    )
    head = build_draft(shape, seed=0).double()
    head.load_state_dict(dense.state_dict(), strict=False)
    for param in head.midlayer.self_attn.indexer.parameters():
        param.data.normal_(generator=torch.Generator().manual_seed(param.numel()))
    return head


def read_context(head: DraftHead) -> Context:
    generator = torch.Generator().manual_seed(1)
    features, embeds = (torch.randn(2, L, width, generator=generator).double() for width in (3 * D, D))
    return head.read_context(features, embeds)


def test_later_guesses_read_what_the_first_one_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    head, masks = make_sparse_head(), []
    attend = head._attend

    def note(query: Tensor, key: Tensor, value: Tensor, read: Tensor, own: Any) -> Tensor:
        masks.append(read)
        return attend(query, key, value, read, own)

    monkeypatch.setattr(head, "_attend", note)
    context = read_context(head)
    head.guess_tokens(context, WINDOWS, K)
    assert len(masks) == K and all(mask.equal(masks[0]) for mask in masks)
    choice = head._choose_positions(context, WINDOWS, torch.ones(2, 4, L, dtype=torch.bool))
    assert choice is not None
    for window, starts in enumerate(WINDOWS.start_I_W.tolist()):
        for place, start in enumerate(starts):
            largest = choice.scores_I_W_L[window, place, : start + 1].topk(min(CHOSEN, start + 1)).indices
            assert masks[0][window, 0, place].nonzero()[:, 0].tolist() == sorted(largest.tolist())


def test_scores_are_those_of_the_published_indexer() -> None:
    """Alone over a sequence, at every position, in transformers."""
    head = make_sparse_head()
    context, indexer = read_context(head), head.midlayer.self_attn.indexer
    starts = torch.arange(L - K)[None]
    windows = Windows(torch.tensor([1]), starts)
    causal = torch.ones(L, L, dtype=torch.bool).tril()
    choice = head._choose_positions(context, windows, causal[: L - K][None])
    assert choice is not None
    joined = context.joined_S_L_J[1:]
    indices = indexer(joined, joined, head.rotary(joined, torch.arange(L)[None]), causal[None], None)
    for start in range(CHOSEN, L - K):
        assert set(choice.chosen_I_W_L[0, start].nonzero()[:, 0].tolist()) == set(indices[0, start].tolist())


def test_a_choice_of_everything_is_the_dense_layer() -> None:
    dense, sparse, few = make_head("shared_kv"), make_sparse_head(topk=L), make_sparse_head()
    expected, found, other = (head.guess_tokens(read_context(head), WINDOWS, K) for head in (dense, sparse, few))
    assert expected.indexer_loss_I_W is None
    assert found.states_I_W_K_D.equal(expected.states_I_W_K_D)
    assert (other.states_I_W_K_D - expected.states_I_W_K_D).abs().max() > 1e-3, "fewer are read"


def test_the_indexer_alone_gets_gradients_of_its_loss_and_they_are_right() -> None:
    head = make_sparse_head()

    def compute_loss() -> Tensor:
        loss_I_W = head.guess_tokens(read_context(head), WINDOWS, K).indexer_loss_I_W
        assert loss_I_W is not None
        return loss_I_W.sum()

    compute_loss().backward()
    for name, param in head.named_parameters():
        if ".indexer." not in name:
            assert param.grad is None, name
            continue
        assert param.grad is not None
        index = int(param.grad.abs().argmax())
        losses = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                param.view(-1)[index] += step
                losses.append(float(compute_loss()))
                param.view(-1)[index] -= step
        assert float(param.grad.view(-1)[index]) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4), name


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_a_sparse_students_draft_learns_and_says_so_in_its_files(tmp_path: Path, family: str) -> None:
    path = build_sparse_model_dir(tmp_path / "student", layers=3, family=family)
    lm = load_causal_lm(path, torch.float32)
    shape = draft_shape(path, DraftConfig(kind="shared_kv"), lm.config.vocab_size)
    assert shape.indexer == IndexerShape(topk=TOPK, heads=16, head_dim=16)
    spec = DraftSpec(shape=shape, steps=3, loss="forward_kl", decay=0.8, lr=1e-2, tokens=64, width=4, domains=("d",))
    model = FrozenModel(lm, spec.read_layers)
    generator = torch.Generator().manual_seed(0)
    rollouts = [
        make_rollout(
            sample_id=str(number), step=1, domain="d", prompt_ids=(5, 6),
            response_ids=torch.randint(4, 70, (30,), generator=generator).tolist(),
        )
        for number in range(4)
    ]  # fmt: skip
    batches = model.read_batches(rollouts, 4)
    companion = train_draft(model, spec, batches, 60)
    weights = companion.serving_weights()
    trained = measure_draft(model, companion, batches)["indexer_loss"]
    indexer: Any = companion.draft.midlayer.self_attn.indexer
    indexer.load_state_dict(build_draft(shape, spec.seed).midlayer.self_attn.indexer.state_dict())
    assert 0 < trained < 0.7 * measure_draft(model, companion, batches)["indexer_loss"], "as it was at the start"
    assert sum(tensor.numel() for tensor in weights.values()) == count_draft_parameters(shape)
    write_draft(shape, weights, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["index_share_for_mtp_iteration"] is True and config["index_topk"] == TOPK
