"""Tokenizers of several kinds, trained in a moment on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.conftest import build_tokenizer

SENTENCES = ["the quick brown fox jumps over the lazy dog", "12345 + 678 = 13023", "naïve café", "reverse hxkq"]


def train_byte_level(size: int, sentences: Sequence[str] = SENTENCES, *, prefix: bool = False) -> Any:
    """Return a tokenizer like GPT-2's with <s> and </s>. `prefix`: it puts a blank in front of a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def train_sentencepiece(
    size: int, sentences: Sequence[str] = SENTENCES, *, fallback: bool = True, more_specials: Sequence[str] = ()
) -> Any:
    """Return a tokenizer like Llama 2's, which puts a blank in front of a text. `fallback`: it has a token for each byte."""
    backend = Tokenizer(models.BPE(byte_fallback=fallback, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    specials = ["<unk>", "<s>", "<end>", *more_specials]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*specials, *byte_tokens], show_progress=False)
    backend.train_from_iterator(sentences, trainer)
    settings = json.loads(backend.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] in specials]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)), bos_token="<s>", eos_token="<end>", unk_token="<unk>"
    )


def permute_model(model_dir: Path, out: Path) -> Path:
    """Save a model of single characters with the ids of the characters in reverse; returns `out`."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer, other = build_tokenizer(), build_tokenizer(permute_vocab=True)
    order = [tokenizer.convert_tokens_to_ids(other.convert_ids_to_tokens(i)) for i in range(len(other))]
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        part.weight = torch.nn.Parameter(part.weight.detach()[order])
    model.save_pretrained(out)
    other.save_pretrained(out)
    return out
