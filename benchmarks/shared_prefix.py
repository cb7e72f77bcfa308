"""Several responses to one prompt, the prompt computed once, against as many separate rows: rollouts, scoring, training.

    python -m benchmarks.shared_prefix --json shared_prefix.json
    python -m benchmarks.shared_prefix --quick

The same responses both ways. *Rollouts*: our vLLM worker, n requests with one prompt against n prompts of the same length.
*Scoring*: our scorer with the layout `shared` against `packed`. *Training*: forward and backward of our student with the exact
reverse KL, the same two layouts, micro-batch by micro-batch as the trainer plans them; no ZeRO, no optimiser. A round measures
each way once, who is first changes from round to round, ratios are taken within a round, figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import add_dtype, machine
from benchmarks.merging.inputs import random_model

SHARED, SEPARATE = "shared", "separate"
LAYOUT = {SHARED: "shared", SEPARATE: "packed"}
WAYS = (SHARED, SEPARATE)


@dataclass(frozen=True)
class Case:
    """Contents of a step."""

    prompts: int
    n: int
    prompt_tokens: int
    new_tokens: int
    dtype: str
    micro_batch_tokens: int
    vocab_size: int

    def rollouts(self, seed: int) -> list[Any]:
        """Random tokens, `n` responses to each prompt."""
        from opd.records.types import Rollout

        rng = random.Random(seed)

        def draw(num: int) -> tuple[int, ...]:
            return tuple(rng.choices(range(self.vocab_size), k=num))

        prompts = [draw(self.prompt_tokens) for _ in range(self.prompts)]
        return [
            Rollout.from_tokens(f"{p:04}#{i}", prompt, draw(self.new_tokens))
            for p, prompt in enumerate(prompts)
            for i in range(self.n)
        ]


@dataclass(frozen=True)
class Time:
    """One way in one round."""

    phase: str
    way: str
    wall_s: float
    cpu_s: float
    tokens: int
    """Prompt and response tokens that the way has to compute."""


def timed(phase: str, way: str, tokens: int, work: Callable[[], Any]) -> tuple[Time, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    found = Time(phase, way, time.perf_counter() - wall, time.process_time() - cpu, tokens)
    print(f"{phase}, {way}: {found.wall_s:.2f} s, {found.cpu_s:.2f} s of CPU, {tokens:,} tokens", file=sys.stderr)
    return found, result


def sizes(rollouts: Sequence[Any], way: str) -> list[Any]:
    from opd.train.plan import measure_row_sizes

    return measure_row_sizes(rollouts, share=way == SHARED)


class Rollouts:
    """The rollout engine."""

    def __init__(self, case: Case, model_dir: Path) -> None:
        from opd.rollouts.processes import ENGINE_ENV

        os.environ.update(ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": "2"})
        from opd.rollouts.worker import EngineOptions, VLLMWorker

        self._case = case
        options = EngineOptions(
            model_dir=model_dir,
            dtype=case.dtype,
            max_model_len=case.prompt_tokens + case.new_tokens,
            max_num_seqs=256,
            gpu_memory_utilization=0.5,
            vocab_size=case.vocab_size,
            share_prompts=True,
        )
        self._worker = VLLMWorker(options, ())
        for way in WAYS:
            self.measure(way, -1)

    def measure(self, way: str, number: int) -> Time:
        from opd.rollouts.worker import GenerateRequest

        case = self._case
        given = replace(case, prompts=case.prompts * case.n, n=1) if way == SEPARATE else case
        rollouts = given.rollouts(1000 + 2 * number + WAYS.index(way))  # prompts that are in no cache
        requests = [
            GenerateRequest(token_ids=r.prompt_ids, max_tokens=case.new_tokens, temperature=1.0, seed=i)
            for i, r in enumerate(rollouts)
        ]
        tokens = sum(row.length for row in sizes(rollouts, way))
        return timed("rollouts", way, tokens, lambda: self._worker.generate(requests))[0]


class Passes:
    """Scorer and student, both with the same weights."""

    def __init__(self, case: Case, model_dir: Path) -> None:
        import torch

        from opd.losses.reverse_kl import ReverseKLConfig
        from opd.models.weights import load_causal_lm
        from opd.records.types import Teacher
        from opd.train.student import Student
        from teachers.scorers import ScorerOptions
        from teachers.scorers.transformers import TransformersScorer

        self._case, self._teacher = case, Teacher(name="t", model_dir=model_dir)
        options = ScorerOptions(dtype=case.dtype, payload="hidden_states", top_k=1, vocab_size=case.vocab_size)
        self._scorers = {way: TransformersScorer(replace(options, share_prompts=way == SHARED)) for way in WAYS}
        for way, scorer in self._scorers.items():
            found = scorer.layout(self._teacher).layout
            if found != LAYOUT[way]:
                raise SystemExit(f"{model_dir}: the layout is {found}, so there is nothing to compare")
        self._dtype = getattr(torch, case.dtype)
        section = ReverseKLConfig(kind="reverse_kl")
        lm = load_causal_lm(model_dir, self._dtype)
        self._student = Student(lm, section.build(), chunk=section.chunk, vocab_size=case.vocab_size)
        for way in WAYS:
            warm_up = replace(case, prompts=1).rollouts(-1)
            self._train(way, warm_up, self._score(way, warm_up))

    def measure(self, way: str, number: int) -> tuple[Time, Time, float]:
        """Scoring, training, and the loss."""
        rollouts = self._case.rollouts(number)
        tokens = sum(row.length for row in sizes(rollouts, way))
        scored, rows = timed("scoring", way, tokens, lambda: self._score(way, rollouts))
        trained, loss = timed("training", way, tokens, lambda: self._train(way, rollouts, rows))
        return scored, trained, loss

    def _score(self, way: str, rollouts: Sequence[Any]) -> dict[str, Any]:
        batches = self._scorers[way].score(self._teacher, rollouts, {})
        return {row.rollout.sample_id: row for rows in batches for row in rows}

    def _train(self, way: str, rollouts: Sequence[Any], rows: dict[str, Any]) -> float:
        from opd.models.heads import Head
        from opd.train.batch import build_micro_batch
        from opd.train.plan import plan_micro_batches
        from opd.train.totals import token_weights, weigh_rows

        scorer = self._scorers[way]
        # An expert that differs: its head is ours from the last row to the first, so the loss has something to say.
        head = Head(scorer.head(self._teacher).flip(0), scorer.head_rule(self._teacher))
        heads = {scorer.head_key(self._teacher): head}
        weights = weigh_rows(rollouts, "token_mean", {})
        total = 0.0
        (plan,) = plan_micro_batches(sizes(rollouts, way), 1, self._case.micro_batch_tokens)
        for ids in plan:
            batch = build_micro_batch([(rows[i],) for i in ids], self._dtype, None, LAYOUT[way])
            loss, _ = self._student(batch, heads, {"divergence": token_weights(batch, [weights[i] for i in ids])})
            loss.backward()
            total += float(loss.detach())
        self._student.zero_grad()
        return total


def summary(times: Sequence[Time], losses: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians by phase, and how far the two losses of a round are apart."""
    found: dict[str, Any] = {}
    for phase in dict.fromkeys(t.phase for t in times):
        by_way = {way: [t for t in times if (t.phase, t.way) == (phase, way)] for way in WAYS}
        pairs = list(zip(by_way[SEPARATE], by_way[SHARED], strict=True))
        found[phase] = {
            **{
                way: {
                    "wall_s": statistics.median(t.wall_s for t in mine),
                    "cpu_s": statistics.median(t.cpu_s for t in mine),
                    "tokens": mine[0].tokens,
                }
                for way, mine in by_way.items()
            },
            "speedup": statistics.median(a.wall_s / b.wall_s for a, b in pairs),
            "speedup_cpu": statistics.median(a.cpu_s / b.cpu_s for a, b in pairs),
        }
    return found | {"largest_loss_difference": max(abs(a - b) / abs(b) for a, b in losses)}


def show(found: dict[str, Any], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("phase", title=title)
    for name in ("shared, tokens", "separate, tokens", "shared, s", "separate, s", "separate / shared", "by CPU time"):
        table.add_column(name, justify="right")
    for phase, part in found.items():
        if isinstance(part, dict):
            shared, separate = part[SHARED], part[SEPARATE]
            table.add_row(
                phase,
                *(f"{one['tokens']:,}" for one in (shared, separate)),
                *(f"{one['wall_s']:.2f}" for one in (shared, separate)),
                f"{part['speedup']:.2f}",
                f"{part['speedup_cpu']:.2f}",
            )
    Console().print(table)
    print(f"losses of the two ways differ by {found['largest_loss_difference']:.1e} of their value at most")


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Several responses a prompt, the prompt computed once; never a verdict.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, one round: does everything run?")
    add("--model-dir", type=Path, help="default: random weights of SmolLM2-135M's shape")
    add("--prompts", type=int, default=16, help="in a step")
    add("--n", type=int, default=4, help="responses to each")
    add("--prompt-tokens", type=int, default=150)
    add("--new-tokens", type=int, default=8)
    add_dtype(parser)
    add("--micro-batch-tokens", type=int, default=4096)
    add("--rounds", type=int, default=5)
    add("--json", type=Path, help="write all figures here")
    return parser.parse_args(given)


def model(args: argparse.Namespace, folder: str) -> tuple[Path, int]:
    """A directory with the model, and its rows of ids."""
    from transformers import AutoConfig

    if args.model_dir:
        return args.model_dir, AutoConfig.from_pretrained(args.model_dir).vocab_size
    return Path(folder), random_model(Path(folder), args.dtype, tiny=args.quick)


def measure(case: Case, model_dir: Path, rounds: int) -> tuple[list[Time], list[tuple[float, float]]]:
    """All rounds: the engine's first, so that it and the passes do not share the machine."""
    times: list[Time] = []
    losses: list[tuple[float, float]] = []
    engine = Rollouts(case, model_dir)
    for number in range(rounds):
        times += [engine.measure(way, number) for way in (WAYS if number % 2 == 0 else WAYS[::-1])]
    del engine
    passes = Passes(case, model_dir)
    for number in range(rounds):
        by_way: dict[str, float] = {}
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            scored, trained, by_way[way] = passes.measure(way, number)
            times += [scored, trained]
        losses.append((by_way[SHARED], by_way[SEPARATE]))
    return times, losses


def main() -> None:
    args = parse_args()
    if args.quick:
        args.prompts, args.rounds, args.micro_batch_tokens = 4, 1, 512
    facts = machine(os.cpu_count() or 1, "torch", "transformers")
    with tempfile.TemporaryDirectory(prefix="opd-shared-") as folder:
        model_dir, vocab_size = model(args, folder)
        case = Case(
            prompts=args.prompts,
            n=args.n,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            dtype=args.dtype,
            micro_batch_tokens=args.micro_batch_tokens,
            vocab_size=vocab_size,
        )
        times, losses = measure(case, model_dir, args.rounds)
    found = summary(times, losses)
    title = (
        f"{case.prompts} prompts of {case.prompt_tokens} tokens, {case.n} responses of {case.new_tokens}, {case.dtype}"
    )
    show(found, f"{title}; medians of {args.rounds} rounds")
    facts["model"] = args.model_dir.name if args.model_dir else "random weights"
    facts["load_after"] = os.getloadavg()
    print(facts)
    if args.json:
        figures = {"machine": facts, "case": asdict(case), "summary": found, "times": [asdict(t) for t in times]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
