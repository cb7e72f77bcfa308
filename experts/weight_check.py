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
"""Texts that tell the cause if one of them stands in the description of the misfit, in which names are quoted -> what to do about it.

`'score.` has the quote because only a name that begins so is a head's."""


def check_weights(path: Path) -> Naming:
    """Return the model's naming in transformers.

    Raises: ModelError unless its files have every tensor that the architecture needs, and no others.
    """
    import torch

    from opd.models.weights import Naming, causal_lm_class, refuse_unusable_config

    config, model_class = causal_lm_class(path)
    with refuse_unusable_config(path):
        naming = Naming(config, torch.float32)
    # Names and shapes are enough: meta tensors have no numbers, so no weight is read.
    empty_tensors = {
        name: torch.empty(tensor.shape, dtype=torch.float32, device="meta")
        for name, tensor in weight_tensors(path).items()
    }
    _, problem = naming.from_files(empty_tensors)
    if problem:
        fix = next((fix for texts, fix in _LEFTOVERS.items() if any(text in problem for text in texts)), "")
        raise ModelError.at(
            path,
            found=f"weights that do not fit config.json: {problem}",
            wanted=f"the tensors of transformers' {model_class.__name__}, all of them and no others",
            fix=fix or "copy the directory again, or save the model again with save_pretrained",
        )
    return naming
