"""Make what the walk starts from: a student, three experts of which one is a LoRA adapter, and prompts in three formats.

    python docs/walk_ingredients.py DIRECTORY

The tasks are three of the suite `letters`: words written backward, their letters sorted, and their first letter moved to the end. The
student is a small model that has learned a little of nine tasks of the suite, and each expert went on with one of them. Nobody was trained on
the prompts in `data/`.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experts.spec import ExpertsSpec, TrainSettings
from experts.suites.letters import make_rows
from experts.train import train_experts

FULL = {"reverse": 160, "sort": 180}
"""Expert that is a whole model -> steps of its training."""
ADAPTED = "rotate"
OTHERS = ("shift", "double", "mask", "compare", "walk", "swap")
"""Tasks that the student has learned a little of besides."""
ROWS, PROMPTS = 2000, 1000
"""Rows of a task that models learn from, and prompts of it that the merge gets."""
SHAPE = {"tokenizer": "letters", "hidden_size": 128, "layers": 4, "heads": 4, "intermediate_size": 344}
TRAIN = {
    "max_steps": 200,
    "learning_rate": 2.0e-3,
    "per_device_train_batch_size": 64,
    "warmup_steps": 10,
    "max_length": 48,
}


def main(root: Path) -> None:
    rows = {task: make_rows(task, ROWS + PROMPTS, seed=0) for task in (*FULL, ADAPTED, *OTHERS)}
    write_prompts(root / "data", {task: rows[task][ROWS:] for task in (*FULL, ADAPTED)})
    with tempfile.TemporaryDirectory() as scratch:
        learned = {task: Path(scratch, f"{task}.jsonl") for task in rows}
        for task, file in learned.items():
            write_lines(file, rows[task][:ROWS])
        train_models(root / "models", learned)
        train_adapter(root / "models" / "base", root / "models" / f"{ADAPTED}-lora", learned[ADAPTED])


def write_prompts(directory: Path, rows: Mapping[str, list[dict[str, Any]]]) -> None:
    """One task as CSV with column names of its own, one as Parquet, one as JSON lines."""
    import pyarrow as pa
    from pyarrow import parquet

    directory.mkdir(parents=True)
    asked = {
        task: [{"prompt": row["prompt"], "answer": row["answer"]} for row in found] for task, found in rows.items()
    }
    with (directory / "reverse.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("question", "solution"), *(tuple(row.values()) for row in asked["reverse"])])
    parquet.write_table(pa.Table.from_pylist(asked["sort"]), directory / "sort.parquet")
    write_lines(directory / f"{ADAPTED}.jsonl", asked[ADAPTED])


def write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_models(directory: Path, learned: Mapping[str, Path]) -> None:
    """The student, `base`, and the experts that are whole models, as `opd experts train` makes them."""
    experts = {
        task: {"domain": task, "data": learned[task], "train": {"max_steps": steps}} for task, steps in FULL.items()
    }
    base = {"from_scratch": SHAPE, "data": list(learned.values()), "train": {"max_steps": 200, "learning_rate": 3.0e-3}}
    spec = {"output_dir": directory, "base": base, "train": TRAIN, "experts": experts}
    train_experts(ExpertsSpec.model_validate(spec), print)


def train_adapter(base: Path, directory: Path, learned: Path) -> None:
    """A LoRA adapter, as PEFT saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from experts.sft import encode_lines, fine_tune
    from opd.prompts import read_prompt_lines

    set_seed(0)
    settings = TrainSettings.model_validate({**TRAIN, "learning_rate": 5.0e-3})
    examples = encode_lines(AutoTokenizer.from_pretrained(base), read_prompt_lines(learned), settings.max_length)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, lora)
    with tempfile.TemporaryDirectory() as scratch:
        fine_tune(
            adapted, examples, settings, seed=0, scratch=Path(scratch),
            report=lambda step, loss: print(f"{directory.name}: step {step}/{settings.max_steps}  loss {loss:.3f}"),
        )  # fmt: skip
    adapted.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
