"""`imitate`: the optimiser, schedule, order and loss of a merge, against a plain loop."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from experts.sft import IGNORED, Example, ImitationSpec, train_on_text
from opd.train.optimizer import AdamWOptions
from opd.train.schedule import LearningRate

SETTINGS: dict[str, Any] = {
    "adamw": AdamWOptions(betas=(0.8, 0.9), epsilon=1e-8, weight_decay=0.3),
    "rate": LearningRate(peak=1e-3, steps=4, warmup_steps=2, decay="cosine", floor=0.1),
    "max_grad_norm": 0.5,
    "dtype": "float32",
    "gradient_checkpointing": False,
    "seed": 1,
}
RATES = (5e-4, 1e-3, 5.5e-4, 1e-4)
"""Half the warm-up, its end, the middle of the cosine, its floor."""


def examples(num: int) -> list[Example]:
    draw = random.Random(0)
    made = []
    for _ in range(num):
        prompt, response = ([draw.randrange(4, 40) for _ in range(draw.randrange(2, 9))] for _ in range(2))
        made.append(Example(input_ids=prompt + response, labels=[IGNORED] * len(prompt) + response))
    return made


def plain_loop(model: Any, data: list[Example]) -> None:
    """One sequence at a time, nothing padded; the loss is the mean over the tokens of a step."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-8)
    for step, rate in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = rate
        part = data[6 * step : 6 * step + 6]
        num_tokens = sum(label != IGNORED for example in part for label in example["labels"])
        for example in part:
            logits = model(torch.tensor([example["input_ids"]])).logits[0, :-1].log_softmax(-1)
            labels = torch.tensor(example["labels"][1:])
            kept = labels != IGNORED
            loss = -logits[kept].gather(1, labels[kept, None]).sum() / num_tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("micro_batch", "accumulate"), [(6, 1), (2, 3)])
def test_it_trains_as_a_plain_loop_does(
    tiny_model_dir: Path, tmp_path: Path, micro_batch: int, accumulate: int
) -> None:
    want, found = (AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32) for _ in range(2))
    data = examples(24)
    plain_loop(want, data)
    reported: list[int] = []
    train_on_text(
        found,
        data,
        ImitationSpec(**SETTINGS, micro_batch=micro_batch, accumulate=accumulate),
        scratch=tmp_path,
        report=lambda step, _: reported.append(step),
    )
    start = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).state_dict()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, want.state_dict()[name], rtol=0, atol=2e-5, msg=name)
    moved = max((found.state_dict()[name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-3, "and that is far from where it started"
    assert reported == [1, 2, 3, 4]
