"""Supervised fine-tuning with transformers' Trainer; the loss is on what the model has to write, end tokens included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypedDict

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from experts.episodes.encode import EpisodeEncoder
from experts.episodes.rows import EpisodeRow
from experts.spec import TrainSettings
from opd.errors import ModelError, PromptError
from opd.prompts import PromptLine, encode_prompt, render_prompt
from opd.prompts.encode import make_row_error, render_messages
from opd.prompts.untrusted_text import escape_specials_inside, escape_variables, special_texts
from opd.tool_formats import AUTO, forbidden_in_turns
from opd.train.optimizer import AdamWOptions, build_adamw
from opd.train.schedule import LearningRate

IGNORED = -100


TrainingRow = PromptLine | EpisodeRow


class Example(TypedDict):
    """input_ids [T] prompt, completion, end token, or a whole episode; labels [T] the same with `IGNORED` where nothing is
    learned."""

    input_ids: list[int]
    labels: list[int]


def encode_line(
    tokenizer: PreTrainedTokenizerBase,
    line: PromptLine,
    ends: Sequence[int] = (),
    day: date | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Example:
    """Tokenise the prompt exactly as a merge does, then the completion up to and including the end token.

    `ends`: end tokens of the model besides the tokenizer's. `day`: date for a chat template that asks for one; None: today.
    `variables`: variables of the chat template; the row's own take precedence. Raises: PromptError if there is no completion of the prompt's kind, or the chat template refuses the messages or does not
    continue the prompt.
    """
    try:
        template_variables = {**(variables or {}), **line.variables}
        prompt = list(encode_prompt(tokenizer, line.prompt, day, **template_variables))
        completion = tokenizer.encode(
            _completion_text(tokenizer, line, day, template_variables), add_special_tokens=False
        )
    except PromptError:
        raise
    except (TemplateError, ValueError, TypeError) as error:
        raise make_row_error(f"prompt {line.prompt!r:.80}", "base", error) from None
    completion = _cut_after_end(completion, tokenizer.eos_token_id, ends)
    return {"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion}


def encode_lines(
    tokenizer: PreTrainedTokenizerBase,
    lines: Sequence[TrainingRow],
    max_length: int,
    ends: Sequence[int] = (),
    day: date | None = None,
    parser: str = AUTO,
    variables: Mapping[str, Any] | None = None,
) -> list[Example]:
    """Return every line that fits in `max_length` tokens.

    `ends`, `day` and `variables`: see `encode_line`. `parser`: name of the format of tool calls. Raises: PromptError if no line
    fits; ModelError if the turns of an episode cannot be appended to the chat template's text, or if there is no end token.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError.at(
            "tokenizer_config.json: eos_token",
            found="nothing",
            wanted="the token that ends a response: every row is trained to end with it",
            fix="name it in the base's tokenizer_config.json",
        )
    encoder = EpisodeEncoder(tokenizer, day, parser, ends, variables)

    def encode_row(line: TrainingRow) -> Example:
        if isinstance(line, PromptLine):
            return encode_line(tokenizer, line, ends, day, variables)
        ids, learned = encoder.encode(line)
        return {"input_ids": ids, "labels": [i if learn else IGNORED for i, learn in zip(ids, learned, strict=True)]}

    examples = [example for line in lines if len((example := encode_row(line))["input_ids"]) <= max_length]
    if not examples:
        raise PromptError.at(
            "max_length",
            found=f"{len(lines)} rows, all longer",
            wanted=f"rows of at most {max_length} tokens",
            fix="raise max_length",
        )
    return examples


def fine_tune(
    model: torch.nn.Module,
    examples: list[Example],
    settings: TrainSettings,
    *,
    seed: int,
    scratch: Path,
    report: Callable[[int, float], None],
) -> None:
    """Train `model` in place; `report(step, loss)` is called about ten times. `scratch` may be written to."""
    trainer_options = {"optim": "adamw_torch", **settings.model_dump(exclude={"max_length"})}
    _run_trainer(model, examples, _training_arguments(settings.max_steps, seed, scratch, trainer_options), report)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationSpec:
    """Settings of `train_on_text`: a merge's optimiser and schedule, and the size of a step."""

    adamw: AdamWOptions
    """Settings of the optimiser, except for its learning rate."""
    rate: LearningRate
    """Learning rate of every step; there are `rate.steps` of them."""
    max_grad_norm: float
    """Gradients are scaled down to this global norm."""
    dtype: str
    """Compute type."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass."""
    micro_batch: int
    """Examples of one forward pass."""
    accumulate: int
    """Micro-batches of one step."""
    seed: int = 0
    """Seed of the model's own randomness, such as dropout."""


def train_on_text(
    model: torch.nn.Module,
    examples: list[Example],
    spec: ImitationSpec,
    *,
    scratch: Path,
    report: Callable[[int, float], None],
) -> None:
    """Train `model` in place as a merge trains its student, but on given text: its optimiser, its schedule, its steps.

    Each step takes the next `micro_batch * accumulate` of the examples, in their order; the loss is the mean over the
    step's trained tokens. `report` and `scratch` are explained at `fine_tune`. This uses transformers' Trainer and not a
    `ZeroEngine`, because ZeRO-3 costs more time in one process.
    """
    assert len(examples) == spec.rate.steps * spec.micro_batch * spec.accumulate
    trainer_options = {
        "max_steps": spec.rate.steps,
        "per_device_train_batch_size": spec.micro_batch,
        "gradient_accumulation_steps": spec.accumulate,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": spec.max_grad_norm,
        "gradient_checkpointing": spec.gradient_checkpointing,
        "bf16": spec.dtype == "bfloat16",
    }
    arguments = _training_arguments(spec.rate.steps, spec.seed, scratch, trainer_options)
    # With several GPUs the Trainer would take a micro-batch for each of them, and so larger steps.
    arguments._n_gpu = min(1, arguments.n_gpu)
    optimizer = build_adamw(model, spec.adamw, lr=1.0)  # the schedule returns the rate itself, so the factor is 1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps_done: spec.rate.rate_at_step(steps_done + 1))
    _run_trainer(model, examples, arguments, report, (optimizer, schedule))


def _training_arguments(steps: int, seed: int, scratch: Path, trainer_options: Mapping[str, Any]) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(scratch),
        seed=seed,
        data_seed=seed,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=max(1, steps // 10),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        **trainer_options,
    )


def _run_trainer(
    model: torch.nn.Module,
    examples: list[Example],
    arguments: TrainingArguments,
    report: Callable[[int, float], None],
    optimizers: tuple[Any, Any] = (None, None),
) -> None:
    """Run transformers' Trainer. `optimizers`: optimiser and schedule; by default those that the arguments name."""
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=examples,  # a list has all that it needs of a data set
        data_collator=collate_examples,
        callbacks=[_Report(report)],
        optimizers=optimizers,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


class _Report(TrainerCallback):
    def __init__(self, report: Callable[[int, float], None]) -> None:
        self._report = report

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._report(state.global_step, float(logs["loss"]))


def collate_examples(batch: list[Example]) -> dict[str, torch.Tensor | int]:
    """Return the examples as a batch, padded on the right to [B, T]; padding is neither attended to nor learned.

    Logits are computed for the last `logits_to_keep` positions only, beginning with the one that predicts the first
    completion token; `labels` are [B, logits_to_keep]. Prompts have no labels, and their logits would be the larger half of a
    small model's work.
    """
    length = max(len(example["input_ids"]) for example in batch)
    first_label = min(next(t for t, label in enumerate(example["labels"]) if label != IGNORED) for example in batch)
    assert first_label > 0, "a token without a context has no prediction"
    num_logits = length - (first_label - 1)

    def pad_column(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (length - len(row)) for row in rows])

    return {
        "input_ids": pad_column([example["input_ids"] for example in batch], 0),
        "labels": pad_column([example["labels"] for example in batch], IGNORED)[:, -num_logits:],
        "attention_mask": pad_column([[1] * len(example["input_ids"]) for example in batch], 0),
        "logits_to_keep": num_logits,
    }


def _cut_after_end(ids: list[int], eos: int, ends: Sequence[int]) -> list[int]:
    """Cut the ids after the last end token, because a model never generates what a template writes after it. If there is none,
    add one."""
    last = max((index for index, token in enumerate(ids) if token == eos or token in ends), default=None)
    return [*ids, eos] if last is None else ids[: last + 1]


def _completion_text(
    tokenizer: PreTrainedTokenizerBase, line: PromptLine, day: date | None, variables: Mapping[str, Any]
) -> str:
    """Return the completion as text."""
    if isinstance(line.prompt, str) and isinstance(line.completion, str):
        return line.completion
    if isinstance(line.prompt, str) or line.completion is None or isinstance(line.completion, str):
        raise PromptError.at(
            f"prompt {line.prompt!r:.80}",
            found=f"completion {line.completion!r:.80}",
            wanted="a completion of the same kind as the prompt: text, or chat messages",
            fix="add or correct the column `completion`",
        )
    prompt = render_prompt(tokenizer, line.prompt, day, **variables)
    specials = special_texts(tokenizer)
    messages = [escape_specials_inside(message, specials) for message in line.prompt]
    messages += [escape_specials_inside(message, forbidden_in_turns(specials)) for message in line.completion]
    conversation = render_messages(
        tokenizer, messages, day, **escape_variables(variables, specials), add_generation_prompt=False
    )
    if not conversation.startswith(prompt):
        raise PromptError.at(
            "chat template",
            found=f"a conversation that does not begin with its prompt {prompt!r:.80}",
            wanted="prompt with add_generation_prompt, then the completion",
            fix="use text rows, or a model whose template keeps the prompt as it is",
        )
    return conversation[len(prompt) :]
