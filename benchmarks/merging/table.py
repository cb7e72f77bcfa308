"""The tables: both sides, where their time goes beside the limits, the limits, and what more experts cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.merging.case import (
    LIMITS,
    OURS,
    PARTS,
    SIDES,
    TRL,
    Case,
    Turn,
    by_side,
    floor,
    limits,
    median,
    ratio,
    sharding,
)
from opd.text import format_or_dash

GIB = 2**30
LEAST_BYTES, LEAST = 100 * 2**20, "processes of less than 100 MiB are left out"


@dataclass(frozen=True)
class Measured:
    """A case and all turns that were taken at it."""

    case: Case
    turns: list[Turn]

    def limits(self) -> dict[str, float]:
        return limits([turn for turn in self.turns if turn.side in LIMITS])


def compared(measured: Sequence[Measured]) -> Any:
    """Both sides, a case a line."""
    from rich.table import Table

    table = Table("case", title="Steps, start-up and warm-up left out; medians over rounds")
    for name in (
        "ours, tokens/s", "TRL, tokens/s", "ours / TRL", "ours, s", "TRL, s", "alone, s",
        "ours, peak GiB", "TRL, peak GiB", "ours, start GiB", "TRL, start GiB", "ours, CPU s", "TRL, CPU s", "others",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for one in measured:
        sides = [by_side(one.turns, side) for side in SIDES]
        alone = floor(one.case, one.limits())
        table.add_row(
            one.case.name,
            *(_shown(turns, lambda t: t.rate, ".1f") for turns in sides),
            format_or_dash(ratio(*sides), ".2f"),
            *(_shown(turns, lambda t: t.seconds, ".1f") for turns in sides),
            f"{sum(alone.values()):.1f}" if alone else "-",
            *(_shown(turns, lambda t: t.peak_bytes / GIB, ".2f") for turns in sides),
            *(_shown(turns, lambda t: t.start_peak_bytes / GIB, ".2f") for turns in sides),
            *(_shown(turns, lambda t: sum(s.cpu_s for s in t.steps) / len(t.steps), ".1f") for turns in sides),
            format(max((turn.others for turn in one.turns), default=0.0), ".0%"),
        )
    return table


@dataclass(frozen=True)
class Phase:
    """A phase of one side's step beside what its work takes alone."""

    name: str
    seconds: float
    alone: float | None
    """None where nothing of the phase was measured alone."""
    parts: str
    """Parts of it, with their seconds."""
    sharding: float | None = None
    """Seconds of the rest that our ZeRO engine takes, measured without a loop around it."""


def phases(case: Case, side: str, turns: Sequence[Turn], found: Mapping[str, float]) -> list[Phase]:
    """Each phase of a side and, last, what is in none of them."""
    seconds = floor(case, found)
    shown = []
    for name, parts in PARTS[side].items():
        there = [part for part in parts if part in seconds]
        shown.append(
            Phase(
                name,
                median(turns, _seconds(name)),
                sum(seconds[part] for part in there) if there else None,
                ", ".join(f"{part.replace('_', ' ')} {seconds[part]:.2f}" for part in there),
                sharding(case, found) if (side, name) == (OURS, "train") else None,
            )
        )
    return [*shown, Phase("between phases", median(turns, lambda t: t.outside), None, "")]


def by_phase(measured: Sequence[Measured]) -> Any:
    """Return a table of where a step's time goes."""
    from rich.table import Table

    caption = "alone: the same work at the rate measured alone in the same run; rest: what the loop around it costs, ZeRO: of it"
    table = Table("case", "side", "phase", title="Where the time goes", caption=caption)
    for name in ("s", "of the step", "alone, s", "rest, s", "ZeRO, s"):
        table.add_column(name, justify="right")
    table.add_column("parts alone, s")
    for one in measured:
        for side in SIDES:
            turns = by_side(one.turns, side)
            if not turns:
                continue
            step = median(turns, lambda t: t.seconds)
            found = phases(one.case, side, turns, one.limits())
            for phase in found:
                rest = None if phase.alone is None else phase.seconds - phase.alone
                table.add_row(
                    one.case.name,
                    side,
                    phase.name,
                    f"{phase.seconds:.2f}",
                    f"{100 * phase.seconds / step:.0f} %",
                    format_or_dash(phase.alone, ".2f"),
                    format_or_dash(rest, ".2f"),
                    format_or_dash(phase.sharding, ".2f"),
                    phase.parts,
                    end_section=phase is found[-1],
                )
    return table


LIMIT_COLUMNS = {
    "matmul_gflops": ("matrix product, GFLOP/s", ".0f"),
    "forward_tokens_s": ("forward, tokens/s", ".0f"),
    "forward_gflops": ("GFLOP/s", ".0f"),
    "forward_backward_tokens_s": ("forward + backward, tokens/s", ".0f"),
    "forward_backward_gflops": ("GFLOP/s", ".0f"),
    "loss_tokens_s": ("loss, tokens/s", ".0f"),
    "optimizer_s": ("AdamW, s", ".2f"),
    "engine_tokens_s": ("engine, tokens/s", ".0f"),
    "real_share_of_packed_rows": ("real share of packed rows", ".2f"),
}


def of_limits(measured: Sequence[Measured]) -> Any:
    """Return a table of what was measured alone."""
    from rich.table import Table

    table = Table("case", title="Limits: each part alone, in the same run")
    for title, _ in LIMIT_COLUMNS.values():
        table.add_column(title, justify="right")
    for one in measured:
        found = one.limits()
        table.add_row(
            one.case.name, *(format_or_dash(found.get(name), form) for name, (_, form) in LIMIT_COLUMNS.items())
        )
    return table


def by_process(measured: Sequence[Measured]) -> Any:
    """Return a table of who holds the memory."""
    from rich.table import Table

    table = Table(
        "case", "side", "process", "GiB", title="Most anonymous memory by process, start included", caption=LEAST
    )
    for one in measured:
        for side in SIDES:
            turns = by_side(one.turns, side)
            names = dict.fromkeys(name for turn in turns for name in turn.memory)
            held = {name: median(turns, _held(name)) for name in names}
            for name, most in sorted(held.items(), key=lambda item: -item[1]):
                if most >= LEAST_BYTES:
                    table.add_row(one.case.name, side, name, f"{most / GIB:.2f}")
    return table


def of_experts(measured: Sequence[Measured]) -> Any:
    """Return a table of what more experts cost."""
    from rich.table import Table

    table = Table("experts", title=f"Ours with more experts, {measured[0].case.name}")
    for name in ("tokens/s", "/ one expert", "s", *PARTS[OURS], "peak GiB"):
        table.add_column(name, justify="right")
    base = next((m.turns for m in measured if m.case.experts == 1), [])
    for one in measured:
        turns = by_side(one.turns, OURS)
        table.add_row(
            str(one.case.experts),
            _shown(turns, lambda t: t.rate, ".1f"),
            format_or_dash(ratio(turns, base), ".2f"),
            _shown(turns, lambda t: t.seconds, ".1f"),
            *(_shown(turns, _seconds(name), ".2f") for name in PARTS[OURS]),
            _shown(turns, lambda t: t.peak_bytes / GIB, ".2f"),
        )
    return table


def _seconds(phase: str) -> Callable[[Turn], float]:
    return lambda turn: turn.phase(phase)


def _held(process: str) -> Callable[[Turn], float]:
    return lambda turn: turn.memory.get(process, 0)


def _shown(turns: Sequence[Turn], value: Callable[[Turn], float], form: str) -> str:
    return format(median(turns, value), form) if turns else "-"


def summary(one: Measured) -> dict[str, Any]:
    """The figures of a case for the JSON file."""
    sides = {side: by_side(one.turns, side) for side in SIDES}
    return {
        "limits": one.limits(),
        "alone_s": floor(one.case, one.limits()),
        "ours_over_trl": ratio(sides[OURS], sides[TRL]),
        **{
            side: {
                "tokens_s": median(turns, lambda t: t.rate),
                "step_s": median(turns, lambda t: t.seconds),
                "peak_bytes": median(turns, lambda t: t.peak_bytes),
                "start_peak_bytes": median(turns, lambda t: t.start_peak_bytes),
                "start_s": median(turns, lambda t: t.start_s),
                "phases": {
                    p.name: {"s": p.seconds, "alone_s": p.alone, "zero_s": p.sharding}
                    for p in phases(one.case, side, turns, one.limits())
                },
            }
            for side, turns in sides.items()
            if turns
        },
    }
