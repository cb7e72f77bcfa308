"""Model directories made of bytes, without torch: enough for everything that looks at headers and JSON."""

from __future__ import annotations

import json
import struct
from pathlib import Path

TOKENS = ("<eos>", *"abcdefgh")


def plain_model_dir(path: Path, tokens: tuple[str, ...] = TOKENS) -> Path:
    """Write a directory that `inspect_model` takes: one embedding of two numbers for each token, which is the head as well."""
    path.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    }
    (path / "config.json").write_text(json.dumps(config))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    size = 8 * len(tokens)
    tensor = {"dtype": "F32", "shape": [len(tokens), 2], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    return path
