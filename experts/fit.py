"""Check that the weights of a model directory are those of the architecture in its config.json: all of them, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from experts.weight_files import weight_tensors
from opd.errors import ModelError

if TYPE_CHECKING:
    from opd.models.weights import Naming

_LEFTOVERS = {
    (".lora_", ".base_layer."): (
        "it was saved with its adapter beside the weights: where it was trained, save `model.merge_and_unload()` in its place, or the "
        "adapter alone by PEFT's save_pretrained, and give that"
    ),
    ("v_head.", "value_head.", "critic.", "'score.", "reward_head."): (
        "a head that training used beside the model was saved with it: AutoModelForCausalLM.from_pretrained(dir).save_pretrained(out) "
        "leaves it out, and AutoTokenizer.from_pretrained(dir).save_pretrained(out) adds the tokenizer"
    ),
}
"""Parts of names of tensors -> what to do about them."""


def match_weights(path: Path) -> Naming:
    """Return the model's naming in transformers. Raises: ModelError unless its files fill all modules and hold nothing else."""
    import torch

    from opd.models.weights import Naming, causal_lm_class, refuse_unusable_config

    config, model_class = causal_lm_class(path)
    with refuse_unusable_config(path):
        naming = Naming(config, torch.float32)
    shapes = {n: torch.empty(t.shape, dtype=torch.float32, device="meta") for n, t in weight_tensors(path).items()}
    _, problem = naming.from_files(shapes)
    if problem:
        leftover = next((fix for parts, fix in _LEFTOVERS.items() if any(part in problem for part in parts)), None)
        raise ModelError.at(
            path,
            found=f"weights that do not fit config.json: {problem}",
            wanted=f"the tensors of transformers' {model_class.__name__}, all of them and no others",
            fix=leftover or "copy the directory again, or save the model again with save_pretrained",
        )
    return naming
