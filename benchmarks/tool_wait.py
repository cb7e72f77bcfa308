"""Do slow tools idle the engine? Tokens a second of 64 episodes whose tool sleeps, against the same episodes without the sleep.

    python -m benchmarks.tool_wait --json tool_wait.json
    python -m benchmarks.tool_wait --quick

    episode 1   turn · tool ······· turn      · tool ·······        turns of varied length: some episode is always at the engine
    episode 2   turn      · tool ······· turn · tool ·······
    engine      ██████████▓▓▓▓▓▓████████████

The rollout worker's own vLLM engine plays whole episodes by `VLLMWorker.episodes`, as in a step of training. Turns are *varied*: a
share of all ids ends a turn, so its length is geometric; or *even*: all turns are equally long, so all episodes begin in step
and every tool sleeps at the same time, which is the worst that there is. A round plays each way once from an empty cache
and with the same seeds, who is first changes from round to round, ratios are taken within a round, figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import add_dtype, machine
from benchmarks.merging.inputs import random_model
from opd.records.environments import Action, Outcome
from opd.records.episodes import EpisodeStats
from opd.records.types import Prompt
from opd.rollouts.episodes.spec import EpisodeOptions, EpisodeRequest
from opd.rollouts.episodes.trace import EpisodeKey

LENGTHS = ("varied", "even")
SLEEPS, AT_ONCE = "sleeps", "at once"
WAYS = (AT_ONCE, SLEEPS)
TOLD = " done. "
"""Text that the tool gives back."""
LONGEST = 3
"""A turn of varied length has at most so many times the mean."""


@dataclass(frozen=True)
class Case:
    """Contents of a step."""

    episodes: int
    turns: int
    turn_tokens: int
    """Mean of a turn."""
    prompt_tokens: int
    sleep_s: float
    dtype: str
    vocab_size: int

    def most(self, lengths: str) -> int:
        """Tokens of the longest turn."""
        return self.turn_tokens * (LONGEST if lengths == "varied" else 1)

    def ends(self, lengths: str) -> list[int]:
        """The ids that end a turn."""
        return list(range(0, self.vocab_size, self.turn_tokens)) if lengths == "varied" else []

    @property
    def context(self) -> int:
        """Tokens of the longest episode."""
        return self.prompt_tokens + self.turns * (self.most("varied") + len(TOLD))

    def requests(self, lengths: str, way: str, number: int) -> list[EpisodeRequest]:
        """A round's episodes: the same ones for both ways."""
        rng = random.Random(number)
        options = EpisodeOptions(
            environment="benchmarks.tool_wait:Tool",
            options={"turns": self.turns, "sleep_s": self.sleep_s if way == SLEEPS else 0.0},
            max_turns=self.turns,
            max_turn_tokens=self.most(lengths),
            step_timeout_s=60.0,
            max_broken=0.0,
        )
        names = [f"{number}/{episode}" for episode in range(self.episodes)]
        texts = ["".join(rng.choices(string.ascii_lowercase, k=self.prompt_tokens)) for _ in names]
        return [
            EpisodeRequest(
                prompt=Prompt(id=name, domain="tool", token_ids=(1,), text=text),
                sample=EpisodeKey(sample_id=name, group=name, step=1, domain="tool"),
                options=options,
                seed=0,
            )
            for name, text in zip(names, texts, strict=True)
        ]


class Tool:
    """Sleeps after each turn but the last."""

    tools = ()

    def __init__(self, turns: int, sleep_s: float) -> None:
        self._left, self._sleep_s = turns, sleep_s

    def reset(self, metadata: Mapping[str, Any], seed: int) -> str:
        return ""

    def step(self, action: Action) -> Outcome:
        self._left -= 1
        if not self._left:
            return Outcome(done=True)
        time.sleep(self._sleep_s)
        return Outcome(observation=TOLD)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Time:
    """One way in one round."""

    lengths: str
    way: str
    tokens: int
    """Tokens that the policy wrote."""
    wall_s: float
    engine_s: float
    """Time that the engine was at work."""
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.wall_s

    @property
    def idle(self) -> float:
        """Share of the time in which the engine had nothing to do."""
        return 1 - self.engine_s / self.wall_s


class Engine:
    """The rollout worker, and how long its engine is at work."""

    def __init__(self, case: Case, lengths: str, model_dir: Path) -> None:
        from opd.rollouts.processes import ENGINE_ENV

        os.environ.update(ENGINE_ENV | {"VLLM_CPU_KVCACHE_SPACE": "2"})
        from opd.rollouts.worker import EngineOptions, VLLMWorker

        self._case, self._lengths, self._busy_s = case, lengths, 0.0
        options = EngineOptions(
            model_dir=model_dir,
            dtype=case.dtype,
            max_model_len=case.context,
            max_num_seqs=256,
            gpu_memory_utilization=0.5,
            vocab_size=case.vocab_size,
        )
        self._worker = VLLMWorker(options, case.ends(lengths))
        self._step = self._worker._llm.llm_engine.step
        self._worker._llm.llm_engine.step = self._timed
        self.measure(SLEEPS, -1)

    def _timed(self) -> Any:
        began = time.perf_counter()
        try:
            return self._step()
        finally:
            self._busy_s += time.perf_counter() - began

    def measure(self, way: str, number: int) -> Time:
        requests = self._case.requests(self._lengths, way, number)
        assert self._worker._llm.reset_prefix_cache(), "both ways begin with an empty cache"
        self._busy_s, wall, cpu = 0.0, time.perf_counter(), time.process_time()
        results = self._worker.episodes(requests, 1.0, 0)
        wall, cpu, stats = time.perf_counter() - wall, time.process_time() - cpu, EpisodeStats.from_results(results)
        assert stats.stop_reasons == {"done": len(requests)}, stats
        found = Time(self._lengths, way, stats.audit.sampled, wall, self._busy_s, cpu)
        print(f"{found.lengths}, {way}: {found.rate:,.0f} tokens/s, engine idle {found.idle:.0%}", file=sys.stderr)
        return found


def measure(case: Case, model_dir: Path, rounds: int) -> list[Time]:
    """All rounds; an engine for each kind of turns, whose first play is not counted."""
    times = []
    for lengths in LENGTHS:
        engine = Engine(case, lengths, model_dir)
        for number in range(rounds):
            times += [engine.measure(way, number) for way in (WAYS if number % 2 == 0 else WAYS[::-1])]
        del engine
    return times


def summary(times: Sequence[Time]) -> dict[str, Any]:
    """Medians for each kind of turns; `ratio` is tokens/s with the sleep, of those without."""
    found: dict[str, Any] = {}
    for lengths in dict.fromkeys(t.lengths for t in times):
        by_way = {way: [t for t in times if (t.lengths, t.way) == (lengths, way)] for way in WAYS}
        pairs = zip(by_way[SLEEPS], by_way[AT_ONCE], strict=True)
        found[lengths] = {
            way: {
                "tokens": statistics.median(t.tokens for t in mine),
                "tokens_per_s": statistics.median(t.rate for t in mine),
                "engine_idle": statistics.median(t.idle for t in mine),
                "cpu_s": statistics.median(t.cpu_s for t in mine),
            }
            for way, mine in by_way.items()
        } | {"ratio": statistics.median(with_it.rate / without.rate for with_it, without in pairs)}
    return found


def show(found: Mapping[str, Any], case: Case) -> None:
    print(f"{case.episodes} episodes of {case.turns} turns of {case.turn_tokens} tokens, {case.dtype}\n")
    print("| Turns | Tool | Tokens/s | Of those without a sleep | Engine idle |\n| --- | --- | --- | --- | --- |")
    for lengths, part in found.items():
        for way, said, ratio in (
            (AT_ONCE, "answers at once", ""),
            (SLEEPS, f"sleeps {1000 * case.sleep_s:.0f} ms", f"{part['ratio']:.2f}"),
        ):
            one = part[way]
            print(f"| {lengths} | {said} | {one['tokens_per_s']:,.0f} | {ratio} | {one['engine_idle']:.0%} |")


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokens a second with a tool that sleeps, against one that does not; never a verdict.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a tiny model, one round: does everything run?")
    add("--model-dir", type=Path, help="default: random weights of SmolLM2-135M's shape")
    add("--episodes", type=int, default=64, help="at once")
    add("--turns", type=int, default=6, help="in each")
    add("--turn-tokens", type=int, default=24, help="mean")
    add("--prompt-tokens", type=int, default=100)
    add("--sleep-ms", type=int, default=200)
    add_dtype(parser)
    add("--rounds", type=int, default=3)
    add("--json", type=Path, help="write all figures here")
    return parser.parse_args(given)


def model(args: argparse.Namespace, folder: str) -> tuple[Path, int]:
    """A directory with model and tokenizer, and the number of ids."""
    from transformers import AutoTokenizer

    from experts.suites.letters import build_tokenizer

    if args.model_dir:
        return args.model_dir, len(AutoTokenizer.from_pretrained(args.model_dir))
    build_tokenizer().save_pretrained(folder)
    return Path(folder), random_model(Path(folder), args.dtype, tiny=args.quick)


def main() -> None:
    args = parse_args()
    if args.quick:
        args.turns, args.rounds = 3, 1
    facts = machine(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), "torch", "transformers")
    with tempfile.TemporaryDirectory(prefix="opd-tool-wait-") as folder:
        model_dir, vocab_size = model(args, folder)
        case = Case(
            episodes=args.episodes,
            turns=args.turns,
            turn_tokens=args.turn_tokens,
            prompt_tokens=args.prompt_tokens,
            sleep_s=args.sleep_ms / 1000,
            dtype=args.dtype,
            vocab_size=vocab_size,
        )
        times = measure(case, model_dir, args.rounds)
    found = summary(times)
    show(found, case)
    facts["model"] = args.model_dir.name if args.model_dir else "random weights"
    facts["load_after"] = os.getloadavg()
    print(facts)
    if args.json:
        figures = {"machine": facts, "case": asdict(case), "summary": found, "times": [asdict(t) for t in times]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
