"""Prove a converted model: it has to score a few texts as the GGUF file does.

llama.cpp reads the GGUF file itself. If its Python package is installed, both models have to cut the texts into the same tokens
and find them about equally likely. Without it, the model has to find these ordinary texts much more likely than random ones.
A lost begin token, a wrong order of weights or a wrong type fails both tests by far.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from opd.errors import ModelError

TEXTS = (
    "The capital of France is Paris, and the capital of Germany is Berlin.",
    "Once upon a time there was a little girl who lived in a small house near the forest with her mother.",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n",
)
LARGEST_GAP = 0.2
"""Largest difference, in mean nats per token of a text. llama.cpp also rounds the factors of its quantised weights: on Gemma 3
270M as Q4_K this makes 0.02. A lost begin token makes 5 there."""
PLAUSIBLE = 0.5
"""Most nats per token without llama.cpp, as a share of ln(vocabulary), the nats of a guess among all tokens."""


def prove_conversion(model_dir: Path, file: Path) -> str:
    """Score the texts with the converted model, and with llama.cpp if it is installed. Returns a sentence about the result.

    Raises: ModelError if tokens or likelihoods differ; without llama.cpp, if the texts are not likely.
    """
    ids, nats, vocab_size = _score_texts(model_dir)
    summary = f"{np.mean(nats):.2f} nats a token on {len(TEXTS)} plain texts"
    if find_spec("llama_cpp") is not None:
        llama_scores = _score_file(file)
        if llama_scores is not None:
            _compare_scores(file, ids, nats, *llama_scores)
            return f"proven: {summary}, {np.mean(llama_scores[1]):.2f} by llama.cpp with the same tokens"
        summary += "; llama.cpp's package cannot read this file"
    limit = PLAUSIBLE * math.log(vocab_size)
    if not np.mean(nats) <= limit:  # NaN is refused too
        raise ModelError.at(
            file,
            found=f"a converted model with {summary}",
            wanted=f"at most {limit:.2f}, half of what a guess among all tokens has: the conversion is wrong, or the model has not learned such texts",
            fix="if you trust the model, `pip install llama-cpp-python` and convert again: its scores of the file are then compared instead",
        )
    return f"plausible: {summary}; with `pip install llama-cpp-python` they would be compared with llama.cpp's"


def _compare_scores(
    file: Path, ids: list[list[int]], model_nats: list[float], llama_ids: list[list[int]], llama_nats: list[float]
) -> None:
    for text, text_ids, llama_text_ids, nats, llama_mean in zip(
        TEXTS, ids, llama_ids, model_nats, llama_nats, strict=True
    ):
        if text_ids != llama_text_ids:
            actual, expected = (
                f"{text[:30]!r} as the tokens {text_ids[:12]}",
                f"those of llama.cpp: {llama_text_ids[:12]}",
            )
        elif not abs(nats - llama_mean) <= LARGEST_GAP:  # NaN is refused too
            actual, expected = f"{nats:.2f} nats a token on {text[:30]!r}", f"those of llama.cpp: {llama_mean:.2f}"
        else:
            continue
        raise ModelError.at(
            file,
            found=f"a converted model that reads {actual}",
            wanted=expected,
            fix="transformers does not convert this kind of file right: take the model's original Hugging Face directory",
        )


def _score_texts(model_dir: Path) -> tuple[list[list[int]], list[float], int]:
    """Return each text's token ids by the saved tokenizer, its mean nats per token by the saved model, and the vocabulary's size."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    ids: list[list[int]] = [tokenizer(text).input_ids for text in TEXTS]
    nats = []
    for tokens_T in map(torch.tensor, ids):
        with torch.inference_mode():
            logits_T_V = model(input_ids=tokens_T[None], use_cache=False).logits[0].float()
        nats.append(float(torch.nn.functional.cross_entropy(logits_T_V[:-1], tokens_T[1:])))
    return ids, nats, model.config.get_text_config(decoder=True).vocab_size


def _score_file(file: Path) -> tuple[list[list[int]], list[float]] | None:
    """Return each text's token ids and mean nats per token by llama.cpp; None if it does not know this kind of model."""
    import llama_cpp

    try:
        model: Any = llama_cpp.Llama(str(file), n_ctx=128, n_gpu_layers=0, logits_all=True, verbose=False)
    except ValueError:
        return None
    ids, nats = [], []
    for text in TEXTS:
        tokens: list[int] = model.tokenize(text.encode(), add_bos=True, special=False)
        model.reset()
        model.eval(tokens)
        logits_T_V = np.asarray(model.scores[: len(tokens) - 1], dtype=np.float64)
        logits_T_V -= logits_T_V.max(-1, keepdims=True)
        logits_T_V -= np.log(np.exp(logits_T_V).sum(-1, keepdims=True))
        ids.append(tokens)
        nats.append(-float(logits_T_V[np.arange(len(tokens) - 1), tokens[1:]].mean()))
    model.close()
    return ids, nats
