"""A draft's files, in the format that vLLM loads with `speculative_config: {"method": "eagle3"}`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from opd.draft.head import DraftHead, build_draft
from opd.draft.shape import ARCHITECTURES, DraftShape, DraftWeights


def write_draft(shape: DraftShape, weights: DraftWeights, path: Path) -> None:
    """Write config.json and model.safetensors. `weights`: see `name_weights`."""
    config = {
        **LlamaConfig(**shape.model).to_diff_dict(),
        "architectures": [ARCHITECTURES[shape.kind]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(shape.vocab),
        # vLLM numbers the states before a layer, so that the output of layer i is number i + 1.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in shape.layers]},
        "tie_word_embeddings": False,
    }
    if shape.indexer is not None:
        config |= {
            "index_topk": shape.indexer.topk,
            "index_n_heads": shape.indexer.heads,
            "index_head_dim": shape.indexer.head_dim,
            "index_share_for_mtp_iteration": True,
        }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def name_weights(draft: DraftHead, shape: DraftShape) -> DraftWeights:
    """Return the draft's weights by their names in the file; tensors share memory with the draft's where that can be."""
    weights = {name: tensor.detach().contiguous() for name, tensor in draft.state_dict().items()}
    ids_V = torch.tensor(shape.vocab)
    vocab_size = draft.config.vocab_size
    if len(ids_V) != vocab_size:
        # d2t is what has to be added to a draft's token to get the student's; t2d says which tokens the draft has.
        weights["d2t"] = ids_V - torch.arange(len(ids_V))
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids_V, True)
    return weights


def write_blank_draft(shape: DraftShape, path: Path) -> None:
    """Write the files of a draft that has learned nothing, for an engine that is to get its weights later."""
    write_draft(shape, name_weights(build_draft(shape, seed=0), shape), path)
