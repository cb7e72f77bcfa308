"""The way out for an adapter that opd does not take as it is: merge it with PEFT into a full model."""

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
"""PEFT adds the update of one of two tied matrices to that one, and merges it into both unless they are two."""


def explain_merging(adapter: Path) -> str:
    """Return the `fix` line of an error about this adapter directory; followed, it gives the model that PEFT computes."""
    if _adapts_head_or_embedding(adapter):
        return f"merge it with PEFT, after untying head and embedding, and give the result as a full model: {_UNTIED}; {_TOKENIZER}"
    return f"merge it with PEFT and give the result as a full model: {_PLAIN}; {_TOKENIZER}"


def _adapts_head_or_embedding(adapter: Path) -> bool:
    """Return True if LoRA is on one of these modules, by the names of the tensors, else by the configuration."""
    try:
        modules = [name for name in read_header(adapter / ADAPTER_WEIGHTS) if ".lora_" in name]
    except (OSError, ModelError):  # other refusals say so
        modules = []
    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_bytes())
    except (OSError, ValueError):
        config = None
    targets = config.get("target_modules") if isinstance(config, dict) else None
    modules += [name for name in targets if isinstance(name, str)] if isinstance(targets, list) else []
    return any(_TIED.search(name) for name in modules)
