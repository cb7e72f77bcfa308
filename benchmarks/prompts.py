"""Measure what a million prompts cost before the first step: time, and the process's peak memory.

    python benchmarks/prompts.py --json prompts.json

Files of random prompts, one of a hundred rows and one of many, in each format. A process for each line reads, checks and
tokenises the domain's prompts and an exam of a hundred, looks for leaks between them and takes the prompts of step 1, as
`opd merge` does before it starts an engine. The second start of each file finds what the first one kept. What matters is
the difference to a hundred rows, which no library's import is in.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FEW = 100
FORMATS = ("parquet", "csv", "jsonl")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_draw = random.Random(0)
WORDS = ["".join(_draw.choices(LETTERS, k=_draw.randrange(2, 9))) for _ in range(5000)]
"""Words that prompts and the tokenizer are made of."""


@dataclass(frozen=True)
class Measured:
    """One start."""

    format: str
    chat: bool
    rows: int
    start: int
    """1: nothing is kept yet."""
    seconds: float
    cpu_s: float
    """CPU seconds of all threads."""
    peak_mib: float
    own_mib: float
    """At the end, without the pages of mapped files, which the system may take back."""
    mean_tokens: float
    """Mean tokens of a prompt."""
    digest: str
    """Hash of the prompts of the first steps: equal for equal rows, whatever the format."""


def write(path: Path, rows: int, chat: bool) -> None:
    """A file of `rows` different prompts; the same for the same arguments."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    draw = random.Random(rows)
    texts = [f"reverse {' '.join(draw.choices(WORDS, k=12))} {number}=" for number in range(rows)]
    answers = [str(number) for number in range(rows)]
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in texts] if chat else texts
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for prompt, answer in zip(prompts, answers, strict=True):
                file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    else:
        table = pa.table({"prompt": prompts, "answer": answers})
        csv.write_csv(table, path) if path.suffix == ".csv" else parquet.write_table(table, path)


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 8,000 tokens, the kind that most models have, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([f" {word}" for word in WORDS], trainer)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=template).save_pretrained(folder)


def first_step(train: Path, exam: Path, model: Path) -> dict[str, Any]:
    """Do what a merge does with its prompts up to step 1, in this process."""
    began = time.monotonic()
    from blake3 import blake3

    from opd.config import PipelineConfig
    from opd.prompts import MixedPrompts
    from pipelines.inputs.prompts import load_exams, load_training, refuse_leaks
    from pipelines.inputs.read import load_tokenizer

    config = PipelineConfig.model_validate(
        {
            "name": "bench",
            "student": {"model": "none"},
            "experts": {"e": {"model": "none", "domain": "d"}},
            "domains": {"d": {"prompts": str(train), "eval": {"prompts": str(exam)}}},
            "trainer": {"steps": 1, "samples_per_step": 8},
        }
    )
    tokenizer = load_tokenizer(model)
    training = load_training(config, {"d": train}, tokenizer)
    refuse_leaks(load_exams(config, tokenizer), training)
    asking = {name: table.select_prompts(table.lengths > 0) for name, table in training.items()}
    mixed = MixedPrompts(asking, {"d": 64}, seed=0)
    first = mixed.take(1)
    seconds = time.monotonic() - began
    used = os.times()
    status = Path("/proc/self/status").read_text().split()
    steps = [first, *(mixed.take(step) for step in range(2, 9))]
    shown = json.dumps([[p.id, list(p.token_ids), p.answer] for step in steps for p in step])
    return {
        "seconds": seconds,
        "cpu_s": used.user + used.system,
        "peak_mib": int(status[status.index("VmHWM:") + 1]) / 1024,
        "own_mib": int(status[status.index("RssAnon:") + 1]) / 1024,
        "mean_tokens": float(training["d"].lengths.mean()),
        "digest": blake3(shown.encode()).hexdigest(),
    }


def starts(folder: Path, form: str, rows: int, chat: bool) -> Iterator[Measured]:
    """A first and a second start of one file."""
    train, exam = folder / f"{rows}.{form}", folder / "exam.jsonl"
    write(train, rows, chat)
    exam.write_text("".join(json.dumps({"prompt": f"question {i}=", "answer": "a"}) + "\n" for i in range(FEW)))
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache")}
    command = [sys.executable, __file__, "--first-step", str(train), str(exam), str(folder / "model")]
    for start in (1, 2):
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=1800)
        yield Measured(format=form, chat=chat, rows=rows, start=start, **json.loads(found.stdout))
    train.unlink()


def show(measured: list[Measured]) -> None:
    from rich.console import Console
    from rich.table import Table

    base = {(m.format, m.chat, m.start): m for m in measured if m.rows == FEW}
    table = Table("format", "prompts", "rows", "start", title="Prompts up to the first step")
    for name in ("s", "more s", "CPU s", "peak MiB", "more MiB", "own MiB at the end"):
        table.add_column(name, justify="right")
    for m in measured:
        few = base[m.format, m.chat, m.start]
        table.add_row(
            m.format,
            "chat" if m.chat else "text",
            f"{m.rows:,}",
            str(m.start),
            f"{m.seconds:.1f}",
            f"{m.seconds - few.seconds:+.1f}",
            f"{m.cpu_s:.1f}",
            f"{m.peak_mib:,.0f}",
            f"{m.peak_mib - few.peak_mib:+,.0f}",
            f"{m.own_mib:,.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    for rows in {m.rows for m in measured}:
        digests = {m.digest for m in measured if m.rows == rows and not m.chat}
        print(
            f"{rows:,} rows as text: {'the same prompts' if len(digests) <= 1 else 'OTHER prompts'} from every format"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A million prompts before the first step.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="prompts of the large file")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--chat", action="store_true", help="chat messages in Parquet too")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--first-step", nargs=3, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_step:
        print(json.dumps(first_step(*args.first_step)))
        return
    facts = machine(os.cpu_count() or 1, "pyarrow", "datasets", "tokenizers", "transformers")
    measured = []
    with tempfile.TemporaryDirectory(prefix="opd-prompts-") as scratch:
        make_tokenizer(Path(scratch) / "model")
        for form, chat in [*((form, False) for form in args.formats), *([("parquet", True)] if args.chat else [])]:
            for rows in (FEW, args.rows):
                measured += starts(Path(scratch), form, rows, chat)
                print(measured[-2], measured[-1], sep="\n", file=sys.stderr)
    show(measured)
    if args.json:
        figures = {"machine": facts, "measured": [asdict(m) for m in measured]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
