"""The other side: TRL's `DistillationTrainer`, under an interpreter that has TRL and need not have anything of ours.

    TRL_PYTHON -m benchmarks.merging.other CASE DESCRIPTOR

Local teacher, reverse KL, transformers' `generate`: TRL's vLLM mode hands weights to `model.load_weights`, which vLLM's CPU
build refuses. What would cost time and is on by default is off: gradient checkpointing, logs, checkpoints.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.merging.case import Case
from benchmarks.merging.turns import Turns, started


class _Clock:
    """Seconds by phase since the last step; what is in no other phase of a step is training."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.since = time.monotonic()
        self.generate = self.optimizer = 0.0
        self.prompt_tokens = self.response_tokens = 0

    def step(self) -> dict[str, Any]:
        seconds = time.monotonic() - self.since
        train = seconds - self.generate - self.optimizer
        return {
            "seconds": seconds,
            "phases": {"generate": self.generate, "train": train, "optimizer": self.optimizer},
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
        }


def config(case: Case, folder: str) -> Any:
    """TRL's settings for the case."""
    from trl import DistillationConfig

    autocast = case.dtype == "bfloat16" and case.trl_bf16 == "autocast"
    weights = {"dtype": "float32" if autocast else case.dtype}
    return DistillationConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=autocast,
        torch_compile=case.trl_compile,
        model_init_kwargs=dict(weights),
        teacher_model_init_kwargs=dict(weights),
        per_device_train_batch_size=case.rows,
        gradient_accumulation_steps=case.responses // case.rows,
        max_steps=case.warm_up + case.steps,
        max_completion_length=case.new_tokens,
        # Its trainer needs an end token; no response may end before its limit.
        generation_kwargs={"min_new_tokens": case.new_tokens},
        gradient_checkpointing=False,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def adapters(case: Case) -> Any:
    """Return the adapters that TRL trains in place of the weights; None for the weights themselves."""
    if not case.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(**case.adapters)


def trainer(case: Case, turns: Turns) -> Any:
    """A trainer that tells the parent of every step."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DistillationTrainer

    clock = _Clock()

    class Timed(DistillationTrainer):
        def _prepare_inputs(self, batch: Any) -> Any:
            began = time.monotonic()
            inputs = super()._prepare_inputs(batch)
            clock.generate += time.monotonic() - began
            clock.prompt_tokens += int(inputs["prompt_mask"].sum())
            clock.response_tokens += int(inputs["completion_mask"].sum())
            return inputs

    class Tell(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.clear()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.began = time.monotonic()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            clock.optimizer += time.monotonic() - self.began

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.over(clock.step())
            clock.clear()

    tokenizer = AutoTokenizer.from_pretrained(case.student, padding_side="left")
    tokenizer.eos_token = tokenizer.pad_token
    lines = case.prompts(0).read_text(encoding="utf-8").splitlines()
    return Timed(
        model=str(case.student),
        teacher_model=str(case.expert(0)),
        args=config(case, str(Path(case.folder) / "trl")),
        train_dataset=Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines]),
        processing_class=tokenizer,
        peft_config=adapters(case),
        callbacks=[Tell()],
    )


def main() -> None:
    case, turns = started()
    trainer(case, turns).train()


if __name__ == "__main__":
    main()
