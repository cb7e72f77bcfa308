"""A step's timeline without cores: how many parts of scored rows the driver takes while a round of micro-batches trains.

    python -m benchmarks.timeline --json timeline.json

The order of rows, their division among scorers, the plan of micro-batches, the queue and the feed are the merge's own. Scorers and ranks are
clocks: a scorer computes a batch in its tokens over a rate, and answers as many parts ahead as the pool asks for; ranks train round after
round.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from opd.config import PipelineConfig, has_short_first_round, load_pipeline
from opd.records.types import Rollout, Teacher
from opd.train.feed import Feed
from opd.train.plan import measure_row_sizes, plan_micro_batches
from pipelines.catalog import find_pipeline
from pipelines.plan.models import read_models
from pipelines.sizing.auto import choose_numbers
from teachers.pool import PARTS_AHEAD
from teachers.scorers import SCORE_TOKENS
from teachers.scorers.rows import split_batches
from teachers.shares import assign_rows

PROMPT, RESPONSE = 300, 2048
"""Tokens of each row of workload W: 512 of them in ten domains, whose experts are adapters of one base of 7 billion parameters."""
SCORED, TRAINED = 40_000, 8_000
"""Tokens a second of one scorer and of one rank."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step."""

    micro_batch_tokens: int
    queue: int
    """Bytes."""
    rounds: int
    parts: int
    overlapped: int
    """Parts that were taken while a round trained."""
    first: int
    """Parts that were taken before the first round could begin."""
    step_s: float
    """From the first request to the end of the last round."""
    apart_s: float
    """The same if scoring ended before training began."""


def workload(*changes: str) -> PipelineConfig:
    """W on eight GPUs for each role, with every number that is not in `changes` chosen for machines of unknown memory."""
    sizes = (
        "teachers.workers=8",
        "trainer.ranks=8",
        "trainer.samples_per_step=512",
        f"rollout.max_new_tokens={RESPONSE}",
        "rollout.sleep=false",
        *(f"cluster.{role}_gpus=1" for role in ("rollout", "teacher", "trainer")),
    )
    config = load_pipeline(find_pipeline("merge-7b"), [*sizes, *changes])
    return choose_numbers(config, read_models(config).merge, None)


def simulate_step(config: PipelineConfig, scored: float = SCORED, trained: float = TRAINED) -> Timeline:
    """Return the timeline of a step of W. `scored`, `trained`: tokens a second of a scorer and of a rank."""
    rollouts = make_rollouts(config)
    ranks, workers = config.trainer.ranks, config.teachers.scoring_workers
    plan = plan_micro_batches(
        measure_row_sizes(rollouts), ranks, config.trainer.micro_batch_tokens, short_first=has_short_first_round(config)
    )
    clock = _Clock()
    targets = _Scorers(clock, rollouts, workers, scored, a_token=2 * 3584)
    fed: Any = targets
    feed = Feed(fed, plan, queue_bytes=config.teachers.queue)
    tokens = {r.sample_id: len(r.prompt_ids) + len(r.response_ids) for r in rollouts}
    rounds = [max(sum(tokens[i] for i in part[index]) for part in plan) / trained for index in range(len(plan[0]))]
    running: list[int] = []

    def finish_oldest() -> bool:
        if not running:
            return False
        index = running.pop(0)
        clock.now = max(clock.now, clock.ends[index])
        feed.mark_trained(index)
        return True

    first = 0
    for index, seconds in enumerate(rounds):
        feed.send_rows(index, finish_oldest)
        first = first or targets.taken
        clock.ends.append(max(clock.now, clock.ends[-1] if clock.ends else 0.0) + seconds)
        running.append(index)
    return Timeline(
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        queue=config.teachers.queue,
        rounds=len(rounds),
        parts=targets.taken,
        overlapped=targets.overlapped,
        first=first,
        step_s=clock.ends[-1],
        apart_s=targets.alone_s + sum(rounds),
    )


def make_rollouts(config: PipelineConfig) -> list[Rollout]:
    """The rows of a step, spread over the domains."""
    names = list(config.domains)
    return [
        Rollout.from_tokens(f"{names[i % len(names)]}-{i}", (1,) * PROMPT, (1,) * RESPONSE, names[i % len(names)])
        for i in range(config.trainer.samples_per_step)
    ]


@dataclass(kw_only=True)
class _Clock:
    now: float = 0.0
    ends: list[float] = field(default_factory=list)
    """Time at which each round ends."""


class _Scorers:
    """A stream of parts, as the pool and its workers make it: a row is a part, since its states are larger than one."""

    def __init__(self, clock: _Clock, rollouts: Sequence[Rollout], workers: int, rate: float, *, a_token: int) -> None:
        self._clock, self._a_token = clock, a_token
        base = Path("base")
        groups = [
            (Teacher(name=d, model_dir=base, adapter_dir=Path(d), digest=d, base_digest="base"), 1.0, tuple(rows))
            for d, rows in _by_domain(rollouts).items()
        ]
        shares = assign_rows(groups, workers, lambda group: list(split_batches(group[2], SCORE_TOKENS)))
        self._rows: list[list[tuple[Rollout, float]]] = [_costs(share, rate) for share in shares]
        self.alone_s = max(sum(cost for _, cost in rows) for rows in self._rows)
        self._free, self._asked = [0.0] * workers, [[0.0] * PARTS_AHEAD for _ in range(workers)]
        self._place = [0] * workers
        self._here: Counter[str] = Counter()
        self.taken, self.overlapped, self.arrived = 0, 0, False

    def _ready(self, worker: int) -> float:
        """Return the time when the worker's next part is there: it begins when it was asked, and has answered the part before."""
        _, cost = self._rows[worker][self._place[worker]]
        return max(self._free[worker], self._asked[worker][0]) + cost

    def take_part(self) -> Any:
        busy = [w for w, rows in enumerate(self._rows) if self._place[w] < len(rows)]
        if not busy:
            self.arrived = True
            return None
        ready = {worker: self._ready(worker) for worker in busy}
        waiting = [worker for worker in busy if ready[worker] <= self._clock.now]
        worker = min(waiting, key=lambda w: self._place[w]) if waiting else min(busy, key=lambda w: ready[w])
        self._clock.now = max(self._clock.now, ready[worker])
        row, _ = self._rows[worker][self._place[worker]]
        self._free[worker] = ready[worker]
        self._asked[worker] = [*self._asked[worker][1:], self._clock.now]
        self._place[worker] += 1
        self._here[row.sample_id] += 1
        self.taken += 1
        self.overlapped += bool(self._clock.ends) and self._clock.ends[-1] > self._clock.now
        return SimpleNamespace(handle=None, nbytes=len(row.response_ids) * self._a_token, samples=(row.sample_id,))

    def has_samples(self, ids: Sequence[str]) -> bool:
        return all(self._here[i] for i in ids)


def _by_domain(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    domains = sorted({r.domain for r in rollouts})
    return {domain: [r for r in rollouts if r.domain == domain] for domain in domains}


def _costs(share: Sequence[tuple[Teacher, float, tuple[Rollout, ...]]], rate: float) -> list[tuple[Rollout, float]]:
    """Rows in the order in which a worker sends them, each with the seconds before it: those of its batch for the first of a batch."""
    costs = []
    for _, _, rows in share:
        for batch in split_batches(rows, SCORE_TOKENS):
            tokens = sum(len(r.prompt_ids) + len(r.response_ids) for r in batch)
            costs += [(row, tokens / rate if index == 0 else 0.0) for index, row in enumerate(batch)]
    return costs


def show_timelines() -> list[Timeline]:
    """Print W with micro-batches of two sizes, each with a queue of 256 MiB and with `auto`."""
    from rich.console import Console
    from rich.table import Table

    table = Table("tokens", "queue GiB", title="A step of W: parts that are taken while a round trains")
    for name in ("rounds", "parts", "before any", "meanwhile", "of the rest", "step s", "apart s"):
        table.add_column(name, justify="right")
    timelines = []
    for tokens in (4096, 16384):
        for queue in ("256MiB", "auto"):
            timeline = simulate_step(workload(f"trainer.micro_batch_tokens={tokens}", f"teachers.queue={queue}"))
            timelines.append(timeline)
            rest = timeline.overlapped / (timeline.parts - timeline.first)
            table.add_row(
                str(tokens), f"{timeline.queue / (1 << 30):.2f}", str(timeline.rounds), str(timeline.parts), str(timeline.first),
                f"{timeline.overlapped} ({timeline.overlapped / timeline.parts:.1%})", f"{rest:.0%}",
                f"{timeline.step_s:.1f}", f"{timeline.apart_s:.1f}",
            )  # fmt: skip
    Console().print(table)
    return timelines


def main() -> None:
    parser = argparse.ArgumentParser(description="How much of a step's scoring is trained meanwhile.")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    timelines = show_timelines()
    if args.json:
        args.json.write_text(json.dumps([asdict(timeline) for timeline in timelines], indent=1) + "\n")


if __name__ == "__main__":
    main()
