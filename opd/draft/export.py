"""A draft's files, in the format that vLLM loads with `speculative_config: {"method": "eagle3"}`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from opd.draft.head import DraftHead


def export_draft(draft: DraftHead, path: Path, layers: Sequence[int], vocab: Sequence[int]) -> None:
    """Write config.json and model.safetensors. `layers`: indices, from 0, of the student's layers that the draft reads."""
    config = {
        **draft.config.to_diff_dict(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(vocab),
        # vLLM numbers the states before a layer, so that the output of layer i is number i + 1.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]},
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in draft.state_dict().items()}
    ids_V = torch.tensor(vocab)
    if len(vocab) != draft.config.vocab_size:
        # d2t is what has to be added to a draft's token to get the student's; t2d says which tokens the draft has.
        tensors["d2t"] = ids_V - torch.arange(len(vocab))
        tensors["t2d"] = torch.zeros(draft.config.vocab_size, dtype=torch.bool).index_fill(0, ids_V, True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
