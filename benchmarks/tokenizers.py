"""An expert with another tokenizer in a merge, and beside TRL's GOLD loss on the same pair of models.

    python -m benchmarks.tokenizers --quick
    python -m benchmarks.tokenizers --seeds 0 1 2 --json tokenizers.json                                       after `make demo`
    python -m benchmarks.tokenizers --part alone --trl-python PYTHON --json tokenizers-alone.json              after `make demo`

`merge`: the quickstart with the expert of one domain as it is, with its token ids permuted, and trained anew with a byte-level BPE of the
prompts' text, on rows of its own: of the answers of `reverse` every ninth piece is then a pair of letters, of those of `walk` every second. `alone`: this domain
and this expert only, our loss and TRL's (`benchmarks.gold`) on as many responses that the student writes itself. Learning rates are chosen
on prompts held out of training. What is finished is read, so the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks import gold
from benchmarks.asked import claim
from benchmarks.gold import GoldOptions
from benchmarks.machine import machine
from benchmarks.variants import ROOT, Place, Variant, make_tiny, merge, opd
from experts.registry import Registry
from experts.suites.letters import make_rows
from opd.prompts.table import is_held_out
from opd.text import format_or_dash
from pipelines.catalog import find_pipeline

OWN_TOKENS = {"engine": {"kind": "transformers", "payload": "aligned_states"}}
OBJECTIVE = {"kind": "aligned_kl"}
SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
HOLDOUT = 0.1
"""Share of the training prompts on which learning rates are chosen."""
AS_IT_IS, PERMUTED, RETRAINED = "as it is", "permuted ids", "own tokens"
OURS = "aligned_kl"
HYBRID: dict[str, Any] = {
    "uld_use_hybrid_loss": True,
    "uld_token_merge_strategy": "bayesian",
    "uld_skip_student_eos": False,
    "uld_skip_teacher_eos": False,
}
GOLD: dict[str, dict[str, Any]] = {
    "GOLD, defaults": {},
    "GOLD, hybrid": HYBRID,
    "GOLD, matched": HYBRID | {"uld_hybrid_matched_weight": 1.0, "uld_hybrid_unmatched_weight": 0.0},
    "GOLD, matched, reverse KL": HYBRID
    | {"uld_hybrid_matched_weight": 1.0, "uld_hybrid_unmatched_weight": 0.0, "beta": 1.0},
}
"""Settings of TRL's loss. By default it sorts probabilities, looks one token too late, and leaves the end token out. `hybrid` compares tokens
of the same text, and weighs these by their share of the vocabulary; `matched` compares them alone."""


@dataclass(frozen=True)
class Size:
    """Amount of everything."""

    domain: str
    tokens: int
    """Ids of the new tokenizer; more than 260 of them are merges."""
    rows: int
    """Rows on which the new expert is trained. It learns the quickstart's 2,000 by heart: half of the exam is wrong then."""
    base_steps: int
    expert_steps: int
    steps: int
    samples: int


FULL = Size(domain="reverse", tokens=400, rows=20_000, base_steps=400, expert_steps=600, steps=400, samples=48)
QUICK = Size(domain="reverse", tokens=300, rows=100, base_steps=2, expert_steps=2, steps=2, samples=8)


def train_tokenizer(texts: Sequence[str], size: int) -> Any:
    """Return a byte-level BPE whose tokens are within words, numbers or signs. TRL's loss takes no other kind."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    runs = pre_tokenizers.Split(Regex(r"[a-z]+|[0-9]+|[<>]+|[\s\S]"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([runs, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)


def train_expert(where: Place, expert: Path, files: Mapping[str, Path], size: Size) -> Path:
    """Train a base and the domain's expert with a new tokenizer, of the shape of the given expert; returns its directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    output = where.runs / "own-tokens"
    rows = [json.loads(line) for file in files.values() for line in file.read_text(encoding="utf-8").splitlines()]
    tokenizer = train_tokenizer([text for row in rows for text in (row["prompt"], row["completion"])], size.tokens)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    config = AutoConfig.from_pretrained(expert)
    config.update({"vocab_size": len(tokenizer), **ids})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    start = where.runs / "own-tokens-start"
    rows_file = write_rows(where, size, files[size.domain].with_name("eval.jsonl"))
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    spec = {
        "output_dir": str(output),
        "base": {
            "model": str(start),
            "data": [str(file) for file in files.values()],
            "train": {"max_steps": size.base_steps, "learning_rate": 3.0e-3},
        },
        "train": {
            "max_steps": size.expert_steps,
            "learning_rate": 2.0e-3,
            "per_device_train_batch_size": 64,
            "warmup_steps": 10,
            "max_length": 48,
        },
        "experts": {size.domain: {"domain": size.domain, "data": str(rows_file)}},
    }
    file = where.runs / "own-tokens.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    opd(where.runs / "own-tokens.log", where.cwd, "experts", "train", str(file))
    return output / size.domain


def write_rows(where: Place, size: Size, exam: Path) -> Path:
    """Write rows of the domain that are no question of its exam; returns the file."""
    asked = {json.loads(line)["prompt"] for line in exam.read_text(encoding="utf-8").splitlines()}
    rows = [row for row in make_rows(size.domain, size.rows, seed=1) if row["prompt"] not in asked]
    file = where.runs / f"{size.domain}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def permute_ids(expert: Path, output: Path) -> Path:
    """Save a model with the ids of its ordinary tokens in reverse; returns its directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(expert)
    AutoTokenizer.from_pretrained(expert).save_pretrained(output)
    file = output / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = settings["model"]["vocab"]
    ordinary = [token for token in vocabulary if token not in SPECIALS]
    old_ids = [vocabulary[token] for token in ordinary]
    new_ids = old_ids[::-1]
    vocabulary |= dict(zip(ordinary, new_ids, strict=True))
    file.write_text(json.dumps(settings), encoding="utf-8")
    with torch.no_grad():
        for weight in {part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())}:
            weight[new_ids] = weight[old_ids]
    model.save_pretrained(output)
    return output


@contextmanager
def open_place(args: argparse.Namespace, size: Size) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Give the folder of all runs, with the pipeline whose experts are named by their directories."""
    with tempfile.TemporaryDirectory(prefix="opd-tokenizers-") as scratch:
        if args.quick:
            cwd, runs = Path(scratch), Path(scratch) / "runs"
            data = make_tiny(cwd)
        else:
            cwd, runs = Path.cwd(), args.folder.absolute()
            data = yaml.safe_load(find_pipeline("quickstart").read_text(encoding="utf-8"))
        runs.mkdir(parents=True, exist_ok=True)
        registry = Registry(cwd / data.pop("registry"))
        data["experts"] = {n: {"model": registry.get(n).info.path, "domain": n} for n in data["experts"]["use"]}
        yield Place(cwd, write_pipeline(runs / "pipeline.yaml", data), runs), data


def write_pipeline(file: Path, data: Mapping[str, Any]) -> Path:
    """Write a pipeline; returns its file."""
    file.write_text(yaml.safe_dump(dict(data), sort_keys=False), encoding="utf-8")
    return file


def give_own_tokens(domain: str, model: Path) -> tuple[str, ...]:
    """Return the settings with which a domain has this expert, which reads tokens of its own."""
    expert = {"model": str(model), "domain": domain, **OWN_TOKENS}
    return (f"experts.{domain}={json.dumps(expert)}", f"domains.{domain}.objective={json.dumps(OBJECTIVE)}")


def find_headroom(accuracy: Mapping[str, Mapping[str, float]], domain: str) -> float | None:
    """Return the share of the way from the student to its expert; None if the expert is no better."""
    before, expert, after = (accuracy[exam][domain] for exam in ("before", "expert", "after"))
    return (after - before) / (expert - before) if expert > before else None


def merge_all(args: argparse.Namespace, where: Place, size: Size, models: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Merge with the expert in each of its forms; returns what each came to."""
    results: list[dict[str, Any]] = []
    for seed in args.seeds:
        for name, model in models.items():
            if args.only and name not in args.only:
                continue
            settings = () if name == AS_IT_IS else give_own_tokens(size.domain, model)
            outcome = merge(where, Variant(name, settings), seed, args.set)
            results.append({**asdict(outcome), "headroom": find_headroom(outcome.accuracy, size.domain)})
            save(args, "merge", results)
            print(f"{name}, seed {seed}: {describe(results[-1], size.domain)}", flush=True)
    return results


def describe(result: Mapping[str, Any], domain: str) -> str:
    """Return the figures of a result as text."""
    before, expert, after = (result["accuracy"][exam][domain] for exam in ("before", "expert", "after"))
    return (
        f"{domain} {before:.3f} -> {after:.3f}, expert {expert:.3f}, headroom {format_or_dash(result['headroom'], '.3f')}; "
        f"{result['tokens']} tokens, {result['wall_s']:.0f} s"
    )


class Alone:
    """One domain and one expert: our loss and TRL's."""

    def __init__(
        self, args: argparse.Namespace, where: Place, size: Size, data: Mapping[str, Any], expert: Path
    ) -> None:
        domain = data["domains"][size.domain]
        self._args, self._size, self._expert = args, size, expert
        self._student, self._prompts = data["student"]["model"], where.cwd / domain["prompts"]
        pipeline = {
            "name": "alone",
            "student": data["student"],
            "experts": {size.domain: {"model": str(expert), "domain": size.domain, **OWN_TOKENS}},
            "rollout": {"max_new_tokens": data["rollout"]["max_new_tokens"], "max_model_len": 48},
            "trainer": {
                "ranks": 1,
                "steps": size.steps,
                "samples_per_step": size.samples,
                "warmup_steps": min(10, size.steps - 1),
                "lr_scheduler_type": "cosine",
                "min_lr_ratio": 0.05,
            },
            "evaluate": {"samples": 200},
        }
        self._places = {}
        exam = {"prompts": domain["prompts"], "objective": OBJECTIVE, "eval": domain["eval"]}
        for name, questions in (("validation", {"holdout": HOLDOUT}), ("exam", domain["eval"])):
            runs = where.runs / f"alone-{name}"
            runs.mkdir(exist_ok=True)
            domains = {size.domain: {**exam, "eval": questions}}
            self._places[name] = Place(
                where.cwd, write_pipeline(runs / "pipeline.yaml", {**pipeline, "domains": domains}), runs
            )
        self.results: list[dict[str, Any]] = []

    def compare(self) -> None:
        """Choose each method's learning rate on held-out prompts, then train it with every seed."""
        only = self._args.only or list(GOLD if self._args.trl_python else ())
        for method in (OURS, *(name for name in GOLD if name in only)):
            tried = {lr: self._train(method, lr, "validation", self._args.seeds[0]) for lr in self._args.lr}
            best = max(tried, key=lambda lr: tried[lr])
            for seed in self._args.seeds:
                self._train(method, best, "exam", seed)

    def _train(self, method: str, lr: float, questions: str, seed: int) -> float:
        """Train by a method; returns the accuracy on these questions."""
        train = self._merge if method == OURS else self._use_gold
        result = {"method": method, "lr": lr, "questions": questions, "seed": seed}
        result |= train(method, lr, self._places[questions], seed)
        if method != OURS:
            ours = next(r for r in self.results if r["questions"] == questions)["accuracy"]
            result["accuracy"] = {**ours, "after": result["accuracy"]}
        result["headroom"] = find_headroom(result["accuracy"], self._size.domain)
        self.results.append(result)
        save(self._args, "alone", self.results)
        print(f"{method}, lr {lr:g}, {questions}, seed {seed}: {describe(result, self._size.domain)}", flush=True)
        return float(result["accuracy"]["after"][self._size.domain])

    def _merge(self, method: str, lr: float, where: Place, seed: int) -> dict[str, Any]:
        outcome = merge(where, Variant(f"{method}-{lr:g}", (f"trainer.lr={lr:g}",)), seed, ())
        return {"accuracy": outcome.accuracy, "tokens": outcome.tokens, "wall_s": outcome.wall_s}

    def _use_gold(self, method: str, lr: float, where: Place, seed: int) -> dict[str, Any]:
        began, size = time.monotonic(), self._size
        name = f"{method.replace(', ', '-')}-{lr:g}-{seed}"
        rows = [json.loads(line) for line in self._prompts.read_text(encoding="utf-8").splitlines()]
        prompts = [row["prompt"] for row in rows]
        if where is self._places["validation"]:
            prompts = [prompt for prompt in prompts if not is_held_out(prompt, HOLDOUT)]
        prompts_file, options_file, log = (where.runs / f"{name}{end}" for end in ("-prompts.json", ".json", ".log"))
        prompts_file.write_text(json.dumps(prompts), encoding="utf-8")
        pipeline = yaml.safe_load(where.pipeline.read_text(encoding="utf-8"))
        options = GoldOptions(
            student=str(where.cwd / self._student),
            teacher=str(self._expert),
            prompts=str(prompts_file),
            output=str(where.runs / name),
            settings=GOLD[method],
            steps=size.steps,
            samples=size.samples,
            lr=lr,
            warmup_steps=pipeline["trainer"]["warmup_steps"],
            min_lr_ratio=pipeline["trainer"]["min_lr_ratio"],
            max_new_tokens=pipeline["rollout"]["max_new_tokens"],
            seed=seed,
        )
        output, report = Path(options.output), where.runs / f"{name}-exam.json"
        claim(output, asdict(options))
        if not (output / gold.TOKENS).exists():
            options_file.write_text(json.dumps(asdict(options)), encoding="utf-8")
            with log.open("a") as lines:
                command = [self._args.trl_python, "-m", "benchmarks.gold", str(options_file)]
                done = subprocess.run(command, cwd=ROOT, stdout=lines, stderr=subprocess.STDOUT, check=False)
            if done.returncode:
                raise SystemExit("\n".join(log.read_text(encoding="utf-8").splitlines()[-12:]))
        if not report.exists():
            words = ["evaluate", str(output), "--pipeline", str(where.pipeline), "--output", str(report)]
            opd(log, where.cwd, *words)
        return {
            "accuracy": json.loads(report.read_text(encoding="utf-8"))["accuracy"],
            "tokens": json.loads((output / gold.TOKENS).read_text(encoding="utf-8")),
            "wall_s": round(time.monotonic() - began, 1),
        }


def save(args: argparse.Namespace, part: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Write what is known so far."""
    if args.json is not None:
        facts = machine(os.cpu_count() or 1, "torch", "transformers", "deepspeed", "ray")
        args.json.write_text(json.dumps({"machine": facts, part: list(results)}, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["merge", "alone"], default="merge")
    parser.add_argument("--domain", default=FULL.domain, help="the domain whose expert has other tokens")
    parser.add_argument(
        "--tokens", type=int, default=FULL.tokens, help="ids of the new tokenizer; 260: one for each byte"
    )
    parser.add_argument("--rows", type=int, default=FULL.rows, help="rows of the new expert; `walk` has 3,300")
    parser.add_argument("--only", nargs="*", default=[], help="names of forms or methods; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--lr", nargs="+", type=float, default=[1.0e-3, 2.0e-3, 4.0e-3], help="rates that `alone` tries"
    )
    parser.add_argument("--trl-python", help="an interpreter with TRL 1.16, for `alone`; default: our loss only")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the pipeline in `merge`")
    parser.add_argument("--folder", type=Path, default=Path("runs/tokenizers"), help="models, run directories and logs")
    parser.add_argument("--json", type=Path, help="write all figures here, after every model")
    parser.add_argument("--quick", action="store_true", help="tiny models and two steps: does everything run?")
    args = parser.parse_args()
    size = QUICK if args.quick else replace(FULL, domain=args.domain, tokens=args.tokens, rows=args.rows)
    with open_place(args, size) as (where, data):
        expert = Path(data["experts"][size.domain]["model"])
        files = {name: where.cwd / domain["prompts"] for name, domain in data["domains"].items()}
        retrained = train_expert(where, expert, files, size)
        if args.part == "merge":
            permuted = permute_ids(expert, where.runs / "permuted")
            results = merge_all(args, where, size, {AS_IT_IS: expert, PERMUTED: permuted, RETRAINED: retrained})
            key = "variant"
        else:
            alone = Alone(args, where, size, data, retrained)
            alone.compare()
            results, key = [result for result in alone.results if result["questions"] == "exam"], "method"
    for name in dict.fromkeys(result[key] for result in results):
        shares = [r["headroom"] for r in results if r[key] == name and r["headroom"] is not None]
        print(f"{name:16} headroom {format_or_dash(fmean(shares) if shares else None, '.3f')} of {len(shares)} seeds")


if __name__ == "__main__":
    sys.exit(main())
