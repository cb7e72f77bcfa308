"""Does a merge keep what the student can elsewhere? Two experts of SmolLM2, without `keep` and with it on general text.

    python -m benchmarks.keep --model models/smollm2 --prompts prompts/reasoning --json keep.json

`make smollm2` makes the model and the prompts. General prompts are beginnings of paragraphs from descriptions of the packages that are
installed here. Bits per byte are of docstrings that nobody trains on: those of numpy for what is chosen (`validation`), those of Python's own
library for the result.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import math
import os
import random
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer

from benchmarks.machine import machine
from benchmarks.variants import Variant, merge, opd, open_world
from opd.models.weights import load_causal_lm

DOMAINS = ("needle", "relations")
STEPS = 32
"""Steps of the merge without `keep`."""
NEW_TOKENS = 32
"""Longest response of the experts' domains."""


def find_general_prompts(count: int) -> list[str]:
    """Return beginnings, of 6 to 60 words, of paragraphs in the descriptions of installed packages: three of each paragraph."""
    rng, found = random.Random("keep"), set()
    for package in sorted(importlib.metadata.distributions(), key=lambda one: one.metadata["Name"]):
        # A package's description stands behind its headers, as the body of a message.
        _, _, text = (package.read_text("METADATA") or "").partition("\n\n")
        for paragraph in re.split(r"\n\s*\n", text):
            words = paragraph.split()
            if len(words) >= 20 and not re.search(r"https?:|[|<>{}]", paragraph):
                found |= {" ".join(words[: rng.randint(6, min(60, len(words) - 6))]) for _ in range(3)}
    return rng.sample(sorted(found), min(count, len(found)))


def read_docstrings(folder: Path, files: Iterable[str]) -> list[str]:
    """Return the docstrings of modules of one kilobyte or more, at most 2,000 characters each."""
    texts = []
    for name in files:
        text = ast.get_docstring(ast.parse((folder / name).read_text(encoding="utf-8"))) or ""
        if len(text) >= 1000:
            texts.append(text[:2000])
    return texts


def find_held_out(questions: str) -> list[str]:
    """Return the texts whose bits per byte are measured."""
    if questions == "validation":
        spec = importlib.util.find_spec("numpy")
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
    else:
        folder = Path(sysconfig.get_paths()["stdlib"])
    depth = "**/*.py" if questions == "validation" else "*.py"
    return read_docstrings(folder, sorted(str(file.relative_to(folder)) for file in folder.glob(depth)))


@torch.no_grad()
def measure_bits_per_byte(model_dir: Path, texts: Sequence[str]) -> float:
    """Return the model's bits for each byte of the texts, of at most 512 tokens each."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), load_causal_lm(model_dir, torch.float32)
    nats, size = 0.0, 0
    for text in texts:
        ids_1_T = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)["input_ids"]
        # The first token is given, so its bytes do not count.
        nats += float(model(input_ids=ids_1_T, labels=ids_1_T).loss) * (ids_1_T.shape[1] - 1)
        size += len(tokenizer.decode(ids_1_T[0, 1:]).encode())
    return nats / math.log(2) / size


def make_world(folder: Path, args: argparse.Namespace) -> Path:
    """Train the experts, and return the pipeline."""
    model, prompts = args.model.absolute(), args.prompts.absolute()
    data = {name: str(prompts / name / "train.jsonl") for name in DOMAINS}
    spec = {
        "output_dir": str(folder / "experts"),
        "base": {"model": str(model)},
        "train": {
            "max_steps": 40,
            "learning_rate": 1.0e-4,
            "per_device_train_batch_size": 8,
            "warmup_steps": 4,
            "lr_scheduler_type": "linear",
            "max_length": 192,
            "bf16": True,
        },
        "experts": {name: {"domain": name, "data": file} for name, file in data.items()},
    }
    (folder / "experts.yaml").write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    opd(folder / "experts.log", folder, "experts", "train", "experts.yaml")
    pipeline = {
        "name": "keep",
        "student": {"model": str(model)},
        "experts": {name: {"model": str(folder / "experts" / name), "domain": name} for name in DOMAINS},
        "domains": {
            name: {
                "prompts": file,
                "eval": {"prompts": str(prompts / name / "eval.jsonl"), "verifier": "reasoning_gym"}
                if args.questions == "exam"
                else {"holdout": 0.1, "verifier": "reasoning_gym"},
            }
            for name, file in data.items()
        },
        "rollout": {"dtype": "bfloat16", "max_new_tokens": NEW_TOKENS, "max_model_len": 256, "share_prefixes": True},
        "teachers": {"dtype": "bfloat16"},
        "objective": {"kind": "forward_kl", "chunk": 128},
        "trainer": {
            "dtype": "bfloat16",
            "ranks": 1,
            "steps": STEPS,
            "samples_per_step": 24,
            "lr": 2.0e-4,
            "warmup_steps": 4,
            "lr_scheduler_type": "cosine",
            "min_lr_ratio": 0.1,
            "micro_batch_tokens": 8192,
        },
        "checkpoint": {"every": 1000},
        "evaluate": {"samples": 150},
    }
    return write_pipeline(folder, pipeline)


def write_pipeline(folder: Path, pipeline: dict[str, Any]) -> Path:
    """Write the pipeline and the general prompts beside it; returns the pipeline's file."""
    rows = [{"prompt": text} for text in find_general_prompts(2000)]
    (folder / "general.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline, sort_keys=False), encoding="utf-8")
    return file


def choose_variants(folder: Path, args: argparse.Namespace) -> list[Variant]:
    """Return the merge without `keep`, and those with it."""
    general = json.dumps(str(folder / "general.jsonl"))
    more = (
        f"trainer.steps={args.steps}",
        f"trainer.samples_per_step={args.samples}",
        f"rollout.max_new_tokens={args.new_tokens}",
        f"evaluate.max_new_tokens={NEW_TOKENS}",
    )
    kept = [
        Variant(f"keep {weight:g}", (f"keep={{prompts: {general}, weight: {weight:g}}}", *more))
        for weight in args.weights
    ]
    return [Variant("without", ()), *kept]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What a merge of SmolLM2 costs general text, without `keep` and with it."
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path("models/smollm2"))
    add("--prompts", type=Path, default=Path("prompts/reasoning"))
    add("--questions", choices=["validation", "exam"], default="validation")
    add("--weights", nargs="+", type=float, default=[1.0, 2.0], help="of `keep`; a domain has 1")
    add("--steps", type=int, default=40, help="of the merges with `keep`; the one without has 32")
    add("--samples", type=int, default=32, help="responses of a step with `keep`; without it there are 24")
    add(
        "--new-tokens",
        type=int,
        default=96,
        help="longest response to general prompts; those of the experts end earlier",
    )
    add("--seeds", nargs="+", type=int, default=[0])
    add("--folder", type=Path, default=Path("runs/keep"), help="experts, run directories and logs")
    add("--json", type=Path, help="write all figures here, after every merge")
    args = parser.parse_args()
    facts = machine(os.cpu_count() or 1, "torch", "transformers", "deepspeed", "ray")
    texts = find_held_out(args.questions)
    with open_world(args.folder, lambda folder: make_world(folder, args)) as where:
        base = measure_bits_per_byte(args.model, texts)
        print(f"base: {base:.4f} bits per byte of {len(texts)} docstrings", flush=True)
        merges: list[dict[str, Any]] = []
        for seed in args.seeds:
            for variant in choose_variants(where.cwd, args):
                done = merge(
                    where, variant, seed, [f"trainer.samples_per_step={args.samples}"] if variant.settings else []
                )
                bits = measure_bits_per_byte(where.run(variant.name, seed).root / "model", texts)
                report = json.loads(where.run(variant.name, seed).report.read_text(encoding="utf-8"))
                merges.append(
                    {"variant": variant.name, "seed": seed, "bits_per_byte": bits, "rise": bits / base - 1}
                    | {
                        "accuracy": done.accuracy,
                        "mean_headroom": report.get("mean_headroom"),
                        "interval": report.get("mean_headroom_interval"),
                    }
                )
                print(f"{variant.name}, seed {seed}: {bits:.4f} ({100 * (bits / base - 1):+.2f} %)", flush=True)
                print(
                    f"  headroom {merges[-1]['mean_headroom']} {merges[-1]['interval']}, right {done.accuracy['after']}",
                    flush=True,
                )
                if args.json:
                    data = {"machine": facts, "questions": args.questions, "base": base, "merges": merges}
                    args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
