"""Train a student by TRL's GOLD loss on responses that it writes itself. Run by an interpreter that has TRL 1.16:

    PYTHON -m benchmarks.gold OPTIONS.json

`benchmarks.tokenizers` writes the options. Needs torch, transformers and TRL, and nothing of this repository: the loss, its inputs and its
settings are TRL's, the loop is the least that a comparison of losses needs, with the optimiser and schedule of the merge.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = "tokens.json"
"""File beside the model with the number of response tokens; it is written last."""


@dataclass(frozen=True, kw_only=True)
class GoldOptions:
    """The options of one training, as JSON."""

    student: str
    teacher: str
    prompts: str
    """A JSON file with the prompts."""
    output: str
    """Gets the model, and the file `TOKENS`."""
    settings: dict[str, Any]
    """Settings of TRL's `GOLDConfig` that differ from its defaults."""
    steps: int
    samples: int
    lr: float
    warmup_steps: int
    min_lr_ratio: float
    max_new_tokens: int
    seed: int


def load_loss(options: GoldOptions, student_tokenizer: Any, teacher_tokenizer: Any) -> tuple[Any, Any]:
    """Return TRL's loss, and its function that encodes texts for the teacher. Raises: SystemExit if TRL is not here."""
    try:
        from trl.experimental.gold import GOLDConfig
        from trl.experimental.gold.gold_trainer import ULDLoss, build_teacher_inputs_from_texts
    except ImportError as error:
        raise SystemExit(
            f"no TRL with trl.experimental.gold in {sys.executable} ({error}): pip install trl==1.16.0"
        ) from None
    config = GOLDConfig(
        output_dir=options.output, use_cpu=True, bf16=False, report_to="none", use_uld_loss=True, **options.settings
    )
    return ULDLoss(config, student_tokenizer, teacher_tokenizer), build_teacher_inputs_from_texts


def write_responses(model: Any, tokenizer: Any, prompts: list[str], limit: int) -> tuple[Any, Any, Any]:
    """Return ids, attention mask and labels [B, T] of prompts and sampled responses; labels are -100 outside of responses."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        ids_B_T = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=limit, use_cache=True
        )
    start = inputs["input_ids"].shape[1]
    response_B_R = ids_B_T[:, start:]
    ended_B_R = (response_B_R == tokenizer.eos_token_id).cumsum(1) - (response_B_R == tokenizer.eos_token_id).long()
    written_B_R = ended_B_R == 0
    mask_B_T = torch.cat([inputs["attention_mask"], written_B_R.long()], dim=1)
    labels_B_T = torch.cat(
        [torch.full_like(inputs["input_ids"], -100), response_B_R.masked_fill(~written_B_R, -100)], 1
    )
    return ids_B_T, mask_B_T, labels_B_T


def find_byte_offsets(tokenizer: Any, labels_B_T: Any) -> Any:
    """Return [B, T, 2] begin and end of each response token in bytes of the response, as TRL's trainer computes them."""
    from trl.experimental.utils import piece_byte_len

    rows = []
    for labels in labels_B_T.tolist():
        end, row = 0, []
        for label in labels:
            begin = end
            end += 0 if label == -100 else piece_byte_len(tokenizer.convert_ids_to_tokens([label])[0])
            row.append((0, 0) if label == -100 else (begin, end))
        rows.append(row)
    return torch.tensor(rows)


def train(options: GoldOptions) -> int:
    """Train the student and save it; returns the number of response tokens."""
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    tokenizer, teacher_tokenizer = (AutoTokenizer.from_pretrained(path) for path in (options.student, options.teacher))
    loss_of, build_teacher_inputs = load_loss(options, tokenizer, teacher_tokenizer)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (options.student, options.teacher)
    )
    prompts = json.loads(Path(options.prompts).read_text(encoding="utf-8"))
    optimizer = torch.optim.AdamW(student.parameters(), lr=options.lr, betas=(0.9, 0.999), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: scale_rate(options, step))
    tokens = 0
    for step in range(1, options.steps + 1):
        student.eval()
        chosen = [draw.choice(prompts) for _ in range(options.samples)]
        ids_B_T, mask_B_T, labels_B_T = write_responses(student, tokenizer, chosen, options.max_new_tokens)
        responses = [[label for label in labels if label != -100] for labels in labels_B_T.tolist()]
        tokens += sum(map(len, responses))
        texts = tokenizer.batch_decode(responses, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        teacher_ids, teacher_labels, teacher_mask, teacher_offsets = build_teacher_inputs(
            teacher_tokenizer, chosen, texts
        )
        with torch.no_grad():
            teacher_logits = teacher(input_ids=teacher_ids, attention_mask=teacher_mask).logits
        student.train()
        loss = loss_of(
            student_logits=student(input_ids=ids_B_T, attention_mask=mask_B_T, use_cache=False).logits,
            teacher_logits=teacher_logits,
            student_labels=labels_B_T,
            teacher_labels=teacher_labels,
            student_input_ids=ids_B_T,
            teacher_input_ids=teacher_ids,
            student_byte_offsets=find_byte_offsets(tokenizer, labels_B_T),
            teacher_byte_offsets=teacher_offsets,
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}/{options.steps}  loss {loss.item():.4f}", flush=True)
    student.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    return tokens


def scale_rate(options: GoldOptions, step: int) -> float:
    """Return the learning rate of a step as a share of its peak: linear warm-up, then a cosine to `min_lr_ratio`."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return options.min_lr_ratio + (1 - options.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2


def main() -> None:
    options = GoldOptions(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    tokens = train(options)
    (Path(options.output) / TOKENS).write_text(json.dumps(tokens))


if __name__ == "__main__":
    main()
