"""Advice for an adapter that opd cannot use as it is: merge it with PEFT into a full model."""

from __future__ import annotations

import json
import re
from pathlib import Path

from experts.safetensors_header import read_header
from opd.errors import ModelError
from opd.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS

_TIED = re.compile(r"\b(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|lm_head|embed_out)(\.|$)")
_TOKENIZER = "and the tokenizer with it: AutoTokenizer.from_pretrained(base).save_pretrained(out)"
_PLAIN = "AutoPeftModelForCausalLM.from_pretrained(dir).merge_and_unload().save_pretrained(out)"
_UNTIED = (
    "model = AutoPeftModelForCausalLM.from_pretrained(dir); head = model.get_base_model().get_output_embeddings(); "
    "head = getattr(head, 'base_layer', head); head.weight = torch.nn.Parameter(head.weight.detach().clone()); "
    "model.config.tie_word_embeddings = False; model.merge_and_unload().save_pretrained(out)"
)
"""Commands for an adapter of a tied head or embedding. While training, PEFT applies the update to one of the two only; but
merging would change both, because they are one tensor. So they are untied first."""


def explain_merging(adapter: Path) -> str:
    """Return the `fix` line of an error about this adapter. Its commands give a model that computes the same as PEFT."""
    if _adapts_head_or_embedding(adapter):
        return f"merge it with PEFT, after untying head and embedding, and give the result as a full model: {_UNTIED}; {_TOKENIZER}"
    return f"merge it with PEFT and give the result as a full model: {_PLAIN}; {_TOKENIZER}"


def _adapts_head_or_embedding(adapter: Path) -> bool:
    """Return True if the adapter changes a head or an embedding, according to its tensors' names or its configuration."""
    try:
        modules = [name for name in read_header(adapter / ADAPTER_WEIGHTS) if ".lora_" in name]
    except (OSError, ModelError):  # other checks report that
        modules = []
    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError):
        config = None
    targets = config.get("target_modules") if isinstance(config, dict) else None
    modules += [name for name in targets if isinstance(name, str)] if isinstance(targets, list) else []
    return any(_TIED.search(name) for name in modules)
